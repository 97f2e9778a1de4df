"""Which exchange under masks is meant, and what travels with it, as arrays of bytes.

With every exchange the server announces a number that is used once, the participants,
and the public keys of all, signed. A site answers with its masked reply. Then the sites
that replied are asked to confirm the set in the sum, and to reveal what opens it.

Rows are in the order of the participants; one that is all zeros says nothing. Checks of
8 bytes let the server see whose share, seed or secret is not what was promised. They
are digests of unpredictable numbers, so they reveal nothing of them.
"""

import functools
import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.secure.cohorts import Question
from fedbilevel.federation.secure.fixed_point import block_scales
from fedbilevel.federation.wire import EVERYONE, Header

MOST_PARTICIPANTS = 2**16
MOST_REPEATS = 2**16
_ALL_NEIGHBORS = 64  # up to so many participants
_NEIGHBORS_PER_BIT = 6  # of the number of participants, above
KEY_BYTES, TAG_BYTES = 32, 16
SHARE_BYTES = 16  # of a secret
_CHECK_BYTES = 8
BOX_BYTES = SHARE_BYTES + 4 + 16  # with the sender's minimum, and what authenticates it
ROW_BYTES = BOX_BYTES + 2 * _CHECK_BYTES


@dataclass(frozen=True)
class MaskedExchange:
    """The announcement: a number, used once in a run, and the participants.

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
                f"a sum. Announce between 2 and {MOST_PARTICIPANTS}."
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

    def rows(self, *sizes: int) -> list[np.ndarray]:
        """Return rows of so many bytes for each participant, which say nothing yet."""
        return [np.zeros((len(self.participants), size), np.uint8) for size in sizes]

    def check(self, what: bytes, value: bytes, *clients: int) -> bytes:
        """Return the check of a value: a share, a seed or a secret of clients.

        A share is of its owner and its holder, a secret of its owner.
        """
        whose = struct.pack(f"<{len(clients)}Q", *clients)
        content = what + self.digest + whose + value
        return hashlib.sha256(content).digest()[:_CHECK_BYTES]

    def are_neighbors(self, draw: int) -> bool:
        """Say whether two participants have a mask between them, by their draw."""
        count = len(self.participants)
        if count <= _ALL_NEIGHBORS:
            return True
        wanted = _NEIGHBORS_PER_BIT * (count - 1).bit_length()
        return draw * (count - 1) < wanted * 2**64


@dataclass(frozen=True)
class Announcement:
    """Fields sent with an exchange; `repeat` counts sums of it that failed.

    Weights count in parts of the largest, which was agreed on with the settings.
    """

    number: int
    participants: list[int]
    keys: dict[str, str]
    signatures: dict[str, str]
    repeat: int = 0

    @staticmethod
    def read(info: Mapping[str, Any]) -> "Announcement":
        """Read what a packet announces, or refuse it."""
        try:
            found = Announcement(**info)
            counts = (found.number, found.repeat, *found.participants)
            if not all(type(n) is int for n in counts):
                raise ValueError("numbers that are not whole")
            if any(not 0 <= n < EVERYONE for n in found.participants):
                raise ValueError("participants that no client can be")
            if not 0 <= found.repeat < MOST_REPEATS:
                raise ValueError("a repeat that no sum can have")
            _ = found.exchange(b""), by_client(found.signatures)
            if set(by_client(found.keys)) != set(found.participants):
                raise ValueError("keys of others than the participants")
            return found
        except (TypeError, ValueError, AttributeError) as error:
            text = f"cannot be read: {error}"
            raise RefusedError("announcement", text[:200]) from error

    def exchange(self, context: bytes) -> MaskedExchange:
        """Return the exchange as the masks know it, with what else it is about."""
        return MaskedExchange(self.number, tuple(self.participants), context)


def by_client(texts: Mapping[str, str]) -> dict[int, bytes]:
    """Return announced keys, or signatures of them, by client."""
    return {int(client): bytes.fromhex(text) for client, text in texts.items()}


def context_of(header: Header, alike: Iterable[str]) -> bytes:
    """Return a digest of what all participants of an exchange are sent alike.

    `alike` are the digests of its leaves. A server that let some work at another point,
    to know their replies or to take their weight, would get masks that do not cancel.
    """
    repeat = (header.info or {}).get("repeat", 0)
    where = f"{header.stage} {header.phase} {header.index} {header.exchange} {repeat} "
    return hashlib.sha256((where + " ".join(alike)).encode()).digest()


def question_of(header: Header, sent: Iterable[str]) -> Question:
    """Return what a site is asked, whatever the exchange is numbered.

    `sent` are the digests of the leaves that it was sent.
    """
    repeat = (header.info or {}).get("repeat", 0)
    where = f"{header.stage} {header.phase} {header.index} {repeat} "
    names = (where + " ".join(sent)).encode()
    return Question(header.settings, hashlib.sha256(names).hexdigest())


def scales_of(like: PyTree, about: PyTree | None) -> list[int]:
    """Return the scales of the blocks of a reply, from what both sides know of it."""
    if about is None:
        return block_scales([np.zeros(leaf.shape) for leaf in jax.tree.leaves(like)])
    return block_scales([np.asarray(leaf) for leaf in jax.tree.leaves(about)])


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
    """A site's contribution to opening a sum.

    Shares of the secrets of sites in the sum, seeds of masks with other sites.
    """

    shares: Any
    seeds: Any
