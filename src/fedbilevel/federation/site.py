"""A site's side of a federation: packets in, packets out, its rows stay here.

A site takes part in an exchange, measures at the server's point, and says hello. It
answers every packet but notices; one that does not fit is answered with the reason, and
changes nothing. It executes nothing that it is sent. How much it reports is its own
business: see `SiteLimits` and `SiteLedger`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel._blocks import combine
from fedbilevel._text import shown
from fedbilevel.algorithms import Turn
from fedbilevel.channels import SecureMean
from fedbilevel.federation import wire
from fedbilevel.federation.checkpoints import SiteCheckpoints
from fedbilevel.federation.ledger import SiteLedger, SiteLimits, name_of_reply
from fedbilevel.federation.refusals import RefusedError, refusal_of
from fedbilevel.federation.server.blind_job import algorithm_fingerprint
from fedbilevel.federation.site_work import Draws, SiteWork
from fedbilevel.federation.wire import Bytes, Carried, Header, Seal
from fedbilevel.runtime.exchange import Link, common_leaves, start_kept
from fedbilevel.runtime.job import Job, Kept, Where

if TYPE_CHECKING:
    from fedbilevel.federation.secure.cohorts import Cohorts
    from fedbilevel.federation.secure.site import SiteSecrets
    from fedbilevel.federation.signatures import SiteIdentity

_SHORT = 1 << 20  # bytes of a leaf that is copied rather than kept in its packet
_LONGEST_NAME = 64  # of a federation
_LONGEST_NOTICE = 1 << 13  # bytes
# The fields of a reply besides its leaves, and these.
Said = tuple[Mapping[str, Any] | None, Sequence[np.ndarray]]
# Returns the job that a hello asks for, with the one that is measured, if any is.
Follow = Callable[[Mapping[str, Any]], tuple[Job, Job | None]]


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints that both sides compare: of the settings, and of the algorithm."""

    settings: str
    algorithm: str


class Site:
    """One client of a federation; `job` holds its rows alone, as client 0.

    `facts` are sent to the server when it says hello. With a `folder` what the client
    keeps outlives this process. `holds` says whether this process sees all packets, so
    that the server need not repeat what it sent before. `conclude(state)` returns more
    of a finished run from the server's state with the client's own blocks, stacked.
    `report` gets unforeseen packets, for a person to read. `seal` is how
    it knows the server's packets, and the server its own. `limits` are the operator's.
    With `follow` a server may give steps in its hello; without, such a one is refused.
    With a secure mean the site takes part in sums of `minimum` sites or more, and
    believes the keys of others only if its `identity` knows their signers; its weight
    counts in parts of the `largest_weight`, as was agreed. `source` is the file or
    folder that has its rows, by which its ledger knows them. `is_over` is set once the
    server has said that the federation is.
    """

    def __init__(
        self,
        job: Job,
        client: int,
        fingerprints: Fingerprints,
        *,
        facts: Mapping[str, Any],
        folder: Path | None = None,
        holds: bool = True,
        conclude: Callable[[PyTree], Mapping[str, Any]] | None = None,
        report: Callable[[str], None] = lambda text: None,
        seal: Seal = wire.CHECKSUM,
        limits: SiteLimits | None = None,
        identity: "SiteIdentity | None" = None,
        minimum: int = 2,
        largest_weight: float = 1.0,
        follow: Follow | None = None,
        source: Path | None = None,
    ) -> None:
        self.work, self.client, self.fingerprints = SiteWork(job), client, fingerprints
        self.follow, self._followed = follow, ""
        self.facts, self.folder, self.holds = facts, folder, holds
        self.conclude, self.report, self.seal = conclude, report, seal
        self.identity, self.minimum = identity, minimum
        self.largest_weight = largest_weight
        self.ledger = SiteLedger(job, limits or SiteLimits(), folder, source)
        if remark := self.ledger.remark():
            report(remark)
        self._draws = Draws(client, self.ledger.rows)
        self.checkpoints: dict[str, SiteCheckpoints] = {}
        self.is_over = False
        self._held: dict[str, np.ndarray] = {}
        # The digest of the last request, and its reply.
        self._answered: tuple[Any, bytes] = (None, b"")
        # Under noise, what the last exchange was about, and what came of it.
        self._computed: tuple[str | None, Any] = (None, None)
        self._masks = isinstance(job.channel.reduction, SecureMean)
        self._secrets: dict[str, SiteSecrets] = {}
        self._common: dict[Where, list[bool]] = {}
        shapes = (self.work.state, *self.work.sent.values())
        self.largest = max(map(wire.size_of, shapes)) + wire.SPARE

    def handle(self, packet: Carried) -> bytes:
        """Answer a packet, whatever it holds, or what came in the place of one.

        A packet that arrives a second time, perhaps before its turn, gets the same
        bytes and nothing new; else the first to come would shut out the other.
        """
        header = Header("refused", "", "", "", self.client, 0)
        try:
            header, listed, body = wire.unpack(packet, self.largest, self.seal)
            if header.kind == wire.NOTICE:
                return self._heed(header, packet)
            asked = (header, listed, wire.sha256_of([body]))
            if asked != self._answered[0]:
                self._answered = (asked, self._answer(header, listed, body))
            return self._answered[1]
        except Exception as error:
            refusal, told = refusal_of(error)
            notice = header.kind == wire.NOTICE
            self.report(f"{'notice' if notice else 'packet'} refused: {told}")
            refused = replace(header, kind="refused", info=refusal.sent())
            return b"" if notice else self._reply(refused)

    def _heed(self, header: Header, packet: Carried) -> bytes:
        """Take a notice: the server does not take this node, or the federation is over.

        It is sealed and numbered like other packets, so that no one else can end a
        node, nor with an old one. It needs no answer, and changes nothing that is kept.
        """
        if isinstance(packet, RefusedError) or len(packet) > _LONGEST_NOTICE:
            raise RefusedError("oversized", "a notice is short")
        held = self.checkpoints.get(header.federation)
        if held is None:
            raise RefusedError("federation", "it said no hello")
        held.newest.check(header)
        held.answered(header)
        info = header.info or {}
        if info.get("over") is True:
            self.is_over = True
        else:
            reason = ": ".join(shown(str(info.get(n))) for n in ("reason", "detail"))
            self.report(f"the server does not take this node: {reason}")
        return b""

    def _answer(self, header: Header, listed: list, body: Bytes) -> bytes:
        kinds = {
            "hello": self._hello,
            "exchange": self._exchange,
            "measure": self._measure,
            "conclude": self._conclude,
            "agree": self._agree,
            "reveal": self._reveal,
        }
        if header.kind not in kinds:
            raise RefusedError("garbage", f"kind {header.kind!r:.40} is not known")
        if header.settings != self.fingerprints.settings:
            raise RefusedError(
                "settings", "the server runs with other settings than this site"
            )
        if header.kind != "hello":
            self._check(header)
            # After a new request no earlier answer is needed, and it may be long.
            self._answered = (None, b"")
        info, leaves = kinds[header.kind](header, listed, body)
        # Only a hello came without the algorithm: it asks for it.
        algorithm = self.fingerprints.algorithm
        reply = self._reply(replace(header, algorithm=algorithm, info=info), leaves)
        self.checkpoints[header.federation].answered(header)
        return reply

    def _reply(self, header: Header, leaves: Sequence[np.ndarray] = ()) -> bytes:
        return wire.pack(replace(header, client=self.client), leaves, seal=self.seal)

    def _check(self, header: Header) -> None:
        if header.client != wire.EVERYONE:
            raise RefusedError("client", f"comes from client {header.client}")
        if not wire.in_mask(self.client, header.addressees):
            raise RefusedError("client", "is meant for other clients")
        held = self._checkpoints(header.federation)
        forgot = self.follow is not None and header.federation != self._followed
        if held is None or forgot:
            raise RefusedError("federation", f"{header.federation!r:.40} said no hello")
        if header.algorithm != self.fingerprints.algorithm:
            raise RefusedError(
                "algorithm", "the server built another algorithm than here"
            )
        held.newest.check(header)

    def _checkpoints(self, federation: str) -> SiteCheckpoints | None:
        """Return those of a federation that said hello, maybe before a restart."""
        if federation not in self.checkpoints and _is_name(federation):
            found = self._fresh(federation)
            if found.found:
                self.checkpoints[federation] = found
        return self.checkpoints.get(federation)

    def _fresh(self, federation: str) -> SiteCheckpoints:
        start = start_kept(self.work.job)
        return SiteCheckpoints(start, self.folder, federation, self.client)

    def _hello(self, header: Header, listed: list, body: Bytes) -> Said:
        if listed or body:
            raise RefusedError("oversized", "a hello carries no leaves")
        name = header.federation
        if not _is_name(name):
            raise RefusedError(
                "federation", "its name has other characters than letters and digits"
            )
        held = self._checkpoints(name) or self._fresh(name)
        held.newest.check(header)
        self._take_steps(header)
        if name not in self.checkpoints:
            self.checkpoints = {name: held}
        self._held = {}
        info = {
            "facts": dict(self.facts),
            "holds": self.holds,
            "measures": self.ledger.measures and self.work.seen is not None,
            "concludes": self.ledger.measures and self.conclude is not None,
        }
        if self._masks:
            info |= self._secrets_of(name).introduction()
        return info, jax.tree.leaves((self.work.job.x, self.work.job.y))

    def _take_steps(self, header: Header) -> None:
        """Take the steps that a hello gives, if this site follows any."""
        if self.follow is not None:
            job, seen = self.follow(header.info or {})
            self.work.take(job, seen)
            algorithm = algorithm_fingerprint(job)
            self.fingerprints = replace(self.fingerprints, algorithm=algorithm)
            self._followed = header.federation
        elif header.info:
            raise RefusedError(
                "steps",
                "the server gives steps, which this node takes only with --tune",
            )

    def _exchange(self, header: Header, listed: list, body: Bytes) -> Said:
        where = (header.stage, header.phase)
        if where not in self.work.links or header.exchange < 1:
            raise RefusedError(
                "phase", f"there is no phase {header.phase} in this stage"
            )
        link = self.work.links[where]
        if link.phase.name != header.name:
            raise RefusedError(
                "phase", f"'{header.name:.40}' where '{link.phase.name}' is due"
            )
        sent = wire.unpack_tree(listed, body, self.work.sent[where], self._held)
        self.ledger.limits.check_point(sent)
        checkpoints = self.checkpoints[header.federation]
        base = checkpoints.at(header.accepted)
        names = [wire.digest(leaf) for leaf in jax.tree.leaves(sent)]
        turn = self._draws.turn(self.work.job, header, names)
        before = checkpoints.start if base is None else base
        about = name_of_reply(header, names, self._masks)
        kept, reply, finite = self._given(header, about, (where, sent, before, turn))
        if not finite:
            kept = self._bear(before)
        leaves = jax.tree.leaves(reply)
        if self._masks:
            leaves = self._masked(header, link, (sent, names), reply, turn)
        checkpoints.put(header.exchange, kept, header.kept)
        if self.holds:
            # A short leaf is copied, so that it does not keep its whole packet.
            self._held = {
                name: leaf.copy() if leaf.nbytes < _SHORT else leaf
                for name, leaf in zip(names, jax.tree.leaves(sent), strict=True)
            }
        return {"renewed": base is None}, leaves

    def _bear(self, before: Kept) -> Kept:
        """Return what to keep after a reply that is not finite.

        In the clear it is refused. Under masks or noise it is answered all the same,
        since a refusal would say something about rows; the site's terminal says so.
        """
        what = "the reply computed here holds NaN or infinity"
        if not (self._masks or self.work.is_noisy):
            raise RefusedError("not-finite", what)
        self.report(f"{what}, which counts as 0. Smaller steps are the usual cure.")
        return before

    def _given(
        self, header: Header, about: str, asked: tuple[Where, PyTree, Kept, Turn]
    ) -> tuple[Kept, PyTree, bool]:
        """Return what comes of an exchange, counted before anything of it leaves.

        A repeated request gets the same noise, and no new release.
        """
        if self._computed[0] != about:
            self._computed = (about, self.work.exchange(*asked))
        (where, *_), job, found = asked, self.work.job, self._computed[1]
        if not self.work.is_noisy:
            self._computed = (None, None)  # it would come out the same
        # Under masks a sum of the minimum can be opened, and none of fewer. Without
        # them the server sees the reply, which has this site's share of noise alone.
        cohort = job.cohort(self.work.links[where].phase)
        shares = min(self.minimum, cohort) if self._masks else 1
        told = map(wire.digest, jax.tree.leaves(found[1]))
        self.ledger.exchange(
            self.work.blocks.get(where, 0), shares, header.federation, [about, *told]
        )
        return found

    def _masked(
        self,
        header: Header,
        link: Link,
        sent: tuple[PyTree, list[str]],
        reply: PyTree,
        turn: Turn,
    ) -> list[np.ndarray]:
        """Return the leaves of a reply under its masks.

        `sent` is what this site was sent, and the digests of its leaves.
        """
        from fedbilevel.federation.secure.layout import context_of, question_of

        if link.where not in self._common:
            self._common[link.where] = common_leaves(link.sent_shape())
        point, names = sent
        flags = zip(names, self._common[link.where], strict=True)
        context = context_of(header, [name for name, alike in flags if alike])
        share = float(self.work.job.data.weights[0]) / self.largest_weight
        about = link.known_in_clear(point, turn)
        asked = (context, question_of(header, names))
        secrets = self._secrets_of(header.federation)
        return list(secrets.mask(header.info or {}, *asked, reply, share, about))

    def _agree(self, header: Header, listed: list, body: Bytes) -> Said:
        if not self._masks or listed or body:
            raise RefusedError("mask", "there is nothing to confirm")
        return None, [self._secrets_of(header.federation).confirm(header.info or {})]

    def _reveal(self, header: Header, listed: list, body: Bytes) -> Said:
        if not self._masks:
            raise RefusedError("mask", "there is nothing to reveal")
        secrets = self._secrets_of(header.federation)
        return None, list(secrets.reveal(header.info or {}, listed, body))

    def _measure(self, header: Header, listed: list, body: Bytes) -> Said:
        server, own = self._point(header, listed, body)
        if self.work.seen is None:
            raise RefusedError("measure", "no rows are held out here")
        self.ledger.measure(header, body)
        return None, jax.tree.leaves(self.work.measure(server, own))

    def _conclude(self, header: Header, listed: list, body: Bytes) -> Said:
        server, own = self._point(header, listed, body)
        if self.conclude is None:
            raise RefusedError("garbage", "there is nothing to conclude here")
        self.ledger.conclude(header, body)
        stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], own)
        return dict(self.conclude(combine(server, stacked))), []

    def _point(self, header: Header, listed: list, body: Bytes) -> tuple[Any, Any]:
        """Return the server's state that was sent, and this client's own blocks."""
        server = wire.unpack_tree(listed, body, self.work.state)
        self.ledger.limits.check_point(server)
        checkpoints = self.checkpoints[header.federation]
        kept = checkpoints.at(header.accepted) or checkpoints.start
        return server, kept.own

    def _secrets_of(self, federation: str) -> "SiteSecrets":
        """Return this site's keys; what they need is loaded only if they are."""
        if federation not in self._secrets:
            from fedbilevel.federation.secure.site import SiteSecrets

            rest = (self.folder, self._cohorts, self.identity)
            own = SiteSecrets(federation, self.client, *rest)
            self._secrets = {federation: own}
        return self._secrets[federation]

    @functools.cached_property
    def _cohorts(self) -> "Cohorts":
        """Records of all masked sums, over all federations."""
        from fedbilevel.federation.secure.cohorts import Cohorts

        path = None if self.folder is None else self.folder / "cohorts.jsonl"
        return Cohorts(self.minimum, self.ledger.limits.apart(self.work.job), path)


def _is_name(federation: str) -> bool:
    """Say whether it can name a federation, and the files that are kept of it."""
    plain = federation.isascii() and federation.isalnum()
    return plain and len(federation) <= _LONGEST_NAME
