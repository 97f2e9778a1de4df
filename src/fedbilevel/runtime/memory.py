"""What a run takes of the memory of its device, known before it runs."""

import os
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device that the compiled rounds take.

    `frozen` is what is never trained, `rows` those of the clients and of tests, `state`
    what server and clients carry, `working` all intermediate values of the rounds.
    `total` has some small inputs and outputs more. `limit` is what the device has, None
    if that is not known.
    """

    frozen: int
    rows: int
    state: int
    working: int
    total: int
    limit: int | None

    @property
    def fits(self) -> bool | None:
        """Say whether the device has that much, None if that is not known."""
        return None if self.limit is None else self.total <= self.limit


def held_bytes(tree: PyTree) -> int:
    """Return the bytes of arrays on the first of this process' devices."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def limit_of(device: Any) -> int | None:
    """Return the bytes that a program may take of a device."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
