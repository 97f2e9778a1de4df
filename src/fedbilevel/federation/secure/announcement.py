"""What server and sites must agree on in an exchange under masks.

With every exchange the server announces a number that is used once, who takes part, and
the public keys of all, signed. A site answers with its masked reply. Then those who did
are asked to confirm who is in the sum, and to reveal what opens it.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel.federation.secure.fixed_point import block_scales
from fedbilevel.federation.secure.layout import (
    BOX_BYTES,
    ROW_BYTES,
    MaskedExchange,
    MaskedReply,
    Revealed,
)
from fedbilevel.federation.secure.masks import KEY_BYTES, TAG_BYTES
from fedbilevel.federation.secure.shares import SHARE_BYTES
from fedbilevel.federation.server.roster import Roster
from fedbilevel.federation.wire import EVERYONE, Header, RefusedError, digest
from fedbilevel.runtime.exchange import Link, common_leaves, server_turn
from fedbilevel.runtime.job import start_server


@dataclass(frozen=True)
class Announcement:
    """What is sent with an exchange; weights count in parts of the largest."""

    number: int
    participants: list[int]
    keys: dict[str, str]
    signatures: dict[str, str]
    largest: float

    @staticmethod
    def of(roster: Roster, number: int, participants: Sequence[int]) -> "Announcement":
        """Announce an exchange to clients that said hello."""
        members = roster.members
        known = {k: members[k].info for k in participants}
        return Announcement(
            number,
            sorted(participants),
            {str(k): str(info.get("key", "")) for k, info in known.items()},
            {str(k): str(info.get("signature", "")) for k, info in known.items()},
            max(member.weight for member in members.values()),
        )

    @staticmethod
    def read(info: Mapping[str, Any]) -> "Announcement":
        """Read what a packet announces, or refuse it."""
        try:
            found = Announcement(**info)
            if not all(type(n) is int for n in (found.number, *found.participants)):
                raise ValueError("numbers that are not whole")
            if any(not 0 <= n < EVERYONE for n in found.participants):
                raise ValueError("participants that no client can be")
            if not (isinstance(found.largest, float) and 0 < found.largest < math.inf):
                raise ValueError("no weight")
            _ = found.exchange(b""), found.signed()
            if set(found.roster()) != set(found.participants):
                raise ValueError("keys of others than the participants")
            return found
        except (TypeError, ValueError, AttributeError) as error:
            text = f"cannot be read: {error}"
            raise RefusedError("announcement", text[:200]) from error

    def exchange(self, context: bytes) -> MaskedExchange:
        """Return the exchange as the masks know it, with what else it is about."""
        unit = struct.pack("<d", self.largest)
        bound = hashlib.sha256(unit + context).digest()
        return MaskedExchange(self.number, tuple(self.participants), bound)

    def roster(self) -> dict[int, bytes]:
        """Return the public keys by client."""
        return _by_client(self.keys)

    def signed(self) -> dict[int, bytes]:
        """Return the signatures of the public keys by client."""
        return _by_client(self.signatures)

    def info(self) -> dict[str, Any]:
        """Return it as it travels."""
        return asdict(self)


def _by_client(texts: Mapping[str, str]) -> dict[int, bytes]:
    return {int(client): bytes.fromhex(text) for client, text in texts.items()}


def common_in(link: Link) -> list[bool]:
    """Say of each leaf of what is sent in a phase whether all are sent it alike."""

    def sent() -> PyTree:
        ids = jnp.arange(link.job.cohort(link.phase), dtype=jnp.int32)
        turn = server_turn(link.job, link.where, 0, ids, jnp.ones(ids.shape, bool))
        return link.sent(start_server(link.job), turn)

    return common_leaves(jax.eval_shape(sent))


def context_of(header: Header, alike: Iterable[np.ndarray]) -> bytes:
    """Return a digest of what all participants of an exchange are sent alike.

    A server that let some work at another point, to know their replies or to take their
    weight, would get masks that do not cancel.
    """
    where = f"{header.stage} {header.phase} {header.index} {header.exchange} "
    names = " ".join(digest(np.asarray(leaf)) for leaf in alike)
    return hashlib.sha256((where + names).encode()).digest()


def scales_of(like: PyTree, about: PyTree | None) -> list[int]:
    """Return the scales of the blocks of a reply, from what both sides know of it."""
    if about is None:
        return block_scales([np.zeros(leaf.shape) for leaf in jax.tree.leaves(like)])
    return block_scales([np.asarray(leaf) for leaf in jax.tree.leaves(about)])


def masked_like(like: PyTree, participants: int) -> MaskedReply:
    """Return the shapes of a masked reply: its numbers, a word to check, and rows."""
    size = sum(leaf.size for leaf in jax.tree.leaves(like)) + 1
    words = jax.ShapeDtypeStruct((size,), np.dtype(np.uint64))
    return MaskedReply(words, _rows(participants, ROW_BYTES))


def confirmation_like(participants: int) -> Any:
    """Return the shape of what a site confirms with."""
    return _rows(participants, TAG_BYTES)


def opening_like(participants: int) -> tuple[Any, Any]:
    """Return the shapes of what a site is sent to open a sum: boxes and tags."""
    return _rows(participants, BOX_BYTES), _rows(participants, TAG_BYTES)


def revealed_like(participants: int) -> Revealed:
    """Return the shapes of what a site reveals."""
    return Revealed(_rows(participants, SHARE_BYTES), _rows(participants, KEY_BYTES))


def _rows(count: int, size: int) -> Any:
    return jax.ShapeDtypeStruct((count, size), np.dtype(np.uint8))
