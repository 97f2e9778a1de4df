"""Secure aggregation: the server learns a weighted mean of replies, and no reply.

After Bonawitz et al. (2017), against a server that lies. Every two sites share a secret
made from their X25519 keys, signed by a `SiteIdentity`. An exchange has three steps:

1. Reply. From each pair's secret and the digest of the exchange come the pair's keys
   for it. One seed is stretched into a mask, which the client of the lower number adds
   to its reply and the other subtracts: these masks cancel in the sum over all
   participants and in no smaller one. Each site also adds a mask of its own, from a
   secret of which every other site gets a Shamir share, in a box that only that site
   can open. Two thirds of the shares give the secret. Replies and masks are integers
   modulo 2^64: what cancels, cancels exactly.
2. Confirm. The server names the survivors. Each of them proves to each other, by a tag
under a key of the pair, that it was sent this set. It says so for one set,
   and for one set wherever it is asked the same (`cohorts`).
3. Reveal. With tags of two thirds of the participants for the set that it confirmed
   itself, a site gives its shares of the secrets of the survivors, and the seeds of the
   masks it shares with the dropped. The server takes these masks out of the sum.

So of one site either its own mask can be opened or the masks it shares with others, and
never both: the reply of a client that was said to have dropped out stays under its own
mask, late or kept. The digest holds the number, the participants, the weights' unit and
the message that was sent: sites that were sent different things have masks that do not
cancel, and tags that do not fit.

Above 64 participants two sites have a mask and shares between them only where a number
from their secret is small: each has about 6 log2 n neighbors (Bell et al. 2020). The
server cannot choose neighbors: it does not know the secrets. A site confirms only if
two thirds of its neighbors are in the sum, so that what is left hangs together.

A number is encoded in fixed point as round(weight * value * 2^(40 - s)). The scale 2^s
of its block is known to both sides (`block_scales`), so the resolution is 2^-40 scales.
With n participants the integers stay below 2^63 / n, beyond which they are cut: the
sum cannot wrap, and no site says in the clear that its numbers are large. This leaves
weight * value a range of 2^23 / n scales: 2^20 for 8 participants, 2^7 for 2^16, the
most that are allowed. The mean is off by at most 2^-41 scales divided by the mean
weight of the survivors.

Two more words go with every reply, masked like the rest. The sum of the first says in
how many replies numbers were cut, or were none. The second is a digest of weight,
scales and sizes. If its sum is not what the server expects, then exchanges, weights,
scales or sizes differ somewhere, and `decode_mean` raises. It does not authenticate the
numbers: a site can send wrong ones.

Guarantees and limits. The server may send anything to any site, and collude with fewer
than a third of the participants.

- It learns the sum over the survivors, who they are, and what it knew before: weights,
  scales and sizes. Sites that work with it take themselves out of the sum: what is left
  is the sum over the other sites. `minimum` of a site is the fewest it is summed with.
- With a third or more of the participants it can get two sets confirmed, and open a
  reply. Among two or three participants that is one.
- Without a list of public keys (`identity`) the keys are the server's word: it can put
  its own in, and opens everything.
- Sums are exact and without noise. The same question is answered in one sum alone; two
  sums over nearly the same sites, with values that hardly changed, still show the
  difference unless sites keep cohorts apart (`cohorts`). A sum that failed is asked for
  again, of other batches. Parts
  of a message that each client gets for itself alone are not in the digest, so that
  they may differ for other reasons than the algorithm's.
- A site that replies and then is silent lets the sum fail if somebody dropped out
  before: no other site has the seeds that these two share. The exchange is made again.
- A node that restarts with its old keys must also restore `SecureSite.records`, saved
  before each answer left. Otherwise it could be made to use a mask twice, which shows
  the difference of two replies, or to confirm two sets. New keys are as good.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag

from fedbilevel.errors import (
    CohortRefusedError,
    InvalidInputError,
    MaskReuseError,
    RevealRefusedError,
)
from fedbilevel.federation.secure import layout, masks
from fedbilevel.federation.secure.cohorts import Cohorts, Question
from fedbilevel.federation.secure.fixed_point import encode
from fedbilevel.federation.secure.layout import MaskedExchange, MaskedReply, Revealed


@dataclass(frozen=True)
class Answered:
    """An exchange that a site replied to: digests of it and of what it is about."""

    exchange: bytes
    context: bytes
    question: Question
    survivors: tuple[int, ...] = ()


class SecureSite:
    """A site's side: masks its replies, and reveals what opens one sum, no more.

    `roster` holds the public key of every client, by number, once it is known. With
    fewer than `minimum` sites in a sum the site does not take part. `records` are its
    answers so far, by exchange number, and `cohorts` the sites of each sum: a restarted
    site is given those that it had.
    """

    def __init__(
        self,
        federation: str,
        client: int,
        keys: masks.SiteKeys,
        roster: Mapping[int, bytes] | None = None,
        *,
        minimum: int = 2,
        records: Mapping[int, Answered] | None = None,
        cohorts: Cohorts | None = None,
    ) -> None:
        if minimum < 2:
            raise InvalidInputError(
                f"minimum={minimum}: a sum hides a reply among 2 sites or more."
            )
        self.federation, self.client, self.minimum = federation, client, minimum
        self.records = dict(records or {})
        self.cohorts = cohorts or Cohorts(minimum)
        self._keys, self._roster = keys, {}
        self._secrets: dict[int, bytes] = {}
        self._pairs: tuple[bytes, dict[int, masks.PairKeys]] = (b"", {})
        if roster is not None:
            self.meet(roster)

    def meet(self, roster: Mapping[int, bytes]) -> None:
        """Take the public keys of those that take part; what did not change is kept."""
        for other, key in roster.items():
            masks.check_key(key, f"the public key of client {other} in the roster")
        if roster.get(self.client) != self._keys.public_bytes:
            raise InvalidInputError(
                f"client {self.client}: the roster holds another public key for this "
                "site, or none. Send this site's key to the server, then ask for the "
                "roster."
            )
        for other in [k for k in self._secrets if self._roster[k] != roster.get(k)]:
            del self._secrets[other]
        self._roster, self._pairs = dict(roster), (b"", {})

    def mask_reply(
        self,
        exchange: MaskedExchange,
        blocks: Sequence[Any],
        weight: float,
        scales: Sequence[int],
        question: Question | None = None,
    ) -> MaskedReply:
        """Return the reply, all blocks in one array of uint64, under its masks.

        `weight` is this site's weight divided by the largest of all clients, so it is
        in (0, 1]; `scales` are those of `block_scales`. Numbers only grow, and a second
        reply under the same one raises `MaskReuseError`, whatever is in it. `question`
        is what it answers; without one it is as if each exchange asked another.
        """
        self._check_announced(exchange)
        if exchange.number <= max(self.records, default=-1):
            raise MaskReuseError(
                f"client {self.client}, exchange {exchange.number}: a reply was sent "
                "under this number or a later one, and a second one would show the "
                "difference. Number a new exchange anew."
            )
        words = encode(blocks, weight, scales, len(exchange.participants))
        for other, keys in self._neighbors(exchange).items():
            masks.add_mask(words, keys.seed, masks.sign(self.client, other))
        secret, shares = self._own_shares(exchange)
        masks.add_mask(words, masks.self_seed(secret, exchange.digest), 1)
        question = question or Question("", exchange.digest.hex())
        answer = Answered(exchange.digest, exchange.context, question)
        self.records[exchange.number] = answer
        return MaskedReply(words, self._sealed(exchange, secret, shares))

    def confirm(self, exchange: MaskedExchange, survivors: Iterable[int]) -> np.ndarray:
        """Return a row for each participant, which proves this site's set to it.

        Once a set of survivors is confirmed, only the same set is confirmed again.
        """
        members = tuple(sorted(set(survivors)))
        self._refuse(exchange, self._why_not_confirm(exchange, members))
        before = self.records[exchange.number]
        problem = self.cohorts.enter(before.question, members)
        self._refuse(exchange, problem, CohortRefusedError)
        self.records[exchange.number] = replace(before, survivors=members)
        statement = _statement(exchange, members)
        (tags,) = exchange.rows(layout.TAG_BYTES)
        for other, keys in self._pairs_in(exchange).items():
            tag = keys.tag(self.client < other, statement)
            _put(tags, exchange.places[other], tag)
        return tags

    def reveal(
        self,
        exchange: MaskedExchange,
        survivors: Iterable[int],
        boxes: np.ndarray,
        tags: np.ndarray,
    ) -> Revealed:
        """Return what opens the sum over the survivors, which this site confirmed.

        `boxes` and `tags` have a row from each survivor: the box for this site that
        came with its reply, and its confirmation for this site.
        """
        members = tuple(sorted(set(survivors)))
        self._refuse(exchange, self._why_not_reveal(exchange, members, tags))
        _, own = self._own_shares(exchange)
        shares, seeds = exchange.rows(layout.SHARE_BYTES, layout.KEY_BYTES)
        _put(shares, exchange.places[self.client], own[self.client])
        for other, keys in self._neighbors(exchange).items():
            place = exchange.places[other]
            if other not in members:
                _put(seeds, place, keys.seed)
                continue
            box = boxes[place].tobytes()
            (minimum,) = struct.unpack("<I", box[:4])
            try:
                share = keys.open(other < self.client, minimum, box[4:])
            except InvalidTag:
                continue  # the row stays empty: the server sees whose share is missing
            if minimum <= len(members):
                _put(shares, place, share)
        return Revealed(shares, seeds)

    def _own_shares(self, exchange: MaskedExchange) -> tuple[bytes, dict[int, bytes]]:
        """Return the secret of this site's own mask, and its shares by holder.

        They follow from its private key and the exchange, so that the same reply can be
        sent again, by another process as well.
        """
        purpose = hashlib.sha256(self.federation.encode()).digest() + exchange.digest
        secret = masks.to_element(self._keys.own_secret(b"mask " + purpose, 32))
        points = {k: exchange.places[k] + 1 for k in self._neighbors(exchange)}
        points[self.client] = exchange.places[self.client] + 1
        needed = masks.threshold(len(points))
        drawn = self._keys.own_secret(b"shares " + purpose, 32 * needed)
        made = masks.split(secret, needed, list(points.values()), drawn)
        shares = {client: made[point] for client, point in points.items()}
        return secret.to_bytes(layout.SHARE_BYTES, "little"), shares

    def _sealed(
        self, exchange: MaskedExchange, secret: bytes, shares: Mapping[int, bytes]
    ) -> np.ndarray:
        (sealed,), pairs = exchange.rows(layout.ROW_BYTES), self._pairs_in(exchange)
        for holder, share in shares.items():
            first = exchange.check(b"share", share, self.client, holder)
            if holder == self.client:
                box = bytes(layout.BOX_BYTES)
                last = exchange.check(b"secret", secret, self.client)
            else:
                closed = pairs[holder].close(self.client < holder, self.minimum, share)
                # A share, and in sums of how many it may be used.
                box = struct.pack("<I", self.minimum) + closed
                last = exchange.check(b"seed", pairs[holder].seed)
            _put(sealed, exchange.places[holder], box + first + last)
        return sealed

    def _refuse(
        self,
        exchange: MaskedExchange,
        problem: str | None,
        kind: type[RevealRefusedError] = RevealRefusedError,
    ) -> None:
        if problem:
            raise kind(
                f"client {self.client}, exchange {exchange.number}: {problem}. Nothing "
                "was revealed. Ask for what may be revealed, or give this exchange up."
            )

    def _why_not_confirm(
        self, exchange: MaskedExchange, members: tuple[int, ...]
    ) -> str | None:
        before = self.records.get(exchange.number)
        if before is None or before.exchange != exchange.digest:
            return "this site sent no reply to it with these participants"
        if self.client not in members:
            return "this site has replied, so it did not drop out"
        if not set(members) <= set(exchange.participants):
            return f"clients {members} are not all among its participants"
        if len(members) < self._needed(exchange):
            return f"{len(members)} in the sum, of {self._needed(exchange)} needed"
        near = set(self._neighbors(exchange)) | {self.client}
        if len(near & set(members)) < masks.threshold(len(near)):
            return f"{len(near - set(members))} of {len(near)} neighbors dropped out"
        if before.survivors not in ((), members):
            return f"a sum over clients {before.survivors} was confirmed, no other is"
        return None

    def _why_not_reveal(
        self, exchange: MaskedExchange, members: tuple[int, ...], tags: np.ndarray
    ) -> str | None:
        before = self.records.get(exchange.number)
        if before is None or before.exchange != exchange.digest:
            return "this site sent no reply to it with these participants"
        if not members or before.survivors != members:
            return f"a sum over clients {members} is not the one that was confirmed"
        statement, pairs = _statement(exchange, members), self._pairs_in(exchange)
        places, agreeing = exchange.places, 1
        for other in set(members) - {self.client}:
            right = pairs[other].tag(other < self.client, statement)
            given = tags[places[other]].tobytes()
            agreeing += hmac.compare_digest(right, given)
        if agreeing < self._needed(exchange):
            return f"{agreeing} confirm this sum, of {self._needed(exchange)} needed"
        return None

    def _needed(self, exchange: MaskedExchange) -> int:
        return max(masks.threshold(len(exchange.participants)), self.minimum)

    def _check_announced(self, exchange: MaskedExchange) -> None:
        present = set(exchange.participants)
        strangers = sorted(present - set(self._roster))
        if strangers or self.client not in present:
            who = f"clients {strangers} are" if strangers else "this site is"
            where = "in the roster" if strangers else "among the participants"
            raise InvalidInputError(
                f"client {self.client}, exchange {exchange.number}: {who} not {where}. "
                "Announce participants of the roster, and to them alone."
            )
        if len(present) < self.minimum:
            raise InvalidInputError(
                f"client {self.client}, exchange {exchange.number}: {len(present)} "
                f"participants, but this site's minimum is {self.minimum}. Announce "
                "more, or set a lower minimum on the sites."
            )

    def _neighbors(self, exchange: MaskedExchange) -> dict[int, masks.PairKeys]:
        pairs = self._pairs_in(exchange).items()
        return {k: keys for k, keys in pairs if exchange.are_neighbors(keys.draw)}

    def _pairs_in(self, exchange: MaskedExchange) -> dict[int, masks.PairKeys]:
        """Return what this site has with each other participant in this exchange."""
        digest = exchange.digest
        if self._pairs[0] != digest:
            others = [k for k in exchange.participants if k != self.client]
            made = {k: masks.pair_keys(self._secret(k), digest) for k in others}
            self._pairs = (digest, made)
        return self._pairs[1]

    def _secret(self, other: int) -> bytes:
        if other not in self._secrets:
            known = (self._keys, self.federation, self._roster)
            self._secrets[other] = masks.pair_secret(*known, (self.client, other))
        return self._secrets[other]


def _statement(exchange: MaskedExchange, survivors: tuple[int, ...]) -> bytes:
    """Return what a site confirms: that these are in the sum, and no others."""
    return exchange.digest + struct.pack(f"<{len(survivors)}Q", *survivors)


def _put(rows: np.ndarray, place: int, content: bytes) -> None:
    rows[place] = np.frombuffer(content, np.uint8)
