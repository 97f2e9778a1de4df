"""Which exchange is meant: all of it that participants must agree on."""

import functools
import hashlib
import struct
from dataclasses import dataclass

from fedbilevel.errors import InvalidInputError

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
