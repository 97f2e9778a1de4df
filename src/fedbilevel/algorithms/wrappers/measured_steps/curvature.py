r"""The curvature of the lower level, followed along a run: L1, and that along z.

Every client keeps a vector v and multiplies it by its Hessian once a round, on a batch
of its own, at its own point. This power iteration never starts anew. In every fourth
round the client multiplies the direction of z instead:

    v <- hvp_k(x, y; zeta)[v] / ||...||,    L_k = ||hvp_k(x, y; zeta)[v]||
    s_k = z'hvp_k(x, y; zeta)[z] / z'z

A mean travels through every channel, a largest value through few. So clients send
(L_k / L)^4, L being what they were sent, and the server takes the fourth root of the
mean: at least max L_k / n^(1/4), so that a step of 0.5/L is stable on every one of up
to 256 clients, however they differ. L follows what grows at once, what falls slowly.

Along a run the products are differences of gradients, ||y||/100 to both sides. For
what is smooth at that scale this is the Hessian. A kink, as ||y|| has at 0, curves
without bound in a point, and steps of 0.5/L would end there: y and z stand still, x
keeps moving. At the scale of the steps of y it curves by no more than its slopes
differ.

Where the lower level is not strongly convex, nothing holds z, which solves H z = fy: it
grows along what is flat, and exponentially where g curves downward. The mean of s_k
is z'Hz/z'z, which is at least mu where there is one. With s its running mean,

    delta <- max(0.97 delta, 1.5 max(0, 1e-5 L - s))      (H + delta I) z = fy

in every product with H, series included. So delta is exactly 0 where L < 1e5 mu,
and the bias of z, at most delta/(mu + delta) ||z|| where there is a mu, is none.
"""

import math
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._types import AbstractBlocks, Key, Lower
from fedbilevel.problem import Oracle, curvature_along, some_direction

POWER = 4
START = 10  # products before the first round
_FASTEST = 2.0  # by which L may grow in a round
_FORGOTTEN = 0.1  # of an L that has fallen
_SMALLEST = 1e-30
_REACH = 1e-2  # of the size of y, and absolutely where y is 0
_FLAT, _FELT = 1e-5, 1e-4  # of L
_NONE = 1e-4  # of a curvature that would stop y within its own size
_EVERY = 4  # rounds between two products with z
_NEWEST, _KEPT, _MORE = 0.3, 0.97, 1.5


class Softness(eqx.Module):
    """The usual curvature along z and the damping, both as shares of L."""

    along: Float[Array, ""]
    damping: Float[Array, ""]

    @staticmethod
    def of(kind: Any) -> "Softness":
        """Begin without any damping."""
        return Softness(jnp.ones((), kind), jnp.zeros((), kind))

    def is_felt(self) -> Array:
        """Say whether it is more than rounding may bring about."""
        return self.damping > _FELT

    def seen(self, along: Array, is_z: Array) -> "Softness":
        """Return what is known after a round whose product was, or was not, with z."""
        along = self.along + _NEWEST * (along.astype(self.along.dtype) - self.along)
        needed = _MORE * jnp.maximum(_FLAT - along, 0)
        after = Softness(along, jnp.maximum(_KEPT * self.damping, needed))
        return _tree.select(is_z, after, self)


def is_along_z(index: Any) -> Array:
    """Say whether the product of a round is with z."""
    return jnp.asarray(index) % _EVERY == _EVERY - 1


def first_vector(y: Lower) -> Lower:
    """Return some v of length 1, the same on every machine."""
    return some_direction(y, jr.key(0))


def multiplied(
    oracle: Oracle, point: AbstractBlocks, v: Lower, key: Key, times: int = 1
) -> tuple[Lower, Array]:
    """Return v after some products at the scale of y, and the curvature along it."""
    place: Any = point
    coarse = replace(oracle, radius=_reach(place.y))
    zeta = coarse.draw_lower(key)
    return curvature_along(coarse, place.x, place.y, v, zeta, times)


def begun(oracle: Oracle, point: AbstractBlocks, key: Key) -> tuple[Lower, Array]:
    """Return v after the first products, and the curvature along it.

    Where there is none, as a hinge has none off its kink, the first step of y must not
    be longer than y itself.
    """
    place: Any = point
    v, size = multiplied(oracle, point, first_vector(place.y), key, START)
    slope = oracle.lower_gradient(place.x, place.y, oracle.draw_lower(key))
    whole = _tree.norm(slope) * (_REACH / _reach(place.y))
    size = jnp.where(size > _NONE * whole, size, whole)
    return v, jnp.maximum(size, _SMALLEST)


def found(after: Lower, size: Array) -> Lower:
    """Return the next v: one that was lost is looked for anew."""
    return _tree.select(size > 0, after, _another(after))


def _another(like: Lower) -> Lower:
    """Return a vector of cosines, of length 1.

    Random numbers that almost no round needs would be a sixth of what a program of
    rounds has to compile.
    """
    sizes = [leaf.size for leaf in jax.tree.leaves(like)]
    # The sum of cos(i)^2 for i = 1..n.
    squares = [n / 2 + math.sin(n) * math.cos(n + 1) / math.sin(1) / 2 for n in sizes]
    length = math.sqrt(sum(squares))

    def wave(leaf: Array) -> Array:
        turns = jax.lax.iota(leaf.dtype, leaf.size) + 1
        return (jnp.cos(turns) / length).reshape(leaf.shape)

    return jax.tree.map(wave, like)


def _reach(y: Lower) -> Array:
    size = _tree.norm(y)
    return _REACH * jnp.where(size > 0, size, jnp.ones_like(size))


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
