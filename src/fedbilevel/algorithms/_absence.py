r"""What STORM remembers where some clients take part, and others do not.

The server sends a direction d that others have formed. A client that took part in the
last turn corrects it from its own last point v, before averaging:

    d_1 = G(w; s) + (1 - a) (d - G(v; s))

One that missed it has no such point on the averaged path. It may

    keep:     take v = w: the correction vanishes, and d remains but for a of it
    correct:  take for v where the last participants evaluated d in the mean, which
              follows from what is received: v = w + step d, each block as it was when
              the direction was formed (exact for the mean of their local steps)
    forget:   take v = w and forget as much of d as in the steps it missed: after m of
              them 1 - (1 - a)^(1 + m) takes the place of a at the first step

Where all take part the three are one. Nothing more is sent or kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel.algorithms._base import Turn
from fedbilevel.algorithms._local import Iterate, Memory, move, only, previous_point

__all__ = ["ABSENT", "KEEP", "faded", "missed_steps", "where_evaluated"]

KEEP, CORRECT, FORGET = ABSENT = ("keep", "correct", "forget")


def where_evaluated(
    absent: str,
    received: Iterate,
    memory: Memory,
    turn: Turn,
    order: Sequence[PyTree],
    step: Callable[[Any], PyTree],
    count: int,
) -> tuple[Any, ...]:
    """Return v for each group of blocks, which moved in this order.

    `step(t)` are the steps of iteration t, of which there are `count` in a turn.
    """
    others = (received.point,) * len(order)
    if absent == CORRECT:
        t = turn.steps(count)[0]
        undone = _undone(received, step(jnp.maximum(t - 1, 0)), order)
        others = _tree.select(t > 0, undone, others)
    return previous_point(others, memory, turn)


def _undone(
    received: Iterate, steps: PyTree, order: Sequence[PyTree]
) -> tuple[Any, ...]:
    w = received.point
    stood = move(w, jax.tree.map(jnp.negative, steps), received.direction)
    points = []
    for group in order:
        points.append(stood)
        # Those that follow were evaluated after this group had moved.
        stood = combine(only(w, group), stood)
    return tuple(points)


def missed_steps(
    absent: str, memory: Memory, turn: Turn, count: int
) -> Int[Array, ""] | None:
    """Return how many local steps a client missed, None where that is of no matter."""
    if absent != FORGET:
        return None
    last = jnp.maximum(memory.index, -1)
    return count * (jnp.asarray(turn.index, jnp.int32) - 1 - last)


def faded(weight: PyTree, missed: Array | None, first: Any) -> PyTree:
    """Return the weights, at the first step of a turn those of all missed steps."""
    if missed is None:
        return weight
    late = first & (missed > 0)

    def one(a: Array) -> Array:
        kept = (1 - a) ** (1 + missed).astype(a.dtype)
        return jnp.where(late, 1 - kept, a)

    return jax.tree.map(one, weight)
