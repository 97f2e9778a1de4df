r"""Small variations of local steps, each a part of a method of one loop.

    warm start    y <- y - step(0).y gy(x, y), some steps before the first round
    first batch   d_0 is the mean of B bundles; the loop adds the last with weight 1/B
    projection    w <- P(w) after every move: z in a ball, x or y in a box, a simplex, a
                  half-space
    alternating   blocks move in turn, each at fresh values, which are the client's own:
                  where clients differ the limit is biased, at p = 1, too, unless
                  `controls` or an `anchor` correct every direction
    personal y    every client keeps a personal lower variable
    differences   hvp[v] = (gy(x, y + d v) - gy(x, y - d v)) / (2 d) and jvp[v] likewise
                  with gx, on one batch, d = distance / ||v||

Differences are exact if g is quadratic in y, and otherwise off by order distance^2.
Distances below 1e-3 are lost in rounding in float32. DARTS replaces products likewise
(arXiv 1806.09055). If steps are measured, the measurement of the curvature still takes
Hessian products.
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair
from fedbilevel.algorithms.base import Phase, Turn
from fedbilevel.algorithms.one_loop import when
from fedbilevel.algorithms.parts import Iterate, Order, Part
from fedbilevel.algorithms.wrappers.base import Around
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number, part, word


class WarmStart(Part):
    """Lower steps before the first round, averaged once."""

    warm_start: int = count("lower steps before the first round", least=0)

    def setup(self, method, place):
        """Return the exchange that averages y after the lower steps."""
        length, steps = method.step(0).y, self.warm_start

        def local(point: Any, client: Any, oracle: Oracle, turn: Turn):
            def descend(y: Lower, key: Key) -> tuple[Lower, None]:
                slope = oracle.lower_gradient(point.x, y, oracle.draw_lower(key))
                return _tree.add_scaled(y, -length, slope), None

            y, _ = jax.lax.scan(descend, point.y, turn.keys(steps))
            return client, Pair(None, y)

        def up(server: Iterate, mean: Pair) -> Iterate:
            return replace(server, point=replace(server.point, y=mean.y))

        def known(point: Any) -> Pair:
            return Pair(None, point.y)

        one = Phase("warm_start", lambda s: s.point, local, up, about=known)
        return (one,) if steps else ()


class FirstBatch(Part):
    """First directions from B independent bundles at the start."""

    first_batch: int = count("bundles of the first directions, B")

    def first(self, begin, G, d):
        """Return d, at t = 0 the mean of all but one of the bundles at w."""
        others, turn = self.first_batch - 1, begin.turn
        if others == 0:
            return d
        w = begin.method.moving(begin.message.point)

        def add(total: Any, key: Key) -> tuple[Any, None]:
            return _tree.add(total, G(key)(w)), None

        def mean() -> Any:
            total, _ = jax.lax.scan(add, d, turn.spare_keys(others))
            return _tree.scale(1 / others, total)

        return when(turn.index == 0, mean, lambda: d)

    def weights(self, state, weights, t):
        """Return 1/B at t = 0."""

        def one(a: Array) -> Array:
            return jnp.where(t == 0, jnp.asarray(1 / self.first_batch, a.dtype), a)

        return jax.tree.map(one, weights)


class Project(Part):
    """A block, x, y or z, stays in a convex set after every move."""

    onto: Any = part("the set: a ball, a box, a simplex or a half-space")
    block: str = word("the block that is projected", ("x", "y", "z"), default="x")

    def settings(self):
        """Return the bound of z, or the set by its name and block."""
        if isinstance(self.onto, Ball) and self.block == "z":
            return {"radius": self.onto.radius}
        return {f"{type(self.onto).__name__.lower()}_{self.block}": self.onto}

    def projected(self, w):
        """Return the point with this block in its set."""
        inside = self.onto(getattr(w, self.block))
        return replace(w, **{self.block: inside})


class Ball(eqx.Module):
    """All points with a norm of at most `radius`."""

    radius: Any = number("bound of the norm", above=0.0)

    def __call__(self, block: PyTree) -> PyTree:
        """Return the nearest point of the ball."""
        size = _tree.norm(block)
        # The zero vector is inside every ball, and must not become 0/0.
        factor: Any = jnp.minimum(
            1, self.radius.astype(size.dtype) / jnp.where(size > 0, size, 1)
        )
        return _tree.scale(factor, block)


class Box(eqx.Module):
    """All points whose entries are between `low` and `high`."""

    low: Any = number("smallest entry")
    high: Any = number("largest entry")

    def __call__(self, block: PyTree) -> PyTree:
        """Return the nearest point of the box."""

        def clipped(leaf: Array) -> Array:
            return jnp.clip(leaf, self.low.astype(leaf.dtype), self.high)

        return jax.tree.map(clipped, block)


class Simplex(eqx.Module):
    """All points with entries of at least 0 that sum to `total`."""

    total: Any = number("sum of the entries", default=1.0, above=0.0)

    def __call__(self, block: PyTree) -> PyTree:
        """Return the nearest point: max(v - theta, 0) with theta by the sorted v."""
        v, restored = ravel_pytree(block)
        total = self.total.astype(v.dtype)
        falling = -jnp.sort(-v)
        excess = (jnp.cumsum(falling) - total) / jnp.arange(
            1, v.size + 1, dtype=v.dtype
        )
        positive = jnp.sum(falling > excess)
        return restored(jnp.maximum(v - excess[positive - 1], 0))


class HalfSpace(eqx.Module):
    """All points whose entries sum to at most `bound`: a budget."""

    bound: Any = number("largest sum of the entries")

    def __call__(self, block: PyTree) -> PyTree:
        """Return the nearest point of the half-space."""
        v, restored = ravel_pytree(block)
        over = jnp.maximum(jnp.sum(v) - self.bound.astype(v.dtype), 0)
        return restored(v - over / v.size)


class Alternating(Around):
    """Blocks move in turn, the lower level first, each at fresh values."""

    def settings(self) -> dict[str, Any]:
        """Return those of the method, and the option."""
        return {**self.algorithm.settings(), "alternating": True}

    def order(self) -> Order:
        """Return the method's alternating order."""
        return self.algorithm.in_turn()


class Differences(Around):
    """Products are central differences of gradients: no second derivative."""

    distance: Number = number(
        "distance of the points whose gradients' difference stands for a product",
        default=1e-2,
    )

    def directions(self, oracle: Oracle, key: Key, t: Any) -> Any:
        """Return the method's maps, with other products."""
        near = replace(oracle, radius=self.distance)
        return self.algorithm.directions(near, key, t)


class OwnLower(Around):
    """Every client keeps its y to itself: a personal lower variable."""

    def settings(self) -> dict[str, Any]:
        """Return those of the method, and the option."""
        return {**self.algorithm.settings(), "own_lower": True}

    @property
    def answers(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Say that every client has a personal lower variable."""
        return "own y per client"

    def private_blocks(self) -> Pair:
        """Keep y, and what belongs to it, on its client."""
        return Pair(False, True)
