"""A site's side of a federation: packets in, packets out, its rows stay here.

A site takes part in an exchange, measures at the server's point, and says hello. It
answers every packet; one that does not fit is answered with the reason, and changes
nothing. It executes nothing that it is sent. How much it tells is its own business: see
`SiteLimits` and `SiteLedger`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel._blocks import combine
from fedbilevel.algorithms import Turn
from fedbilevel.channels import SecureMean
from fedbilevel.federation.checkpoints import SiteCheckpoints
from fedbilevel.federation.foreign import shown
from fedbilevel.federation.ledger import SiteLedger
from fedbilevel.federation.limits import SiteLimits
from fedbilevel.federation.noise import SiteNoise
from fedbilevel.federation.server.blind_job import algorithm_fingerprint
from fedbilevel.federation.wire import (
    CHECKSUM,
    EVERYONE,
    Bytes,
    Carried,
    Header,
    RefusedError,
    Seal,
    digest,
    in_mask,
    pack,
    refusal_of,
    sha256_of,
    unpack,
    unpack_tree,
)
from fedbilevel.runtime import keys
from fedbilevel.runtime.exchange import (
    Link,
    client_scalars,
    for_place,
    server_turn,
    start_kept,
)
from fedbilevel.runtime.job import Job, Kept, Where, start_server
from fedbilevel.runtime.privacy import blocks_of, is_noisy

if TYPE_CHECKING:
    from fedbilevel.federation.secure.identity import SiteIdentity
    from fedbilevel.federation.secure.site import SiteSecrets

_SPARE = 1 << 20  # bytes a packet may have beyond its leaves
_SHORT = 1 << 20  # bytes of a leaf that is copied rather than kept in its packet
_LONGEST_NAME = 64  # of a federation
# Returns the job that a hello tells, with the one that is measured, if any is.
Follow = Callable[[Mapping[str, Any]], tuple[Job, Job | None]]


@dataclass(frozen=True)
class Fingerprints:
    """What both sides compare: the settings, and the algorithm that was built."""

    settings: str
    algorithm: str


def links_of(job: Job) -> dict[Where, Link]:
    """Return what happens in each phase, by its stage and number."""
    every = job.every_phase().items()
    return {where: Link.of(job, phase, where) for where, phase in every}


def known_in_clear(link: Link, sent: PyTree, turn: Any) -> PyTree | None:
    """Return what both sides know of what travels back; None where that is zero.

    Of changes, which some channels let travel, nothing is known.
    """
    if link.job.channel.sends_changes:
        return None
    return link.known(jax.tree.map(jnp.asarray, sent), turn)


class Site:
    """One client of a federation; `job` holds its rows alone, as client 0.

    `facts` are told to the server when it says hello. With a `folder` what the client
    keeps outlives this process. `holds` says whether this process sees all packets, so
    that the server need not repeat what it sent before. `conclude(state)` tells more of
    a finished run from the server's state with the client's own blocks, stacked.
    `report` is told of packets that nobody foresaw, for a person to read. `seal` is how
    it knows the server's packets, and the server its own. `limits` are the operator's.
    With `follow` a server may tell steps in its hello; without, such a one is refused.
    With a secure mean the site takes part in sums of `minimum` sites or more, and
    believes the keys of others only if its `identity` knows who signed them.
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
        seal: Seal = CHECKSUM,
        limits: SiteLimits | None = None,
        identity: "SiteIdentity | None" = None,
        minimum: int = 2,
        follow: Follow | None = None,
    ) -> None:
        self.job, self.client, self.fingerprints = job, client, fingerprints
        self.follow, self._followed = follow, ""
        self.facts, self.folder, self.holds = facts, folder, holds
        self.conclude, self.report, self.seal = conclude, report, seal
        self.identity, self.minimum = identity, minimum
        self.ledger = SiteLedger(job, limits or SiteLimits(), folder, client)
        self.checkpoints: dict[str, SiteCheckpoints] = {}
        self._held: dict[str, np.ndarray] = {}
        # The digest of the last request, and its reply.
        self._answered: tuple[Any, bytes] = (None, b"")
        self._arrays, self._static = eqx.partition(job, eqx.is_array)
        self._seen: Job | None = job  # what is measured
        self._programs: dict[Any, Callable] = {}
        self._masks = isinstance(job.channel.reduction, SecureMean)
        self._secrets: dict[str, SiteSecrets] = {}
        self._common: dict[Where, list[bool]] = {}
        privacy = job.channel.privacy
        self._noise = SiteNoise(privacy) if privacy and is_noisy(job) else None
        self._blocks = blocks_of(job) if self._noise else {}
        self._links = links_of(job)
        self._state = jax.eval_shape(start_server, job)
        self._messages = {where: _message(link) for where, link in self._links.items()}
        self._sent = {
            where: jax.eval_shape(job.channel.sent, message)
            for where, message in self._messages.items()
        }
        sizes = [_size(one) for one in (self._state, *self._sent.values())]
        self.largest = max(sizes) + _SPARE

    def handle(self, packet: Carried) -> bytes:
        """Answer a packet, whatever it holds, or what came in the place of one.

        Whoever carries the last one here a second time, perhaps before its turn, gets
        the same bytes and nothing new; else the first to come would shut out the other.
        """
        header = Header("refused", "", "", "", self.client, 0)
        try:
            header, listed, body = unpack(packet, self.largest, self.seal)
            asked = (header, listed, sha256_of([body]))
            if asked != self._answered[0]:
                self._answered = (asked, self._answer(header, listed, body))
            return self._answered[1]
        except Exception as error:
            refusal = refusal_of(error)
            more = "" if refusal is error else f", {shown(str(error))}"
            self.report(f"packet refused: {refusal}{more}")
            info = {"reason": refusal.reason, "detail": refusal.detail}
            return self._reply(replace(header, kind="refused", info=info))

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
            # Whoever asks anew waits for no answer of before, and it may be long.
            self._answered = (None, b"")
        reply = kinds[header.kind](header, listed, body)
        self.checkpoints[header.federation].answered(header)
        return reply

    def _reply(self, header: Header, leaves: Sequence[np.ndarray] = ()) -> bytes:
        return pack(replace(header, client=self.client), leaves, seal=self.seal)

    def _check(self, header: Header) -> None:
        if header.client != EVERYONE:
            raise RefusedError("client", f"comes from client {header.client}")
        if not in_mask(self.client, header.addressees):
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
        start = start_kept(self.job)
        return SiteCheckpoints(start, self.folder, federation, self.client)

    def _hello(self, header: Header, listed: list, body: Bytes) -> bytes:
        if listed or body:
            raise RefusedError("oversized", "a hello carries no leaves")
        name = header.federation
        if not _is_name(name):
            raise RefusedError("federation", "its name is not letters and digits")
        held = self._checkpoints(name) or self._fresh(name)
        held.newest.check(header)
        self._take_steps(header)
        if name not in self.checkpoints:
            self.checkpoints = {name: held}
        self._held = {}
        info = {
            "facts": dict(self.facts),
            "holds": self.holds,
            "measures": self.ledger.measures and self._seen is not None,
            "concludes": self.ledger.measures and self.conclude is not None,
        }
        if self._masks:
            info |= self._secrets_of(name).introduction()
        reply = replace(header, algorithm=self.fingerprints.algorithm, info=info)
        return self._reply(reply, _leaves((self.job.x, self.job.y)))

    def _take_steps(self, header: Header) -> None:
        """Take the steps that a hello tells, if this site follows any."""
        if self.follow is None:
            if header.info:
                raise RefusedError(
                    "steps",
                    "the server tells steps, which this node takes only with --tune",
                )
            return
        job, seen = self.follow(header.info or {})
        before = (self._static, eqx.filter(self._seen, eqx.is_array, inverse=True))
        self._arrays, self._static = eqx.partition(job, eqx.is_array)
        self.job, self._seen, self._links = job, seen, links_of(job)
        after = (self._static, eqx.filter(seen, eqx.is_array, inverse=True))
        if not eqx.tree_equal(before, after):  # else the programs are the same
            self._programs = {}
        self.fingerprints = replace(
            self.fingerprints, algorithm=algorithm_fingerprint(job)
        )
        self._followed = header.federation

    def _exchange(self, header: Header, listed: list, body: Bytes) -> bytes:
        began, where = time.perf_counter(), (header.stage, header.phase)
        if where not in self._links or header.exchange < 1:
            raise RefusedError(
                "phase", f"there is no phase {header.phase} in this stage"
            )
        link = self._links[where]
        if link.phase.name != header.name:
            raise RefusedError(
                "phase", f"'{header.name:.40}' where '{link.phase.name}' is due"
            )
        if not header.kept <= header.accepted < header.exchange:
            raise RefusedError("phase", "comes before the one this client stands after")
        sent = unpack_tree(listed, body, self._sent[where], self._held)
        checkpoints = self.checkpoints[header.federation]
        base = checkpoints.at(header.accepted)
        renewed = base is None
        index = jnp.asarray(header.index, jnp.int32)
        turn = keys.client_turn(self.job.key, where, self.client, index)
        # Before anything is computed: a reply that gets lost was given all the same.
        # Under masks a sum of the minimum can be opened, and none of fewer.
        cohort = self.job.cohort(link.phase)
        shares = min(self.minimum, cohort) if self._masks else cohort
        self.ledger.exchange(self._blocks.get(where, 0), shares)
        kept, reply, finite = self._worked(
            where, sent, checkpoints.start if base is None else base, turn
        )
        if not finite:
            raise RefusedError(
                "not-finite", "the reply computed here holds NaN or infinity"
            )
        leaves = _leaves(reply)
        if self._masks:
            leaves = self._masked(header, link, sent, reply, turn)
        checkpoints.put(header.exchange, kept, header.kept)
        if self.holds:
            self._held = {digest(leaf): _alone(leaf) for leaf in jax.tree.leaves(sent)}
        info = {"renewed": renewed, "seconds": time.perf_counter() - began}
        return self._reply(replace(header, info=info), leaves)

    def _worked(
        self, where: Where, sent: PyTree, kept: Kept, turn: Any
    ) -> tuple[Kept, PyTree, bool]:
        """Return what is kept, what travels, and whether all of it was finite.

        Noise is drawn between two programs, from bits that are no key of either. What
        follows it, which may compress, only sees what may be seen.
        """
        if self._noise is None:
            program = self._program(self._work, where)
            kept, reply, finite = program(self._arrays, sent, kept, turn)
            return kept, reply, bool(finite)
        program = self._program(self._changed, where)
        kept, change, finite = program(self._arrays, sent, kept, turn)
        if not bool(finite):
            return kept, change, False
        released = self._noise.protect(change)
        program = self._program(self._coded, where)
        return *program(self._arrays, released, kept, turn), True

    def _masked(
        self, header: Header, link: Link, sent: PyTree, reply: PyTree, turn: Turn
    ) -> list[np.ndarray]:
        """Return the leaves of a reply under its masks."""
        from fedbilevel.federation.secure.announcement import common_in, context_of

        if link.where not in self._common:
            self._common[link.where] = common_in(link)
        flags = self._common[link.where]
        alike = [leaf for leaf, flag in zip(_leaves(sent), flags, strict=True) if flag]
        context = context_of(header, alike)
        weight = float(self.job.data.weights[0])
        about = known_in_clear(link, sent, turn)
        secrets = self._secrets_of(header.federation)
        return list(secrets.mask(header.info or {}, context, reply, weight, about))

    def _agree(self, header: Header, listed: list, body: Bytes) -> bytes:
        if not self._masks or listed or body:
            raise RefusedError("mask", "there is nothing to confirm")
        tags = self._secrets_of(header.federation).confirm(header.info or {})
        return self._reply(replace(header, info=None), [tags])

    def _reveal(self, header: Header, listed: list, body: Bytes) -> bytes:
        if not self._masks:
            raise RefusedError("mask", "there is nothing to reveal")
        secrets = self._secrets_of(header.federation)
        revealed = secrets.reveal(header.info or {}, listed, body)
        return self._reply(replace(header, info=None), list(revealed))

    def _measure(self, header: Header, listed: list, body: Bytes) -> bytes:
        server, own = self._point(header, listed, body)
        if self._seen is None:
            raise RefusedError("measure", "no rows are held out here")
        self.ledger.measure(header, body)
        arrays, static = eqx.partition(self._seen, eqx.is_array)
        measured = self._program(self._measured, static=static)(arrays, server, own)
        return self._reply(replace(header, info=None), _leaves(measured))

    def _conclude(self, header: Header, listed: list, body: Bytes) -> bytes:
        server, own = self._point(header, listed, body)
        if self.conclude is None:
            raise RefusedError("garbage", "there is nothing to conclude here")
        self.ledger.conclude(header, body)
        stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], own)
        conclusion = dict(self.conclude(combine(server, stacked)))
        return self._reply(replace(header, info=conclusion))

    def _point(self, header: Header, listed: list, body: Bytes) -> tuple[Any, Any]:
        """Return the server's state that was sent, and this client's own blocks."""
        server = unpack_tree(listed, body, self._state)
        checkpoints = self.checkpoints[header.federation]
        kept = checkpoints.at(header.accepted) or checkpoints.start
        return server, kept.own

    def _secrets_of(self, federation: str) -> "SiteSecrets":
        """Return this site's keys; what they need is loaded only if they are."""
        if federation not in self._secrets:
            from fedbilevel.federation.secure.site import SiteSecrets

            rest = (self.folder, self.minimum, self.identity)
            own = SiteSecrets.of(federation, self.client, *rest)
            self._secrets = {federation: own}
        return self._secrets[federation]

    def _work(self, job: Job, where: Where, *rest: Any) -> Any:
        sent, kept, turn = rest
        heard = job.channel.received(sent, self._messages[where])
        return _link(job, where).work(heard, kept, turn, 0)

    def _changed(self, job: Job, where: Where, *rest: Any) -> Any:
        sent, kept, turn = rest
        heard = job.channel.received(sent, self._messages[where])
        return _link(job, where).change(heard, kept, turn, 0)

    def _coded(self, job: Job, where: Where, *rest: Any) -> Any:
        change, kept, turn = rest
        job = replace(job, channel=job.channel.protected())
        return _link(job, where).code(change, kept, turn)

    def _measured(self, job: Job, server: PyTree, own: PyTree) -> PyTree:
        return client_scalars(job, 0, server, own)

    def _program(
        self, function: Callable, *where: Where, static: PyTree | None = None
    ) -> Callable:
        """Compile once; rows are an input, so that they are no constants in there."""
        name = (function.__name__, where)
        rest = self._static if static is None else static
        if name not in self._programs:

            def whole(arrays: PyTree, *arguments: Any) -> PyTree:
                return function(eqx.combine(arrays, rest), *where, *arguments)

            self._programs[name] = jax.jit(whole)
        return self._programs[name]


def _link(job: Job, where: Where) -> Link:
    return Link.of(job, job.every_phase()[where], where)


def _message(link: Link) -> PyTree:
    """Return the shapes of what one client is sent in a phase."""
    job, cohort = link.job, link.job.cohort(link.phase)

    def first() -> PyTree:
        ids, everybody = jnp.arange(cohort, dtype=jnp.int32), jnp.ones(cohort, bool)
        turn = server_turn(job, link.where, 0, ids, everybody)
        return for_place(link.sent(start_server(job), turn), 0)

    return jax.eval_shape(first)


def _alone(leaf: np.ndarray) -> np.ndarray:
    """Return a leaf that may be kept: a short one does not keep its whole packet."""
    return leaf.copy() if leaf.nbytes < _SHORT else leaf


def _is_name(federation: str) -> bool:
    """Say whether it can name a federation, and the files that are kept of it."""
    plain = federation.isascii() and federation.isalnum()
    return plain and len(federation) <= _LONGEST_NAME


def _size(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _leaves(tree: PyTree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
