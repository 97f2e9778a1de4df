"""Which exchange is meant, and what travels with it, as arrays of bytes.

Rows are in the order of the participants; one that is all zeros says nothing. Checks of
8 bytes let the server see whose share, seed or secret is not what was promised. They
are digests of numbers nobody can guess, so they reveal nothing of them.
"""

import functools
import hashlib
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.secure.shares import SHARE_BYTES

MOST_PARTICIPANTS = 2**16
_ALL_NEIGHBORS = 64  # up to so many participants
_NEIGHBORS_PER_BIT = 6  # of the number of participants, above


@dataclass(frozen=True)
class MaskedExchange:
    """What the server announces: a number, used once in a run, and who takes part.

    `context` is a digest of what else all participants must agree on.
    """

    number: int
    participants: tuple[int, ...]
    context: bytes = b""

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.participants)))
        if not 0 <= self.number < 2**64:
            raise InvalidInputError(
                f"exchange {self.number}: number exchanges from 0 to 2^64 - 1."
            )
        outside = ordered and not 0 <= ordered[0] <= ordered[-1] < 2**64
        if len(ordered) != len(self.participants) or outside:
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

    @functools.cached_property
    def digest(self) -> bytes:
        """All of it, in 32 bytes."""
        numbers = (self.number, len(self.participants), *self.participants)
        content = struct.pack(f"<{len(numbers)}Q", *numbers) + self.context
        return hashlib.sha256(content).digest()

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """The row of each participant."""
        return {client: place for place, client in enumerate(self.participants)}

    def are_neighbors(self, draw: int) -> bool:
        """Say whether two participants have a mask between them, by their draw."""
        count = len(self.participants)
        if count <= _ALL_NEIGHBORS:
            return True
        wanted = _NEIGHBORS_PER_BIT * (count - 1).bit_length()
        return draw * (count - 1) < wanted * 2**64


_CHECK_BYTES = 8
BOX_BYTES = SHARE_BYTES + 4 + 16  # with the sender's minimum, and what authenticates it
ROW_BYTES = BOX_BYTES + 2 * _CHECK_BYTES


class MaskedReply(NamedTuple):
    """A reply under its masks, and what the others need to take its own mask out.

    Both are arrays, of uint64 and of bytes, or only their shapes.
    A row of `sealed` holds the box for one participant, the check of the share in it,
    and the check of the seed that both have. In the client's own row the box is empty,
    and the last check is that of its secret.
    """

    words: Any
    sealed: Any


class Revealed(NamedTuple):
    """What a site gives to open a sum.

    Shares of the secrets of those who are in it, seeds of masks with those who are not.
    """

    shares: Any
    seeds: Any


def rows(count: int, size: int) -> np.ndarray:
    """Return rows that say nothing yet."""
    return np.zeros((count, size), np.uint8)


def to_box(closed: bytes, minimum: int) -> bytes:
    """Return a box: a share that was closed, and in sums of how many it may be used."""
    return struct.pack("<I", minimum) + closed


def read_box(box: bytes) -> tuple[bytes, int]:
    """Return the closed share in a box, and the minimum it was closed with."""
    return box[4:], struct.unpack("<I", box[:4])[0]


def check_share(digest: bytes, owner: int, holder: int, share: bytes) -> bytes:
    """Return the check of the share of an owner's secret that a holder has."""
    return _check(b"share", digest, struct.pack("<QQ", owner, holder) + share)


def check_seed(digest: bytes, seed: bytes) -> bytes:
    """Return the check of the seed of two participants."""
    return _check(b"seed", digest, seed)


def check_secret(digest: bytes, owner: int, secret: bytes) -> bytes:
    """Return the check of an owner's secret."""
    return _check(b"secret", digest, struct.pack("<Q", owner) + secret)


def _check(what: bytes, digest: bytes, value: bytes) -> bytes:
    return hashlib.sha256(what + digest + value).digest()[:_CHECK_BYTES]
