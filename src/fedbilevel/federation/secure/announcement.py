"""What server and sites must agree on in an exchange under masks.

With every exchange the server announces a number that is used once, who takes part, and
the public keys of all. A site answers with its masked reply. If somebody did not, the
others are asked for the seeds of the masks that they share with the missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.federation.secure.protocol import MaskedExchange, block_scales
from fedbilevel.federation.server.roster import Roster
from fedbilevel.federation.wire import EVERYONE, RefusedError

__all__ = ["Announcement", "masked_like", "scales_of"]


@dataclass(frozen=True)
class Announcement:
    """What is told with an exchange; weights count in parts of the largest."""

    number: int
    participants: list[int]
    keys: dict[str, str]
    largest: float

    @staticmethod
    def of(roster: Roster, number: int, participants: Sequence[int]) -> "Announcement":
        """Announce an exchange to clients that said hello."""
        members = roster.members
        return Announcement(
            number,
            sorted(participants),
            {str(k): str(members[k].info.get("key", "")) for k in participants},
            max(member.weight for member in members.values()),
        )

    @staticmethod
    def read(info: Mapping[str, Any]) -> "Announcement":
        """Read what a packet announces, or refuse it."""
        try:
            told = Announcement(**info)
            if not all(type(n) is int for n in (told.number, *told.participants)):
                raise ValueError("numbers that are not whole")
            if any(not 0 <= n < EVERYONE for n in told.participants):
                raise ValueError("participants that no client can be")
            if not {*told.exchange().participants} <= {*told.roster()}:
                raise ValueError("participants without a key")
            if not (isinstance(told.largest, float) and told.largest > 0):
                raise ValueError("no weight")
            return told
        except (TypeError, ValueError, AttributeError) as error:
            text = f"cannot be read: {error}"
            raise RefusedError("announcement", text) from error

    def exchange(self) -> MaskedExchange:
        """Return the exchange as the masks know it."""
        return MaskedExchange(self.number, tuple(self.participants))

    def roster(self) -> dict[int, bytes]:
        """Return the public keys by client."""
        return {int(client): bytes.fromhex(key) for client, key in self.keys.items()}

    def info(self) -> dict[str, Any]:
        """Return it as it travels."""
        return asdict(self)


def scales_of(like: PyTree, about: PyTree | None) -> list[int]:
    """Return the scales of the blocks of a reply, from what both sides know of it."""
    if about is None:
        return block_scales([np.zeros(leaf.shape) for leaf in jax.tree.leaves(like)])
    return block_scales([np.asarray(leaf) for leaf in jax.tree.leaves(about)])


def masked_like(like: PyTree) -> jax.ShapeDtypeStruct:
    """Return the shape of a masked reply: all its numbers, and a word to check."""
    size = sum(leaf.size for leaf in jax.tree.leaves(like)) + 1
    return jax.ShapeDtypeStruct((size,), np.dtype(np.uint64))
