"""Secure aggregation: the server learns a weighted mean of replies, and no reply.

Every two sites share a secret, made from their X25519 keys. For every exchange they
stretch it into a mask, which the one of lower number adds to its reply and the other
subtracts, so that the masks cancel in the sum over all announced participants and in no
smaller one. Replies and masks are integers modulo 2^64: what cancels, cancels exactly.
If participants drop out, the others reveal the seeds of the masks that they share with
them in this exchange, and the server takes these masks out of the sum.

A number is encoded in fixed point as round(weight * value * 2^(40 - s)). The scale 2^s
of its block is known to both sides (`block_scales`), so the resolution is 2^-40 scales.
With n participants the integers stay below 2^63 / n, beyond which a site raises
instead of sending: the sum cannot wrap. That leaves weight * value a range of
2^23 / n scales: 2^20 for 8 participants, 2^7 for 2^16, the most that are allowed. The
mean is off by at most 2^-41 scales divided by the mean weight of those who replied.

One more word goes with every reply, a digest of weight, scales and sizes, masked like
the rest. If its sum is not what the server expects, then rosters, exchanges, weights,
scales or sizes differ somewhere, and `decode_mean` raises. It does not authenticate the
numbers: a site can send wrong ones.

What is protected, and what is not. The server is taken to follow the protocol and to
keep and read all it gets.

- It learns the sum over those who replied, who they are, and what it knew before:
  weights, scales and sizes. Sites that work with the server take themselves out of the
  sum: what is left is the sum over the other sites.
- There are no masks of a site's own (the second masks of Bonawitz et al. 2017). Once
  the survivors have revealed their seeds, the replies of the dropped, if they arrive
  late or were kept, are masked by the dropped among themselves alone: the server can
  open the sum over all of the dropped, which is the reply itself where one was dropped.
  A site cannot tell whether who is said to have dropped out did: a server that lies
  about it, to different sites in different ways, opens several single replies.
- Sums are exact and without noise. Two sums over nearly the same sites, with values
  that hardly changed, tell the difference. A site answers an exchange number once, for
  one set of participants; that exchanges of different numbers differ is not checked.
- Keys are not authenticated. A server that puts keys of its own into the roster opens
  everything; against that the roster must be compared outside of this protocol.
- A node that restarts with its old keys must also restore `SecureSite.records`, saved
  before each reply left. Otherwise it could be made to use a mask twice, which shows
  the difference of two replies. New keys and a new roster are as good.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbilevel.errors import (
    InvalidInputError,
    MaskReuseError,
    RevealRefusedError,
    UnmaskingError,
)
from fedbilevel.federation.secure.fixed_point import block_scales, decode_mean, encode
from fedbilevel.federation.secure.masks import (
    SiteKeys,
    add_mask,
    check_key,
    exchange_seed,
    pair_secret,
    sign,
)

__all__ = [
    "MOST_PARTICIPANTS",
    "Answered",
    "MaskedExchange",
    "SecureSite",
    "SiteKeys",
    "block_scales",
    "decode_mean",
    "unmask_sum",
]

MOST_PARTICIPANTS = 2**16


@dataclass(frozen=True)
class MaskedExchange:
    """What the server announces: a number, used once in a run, and who takes part."""

    number: int
    participants: tuple[int, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.participants)))
        if not 0 <= self.number < 2**64:
            raise InvalidInputError(
                f"exchange {self.number}: number exchanges from 0 to 2^64 - 1."
            )
        if len(ordered) != len(self.participants) or (ordered and ordered[0] < 0):
            raise InvalidInputError(
                f"exchange {self.number}: participants {self.participants} must be "
                "different client numbers, counted from 0."
            )
        if not 2 <= len(ordered) <= MOST_PARTICIPANTS:
            raise InvalidInputError(
                f"exchange {self.number}: {len(ordered)} participants cannot hide in "
                f"a sum; announce between 2 and {MOST_PARTICIPANTS}."
            )
        object.__setattr__(self, "participants", ordered)

    @property
    def digest(self) -> bytes:
        """The number and the participants, in 32 bytes."""
        numbers = (self.number, *self.participants)
        return hashlib.sha256(struct.pack(f"<{len(numbers)}Q", *numbers)).digest()


@dataclass(frozen=True)
class Answered:
    """What a site remembers of an exchange: two digests, and whom it gave away."""

    exchange: bytes
    reply: bytes
    dropped: tuple[int, ...] = ()


class SecureSite:
    """A site's side: masks its replies, and reveals what recovery needs, no more.

    `roster` holds the public key of every client, by number. With fewer than `minimum`
    sites in a sum the site does not take part. `records` are its answers so far, by
    exchange number: a restarted site is given those that it had.
    """

    def __init__(
        self,
        federation: str,
        client: int,
        keys: SiteKeys,
        roster: Mapping[int, bytes],
        *,
        minimum: int = 2,
        records: Mapping[int, Answered] | None = None,
    ) -> None:
        if minimum < 2:
            raise InvalidInputError(
                f"minimum={minimum}: a sum hides a reply among 2 sites or more."
            )
        for other, key in roster.items():
            check_key(key, f"the public key of client {other} in the roster")
        if roster.get(client) != keys.public_bytes:
            raise InvalidInputError(
                f"client {client}: the roster holds another public key for this site, "
                "or none. Send this site's key to the server, then ask for the roster."
            )
        self.federation, self.client, self.minimum = federation, client, minimum
        self.records = dict(records or {})
        self._keys, self._roster = keys, dict(roster)
        self._secrets: dict[int, bytes] = {}

    def mask_reply(
        self,
        exchange: MaskedExchange,
        blocks: Sequence[Any],
        weight: float,
        scales: Sequence[int],
    ) -> np.ndarray:
        """Return the reply, all blocks in one array of uint64, under its masks.

        `weight` is this site's weight divided by the largest of all clients, so it is
        in (0, 1]; `scales` are those of `block_scales`. The same reply may be asked for
        again; another one under the same exchange number raises `MaskReuseError`.
        """
        self._check_announced(exchange)
        reply = encode(blocks, weight, scales, len(exchange.participants))
        for other in exchange.participants:
            if other != self.client:
                add_mask(reply, self._seed(exchange, other), sign(self.client, other))
        answer = Answered(exchange.digest, hashlib.sha256(reply.data).digest())
        before = self.records.setdefault(exchange.number, answer)
        if replace(before, dropped=()) != answer:
            what = "values" if before.exchange == answer.exchange else "participants"
            raise MaskReuseError(
                f"client {self.client}, exchange {exchange.number}: a reply with other "
                f"{what} was sent under this number, and a second one would show the "
                "difference. Repeat the exchange as it was, or number a new one anew."
            )
        return reply

    def reveal_seeds(
        self, exchange: MaskedExchange, dropped: Iterable[int]
    ) -> dict[int, bytes]:
        """Return the seeds of the masks shared with the dropped in this exchange.

        Once an answer is given, only the same answer is given again.
        """
        gone = tuple(sorted(set(dropped)))
        problem = self._why_not_reveal(exchange, gone)
        if problem:
            raise RevealRefusedError(
                f"client {self.client}, exchange {exchange.number}: {problem}. Nothing "
                "was revealed; ask for what may be revealed, or give this exchange up."
            )
        before = self.records[exchange.number]
        self.records[exchange.number] = replace(before, dropped=gone)
        return {other: self._seed(exchange, other) for other in gone}

    def _why_not_reveal(
        self, exchange: MaskedExchange, gone: tuple[int, ...]
    ) -> str | None:
        before = self.records.get(exchange.number)
        left = len(exchange.participants) - len(gone)
        if before is None or before.exchange != exchange.digest:
            return "this site sent no reply to it with these participants"
        if self.client in gone:
            return "this site has replied, so it did not drop out"
        if not gone or not set(gone) <= set(exchange.participants):
            return f"clients {gone} are not some of its participants"
        if left < self.minimum:
            return f"{left} in the sum would be fewer than the minimum {self.minimum}"
        if before.dropped not in ((), gone):
            return f"seeds for clients {before.dropped} were revealed, no others will"
        return None

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

    def _seed(self, exchange: MaskedExchange, other: int) -> bytes:
        if other not in self._secrets:
            pair = (self.client, other)
            self._secrets[other] = pair_secret(
                self._keys, self.federation, self._roster, pair
            )
        return exchange_seed(self._secrets[other], exchange.digest)


def unmask_sum(
    exchange: MaskedExchange,
    replies: Mapping[int, np.ndarray],
    seeds: Mapping[int, Mapping[int, bytes]] | None = None,
) -> np.ndarray:
    """Return the sum of the replies, as integers modulo 2^64, for `decode_mean`.

    If announced participants are missing among `replies`, `seeds` holds for every
    client that replied what its `reveal_seeds` gave for all of the missing.
    """
    _check_replies(exchange, replies)
    missing = set(exchange.participants) - set(replies)
    total = np.zeros_like(next(iter(replies.values())))
    for reply in replies.values():
        total += reply
    for client in replies if missing else ():
        revealed = (seeds or {}).get(client, {})
        if set(revealed) != missing:
            raise UnmaskingError(
                f"exchange {exchange.number}: client {client} revealed seeds for "
                f"{sorted(revealed)}, but {sorted(missing)} did not reply. Ask every "
                "client that replied for the seeds of all that did not."
            )
        for other, seed in revealed.items():
            check_key(seed, f"the seed of clients {client} and {other}")
            add_mask(total, seed, -sign(client, other))
    return total


def _check_replies(exchange: MaskedExchange, replies: Mapping[int, np.ndarray]) -> None:
    strangers = sorted(set(replies) - set(exchange.participants))
    kinds = {(reply.dtype.name, reply.shape) for reply in replies.values()}
    if strangers or len(kinds) != 1 or {name for name, _ in kinds} != {"uint64"}:
        raise UnmaskingError(
            f"exchange {exchange.number}: {len(replies)} replies of types and shapes "
            f"{sorted(kinds)}, of clients {strangers} that were not announced. All "
            "must be uint64 arrays of one shape, and announced; leave out the others."
        )
