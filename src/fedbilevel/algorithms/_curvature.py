r"""The curvature L1 of the lower level, followed along a run; and the stride of x.

Every client keeps a vector v and multiplies it by its Hessian once a round, on a batch
of its own, where it stands (a power iteration that is never begun anew):

    v <- hvp_k(x, y; zeta)[v] / ||...||,    L_k = ||hvp_k(x, y; zeta)[v]||

A mean travels through every channel, a largest value through few. So clients send
(L_k / L)^4, L being what they were sent, and the server takes the fourth root of the
mean: at least max L_k / n^(1/4), so that a step of 0.5/L is stable on every one of up
to 256 clients, however they differ. L follows what grows at once, what falls slowly.

The stride is DoG (arXiv 2302.12022): with r the largest distance of x from its start
and G_i the way that x went in round i, in units of its step,

    stride = r / sqrt(sum_i G_i^2)
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._types import AbstractBlocks, Key, Lower, Pair, Upper
from fedbilevel.problem import Oracle

__all__ = ["POWER", "Way", "first_vector", "followed", "multiplied", "point_in"]

POWER = 4
_START = 10  # products before the first round
_FASTEST = 2.0  # by which L may grow in a round
_FORGOTTEN = 0.1  # of an L that has fallen
_FIRST_WAY = 1e-3  # of the size of x, and absolutely where x is 0
_SMALLEST = 1e-30


def first_vector(y: Lower) -> Lower:
    """Return some v of length 1, the same on every machine."""
    leaves, structure = jax.tree.flatten(y)
    keys = jr.split(jr.key(0), len(leaves))
    drawn = [jr.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
    return _unit(jax.tree.unflatten(structure, drawn))[0]


def _unit(v: Lower) -> tuple[Lower, Array]:
    size = _tree.norm(v)
    # A Hessian of zeros leaves no direction; any finite one may follow it.
    return _tree.scale(1 / jnp.where(size > 0, size, 1), v), size


def multiplied(
    oracle: Oracle, point: AbstractBlocks, v: Lower, key: Key, times: int = 1
) -> tuple[Lower, Array]:
    """Return v after some products on one batch, and the curvature along it."""
    zeta = oracle.draw_lower(key)
    place: Any = point

    def product(v: Lower, _: None) -> tuple[Lower, Array]:
        after, size = _unit(oracle.hessian_product(place.x, place.y, v, zeta))
        # A direction that was lost is looked for anew.
        return _tree.select(size > 0, after, first_vector(v)), size

    v, sizes = jax.lax.scan(product, v, None, length=times)
    return v, jnp.maximum(sizes[-1], _SMALLEST)


def at_start(oracle: Oracle, point: Pair, v: Lower, key: Key) -> tuple[Lower, Array]:
    """Return v and the curvature before the first round."""
    return multiplied(oracle, point, v, key, _START)


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


class Way(eqx.Module):
    """How far x has gone: where it began, where it was, r, and the sum of G_i^2."""

    first: Pair
    last: Pair
    farthest: Float[Array, ""]
    squares: Float[Array, ""]

    @staticmethod
    def of(x: Upper) -> "Way":
        """Begin at x, in the blocks of the upper level."""
        size = _tree.norm(x)
        begin = jnp.where(size > 0, _FIRST_WAY * size, _FIRST_WAY).astype(size.dtype)
        here = Pair(x, None)
        return Way(here, here, begin, jnp.zeros_like(begin))

    def stride(self) -> Float[Array, ""]:
        """Return the step of x, the first way itself while nothing is known."""
        known = self.squares > 0
        return self.farthest / jnp.sqrt(jnp.where(known, self.squares, 1))

    def gone(self, x: Upper, unit: Array) -> "Way":
        """Return what is known once x has gone here, by steps of this length."""
        here = Pair(x, None)
        went = _tree.norm(_tree.subtract(here, self.last)) / unit
        distance = _tree.norm(_tree.subtract(here, self.first))
        farthest = jnp.maximum(self.farthest, distance)
        squares = self.squares + went**2
        return Way(self.first, here, *self._like_before(farthest, squares))

    def _like_before(self, *numbers: Array) -> list[Array]:
        return [number.astype(self.squares.dtype) for number in numbers]

    def began(self, slope: Array) -> "Way":
        """Return what is known from the size of the first direction."""
        (squares,) = self._like_before(slope**2)
        return Way(self.first, self.last, self.farthest, squares)
