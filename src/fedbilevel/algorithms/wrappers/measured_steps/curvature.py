r"""The curvature L1 of the lower level, followed along a run.

Every client keeps a vector v and multiplies it by its Hessian once a round, on a batch
of its own, where it stands (a power iteration that is never begun anew):

    v <- hvp_k(x, y; zeta)[v] / ||...||,    L_k = ||hvp_k(x, y; zeta)[v]||

A mean travels through every channel, a largest value through few. So clients send
(L_k / L)^4, L being what they were sent, and the server takes the fourth root of the
mean: at least max L_k / n^(1/4), so that a step of 0.5/L is stable on every one of up
to 256 clients, however they differ. L follows what grows at once, what falls slowly.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import AbstractBlocks, Key, Lower
from fedbilevel.problem import Oracle, curvature_along, some_direction

POWER = 4
START = 10  # products before the first round
_FASTEST = 2.0  # by which L may grow in a round
_FORGOTTEN = 0.1  # of an L that has fallen
_SMALLEST = 1e-30


def first_vector(y: Lower, kind: Any = None) -> Lower:
    """Return some v of length 1, the same on every machine.

    `kind` is that of the keys of a program, where they are drawn from in another way.
    """
    return some_direction(y, jr.key(0, impl=kind))


def multiplied(
    oracle: Oracle, point: AbstractBlocks, v: Lower, key: Key, times: int = 1
) -> tuple[Lower, Array]:
    """Return v after some products on one batch, and the curvature along it."""
    place: Any = point
    zeta = oracle.draw_lower(key)
    after, size = curvature_along(oracle, place.x, place.y, v, zeta, times)
    # A direction that was lost is looked for anew.
    anew = first_vector(v, jr.key_impl(key))
    after = _tree.select(size > 0, after, anew)
    return after, jnp.maximum(size, _SMALLEST)


def followed(curvature: Array, ratio: Array) -> Array:
    """Return L after a round whose clients sent this mean of (L_k / L)^4."""
    factor = jnp.clip(ratio, 0, _FASTEST**POWER) ** (1 / POWER)
    slow = 1 + _FORGOTTEN * (factor - 1)
    after = curvature * jnp.where(factor > 1, factor, slow)
    return after.astype(curvature.dtype)


def point_in(message: Any) -> AbstractBlocks | None:
    """Return the first point (x, y) that a message holds, if there is one."""

    def is_blocks(node: Any) -> bool:
        return isinstance(node, AbstractBlocks)

    for node in jax.tree.leaves(message, is_leaf=is_blocks):
        if is_blocks(node) and jax.tree.leaves(node.x) and jax.tree.leaves(node.y):
            return node
    return None
