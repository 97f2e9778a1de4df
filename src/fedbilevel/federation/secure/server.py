"""The server's side of secure aggregation: it sees masked replies, and their mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.errors import FedbilevelError, InvalidInputError, UnmaskingError
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.secure import layout, masks
from fedbilevel.federation.secure.fixed_point import EXTRA_WORDS, decode_mean
from fedbilevel.federation.secure.layout import Announcement, MaskedReply
from fedbilevel.federation.secure.unmasking import Unmasking, check_replies
from fedbilevel.federation.server.requests import Answers, Request, RequestFor
from fedbilevel.federation.server.roster import Member, Roster
from fedbilevel.federation.wire import Bytes, Header, unpack_tree

_FEWEST = 2  # replies in a sum
_APART = "since sites keep the sites of their sums apart (`node --cohorts`)"
_MOST_FAILURES = 3  # sums in a row that cannot be opened, before a person must look


@dataclass(frozen=True)
class _Question:
    """One exchange under masks: `coded` are the shapes of a reply."""

    answers: Answers
    replies: Mapping[int, MaskedReply]
    announced: Announcement
    header: Header
    exchange: layout.MaskedExchange
    coded: PyTree
    about: PyTree | None

    @property
    def needed(self) -> int:
        """How many must confirm a sum, and open it."""
        return masks.threshold(len(self.announced.participants))


class MaskedServer:
    """Announces exchanges, has sums confirmed, and takes the masks out of them.

    `ask(clients, request_for, read, like)` is how it talks to clients. After a sum that
    could not be opened the next one is tried without the clients to blame, and after
    one with too few replies without the silent ones.
    """

    def __init__(self, roster: Roster, ask: Callable[..., Answers]) -> None:
        self.roster, self._ask, self._asked = roster, ask, 0
        self._failures: list[dict[int, str]] = []  # suspects of failed sums, in a row
        self._avoided: set[int] = set()
        # The exchange that is made, and how many of its sums may have been opened.
        self._repeats: tuple[int, int] = (0, 0)
        # Clients in the last sum, and whether sites answer sums over this set only.
        self._opened: set[int] = set()
        self._bound = False

    def announced(self, chosen: list[int], exchange: int) -> Announcement | None:
        """Return the chosen clients announced under a new number, if enough.

        After a sum that failed sites answer others than before only of other batches.
        """
        if self._repeats[0] != exchange:
            self._repeats = (exchange, 0)
        self.roster.refresh()
        reachable = self.roster.reachable(chosen)
        if self._is_bound_to(chosen):
            away = sorted(self._opened - set(reachable))
            if away:
                self.roster.report(f"waiting for clients {away}, {_APART}")
            present = [] if away else sorted(self._opened)
        else:
            present = self._willing(reachable)
            trusted = self._willing([k for k in present if k not in self._avoided])
            present = trusted or present
        if not present:
            return None
        self._asked += 1
        number = self.roster.identity.attempt * 2**32 + self._asked
        said = {str(k): self.roster.members[k].info for k in present}
        keys = {k: str(info.get("key", "")) for k, info in said.items()}
        signatures = {k: str(info.get("signature", "")) for k, info in said.items()}
        rest = (keys, signatures, self._repeats[1])
        return Announcement(number, sorted(present), *rest)

    def goes_on(self, clients: set[int]) -> None:
        """Take the sites of the last sum, which another process may have opened."""
        self._opened = self._opened or clients

    def _is_bound_to(self, clients: Sequence[int]) -> bool:
        """Say whether only the sum over the sites of the last one can be had."""
        return self._bound and self._opened <= set(clients)

    def like(self, coded: PyTree, announced: Announcement) -> MaskedReply:
        """Return the shapes of a masked reply: numbers, two words, and rows."""
        size = sum(leaf.size for leaf in jax.tree.leaves(coded)) + EXTRA_WORDS
        rows = (len(announced.participants), layout.ROW_BYTES)
        words = jax.ShapeDtypeStruct((size,), np.dtype(np.uint64))
        return MaskedReply(words, jax.ShapeDtypeStruct(rows, np.dtype(np.uint8)))

    def average(
        self,
        answers: Answers,
        announced: Announcement,
        sent: tuple[Header, list[str]],
        coded: PyTree,
        about: PyTree | None,
    ) -> None:
        """Set the mean of what was taken, or take nothing if it cannot be had.

        `sent` is the header that went out, and digests of what all were sent alike.
        """
        replies = {client: masked for client, (masked, _) in answers.taken.items()}
        known = (announced, sent[0], announced.exchange(layout.context_of(*sent)))
        question = _Question(answers, replies, *known, coded, about)
        needed = max(_FEWEST, question.needed, *map(self._minimum, replies))
        if self._is_bound_to(announced.participants):
            needed = len(announced.participants)
        if len(replies) < needed:
            silent = sorted(set(announced.participants) - set(replies))
            self._avoided = set(silent)
            self.roster.report(
                f"{len(replies)} of {needed} replies needed to open a sum, none of "
                f"clients {silent}"
            )
            answers.taken.clear()
            return
        try:
            answers.reply = self._mean(question)
            self._failures, self._avoided = [], set()
            self._opened = set(replies)
        except UnmaskingError as error:
            self.roster.report(f"exchange {question.header.exchange}: {error}")
            suspects = error.suspects or dict.fromkeys(replies, "is in a wrong sum")
            for client, why in suspects.items():
                answers.refused.setdefault(client, RefusedError("sum", why))
            reasons = {refusal.reason for refusal in answers.refused.values()}
            if "cohort" in reasons and self._opened and not self._bound:
                self._bound = True
                among = sorted(self._opened)
                self.roster.report(f"sums continue over {among}, {_APART}")
            else:
                self._failures.append(suspects)
                self._avoided = set(error.suspects)
            answers.taken.clear()

    def check_progress(self) -> None:
        """Raise if sums fail again and again; their suspects are written down."""
        if len(self._failures) < _MOST_FAILURES:
            return
        named = [f"client {k} {why}" for f in self._failures for k, why in f.items()]
        raise FedbilevelError(
            f"{_MOST_FAILURES} sums in a row could not be opened. Suspects: "
            f"{'; '.join(dict.fromkeys(named))}. Look at their nodes, or serve without "
            "them."
        )

    def _willing(self, clients: list[int]) -> list[int]:
        """Return those whose keys can be used and whose minimum is met among them."""
        members = {k: self.roster.members[k] for k in clients}
        usable = [k for k, member in members.items() if _has_key(member)]
        while True:
            some = [k for k in usable if self._minimum(k) <= len(usable)]
            if some == usable:
                break
            usable = some
        without = sorted(set(clients) - set(usable))
        if without:
            text = "no key that can be used, or too few others for their minimum"
            self.roster.report(f"clients {without} are not asked: {text}")
        return usable if len(usable) >= _FEWEST else []

    def _minimum(self, client: int) -> int:
        found = self.roster.members[client].info.get("minimum")
        return found if type(found) is int else _FEWEST

    def _mean(self, question: _Question) -> PyTree:
        """Return the mean of all replies, as a tree like the coded one."""
        exchange, replies, like = question.exchange, question.replies, question.coded
        check_replies(exchange, replies)
        # Sites remember a sum from here on; then only another repeat is answered.
        self._repeats = (self._repeats[0], self._repeats[1] + 1)
        tags = self._confirmed(question)
        revealed = self._revealed(question, tags)
        unmasking = Unmasking(exchange, replies, revealed)
        total = unmasking.total()
        leaves, scales = jax.tree.leaves(like), layout.scales_of(like, question.about)
        members, largest = self.roster.members, max(self.roster.weights)
        weights = {k: members[k].weight / largest for k in replies}
        shapes = [leaf.shape for leaf in leaves]
        means, cut = decode_mean(total, weights, scales, shapes)
        if cut:
            why = "is in a sum with numbers that are not finite or too large for masks"
            raise UnmaskingError(
                f"{cut} of {len(replies)} replies hold numbers that are not finite or "
                "too large for masks. Smaller steps are the usual cure",
                dict.fromkeys(replies, why),
            )
        for client, why in unmasking.suspects.items():
            question.answers.refused.setdefault(client, RefusedError("share", why))
        pairs = zip(means, leaves, strict=True)
        cast = [mean.astype(leaf.dtype) for mean, leaf in pairs]
        return jax.tree.unflatten(jax.tree.structure(like), cast)

    def _confirmed(self, question: _Question) -> dict[int, np.ndarray]:
        """Let the survivors prove to each other that they mean the same sum."""
        request = Request(self._about(question, "agree"))
        clients = sorted(question.replies)
        (like,) = question.exchange.rows(layout.TAG_BYTES)
        tags = self._followed(question, clients, lambda client, member: request, like)
        if len(tags) < question.needed:
            silent = sorted(set(clients) - set(tags))
            why = "replied, but did not confirm the set in the sum"
            raise UnmaskingError(
                f"{len(tags)} of {question.needed} confirmations needed",
                dict.fromkeys(silent, why),
            )
        return tags

    def _revealed(
        self, question: _Question, tags: Mapping[int, np.ndarray]
    ) -> dict[int, layout.Revealed]:
        """Ask the clients that confirmed the sum for what opens it."""
        header = self._about(question, "reveal")
        exchange, replies = question.exchange, question.replies
        like = layout.Revealed(*exchange.rows(layout.SHARE_BYTES, layout.KEY_BYTES))
        places = exchange.places

        def request_for(client: int, member: Member) -> Request:
            boxes, proofs = exchange.rows(layout.BOX_BYTES, layout.TAG_BYTES)
            for other, reply in replies.items():
                boxes[places[other]] = reply.sealed[places[client], : layout.BOX_BYTES]
            for other, row in tags.items():
                proofs[places[other]] = row[places[client]]
            return Request(header, (boxes, proofs))

        return self._followed(question, sorted(tags), request_for, like)

    def _about(self, question: _Question, kind: str) -> Header:
        survivors = sorted(question.replies)
        info = {**asdict(question.announced), "survivors": survivors}
        return replace(question.header, kind=kind, info=info)

    def _followed(
        self,
        question: _Question,
        clients: list[int],
        request_for: RequestFor,
        like: PyTree,
    ) -> dict[int, Any]:
        """Return what clients answer in a further step of an exchange."""

        def read(client: int, info: Any, listed: list, body: Bytes) -> PyTree:
            return unpack_tree(listed, body, like)

        more = self._ask(clients, request_for, read, like)
        question.answers.traffic += more.traffic
        question.answers.refused |= more.refused
        return more.taken


def _has_key(member: Member) -> bool:
    """Say whether secrets can be shared with the key that a client sent."""
    try:
        key = bytes.fromhex(str(member.info.get("key", "")))
        masks.SiteKeys.generate().shared_secret(key)
    except (ValueError, InvalidInputError):
        return False
    signature = member.info.get("signature", "")
    return isinstance(signature, str) and len(signature) <= 2 * 96
