"""What travels under secure aggregation beside the messages, as arrays of bytes.

Rows are in the order of the participants; one that is all zeros says nothing. Checks of
8 bytes let the server see whose share, seed or secret is not what was promised. They
are digests of numbers nobody can guess, so they reveal nothing of them.
"""

import hashlib
import struct
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.federation.secure.shares import SHARE_BYTES

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
