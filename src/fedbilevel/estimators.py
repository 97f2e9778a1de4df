"""Direction estimators: how a stochastic map G is filtered over the iterations.

They know nothing of bilevel problems. `G` is a stochastic map with its sample fixed, so
calling it at two points uses the same sample at both.

    plain            d_t = G(w_t; s_t)
    moving average   d_t = (1 - a) d_{t-1} + a G(w_t; s_t)
    heavy ball       d_t = (1 - a) d_{t-1} + G(w_t; s_t)                   (Polyak)
    STORM            d_t = G(w_t; s_t) + (1 - a) (d_{t-1} - G(w_{t-1}; s_t))

with the weight a, where 1 is plain. The heavy ball has no factor in front of G, so that
its directions are 1/a times longer than those of a moving average. STORM (Cutkosky and
Orabona, arXiv 1905.10018) has the same sample s_t at both points. Without noise d_t =
G(w_t) for any a.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedbilevel import _evaluation, _tree

Sampled = Callable[[Any], PyTree]


class AbstractEstimator(eqx.Module):
    """A recursion d_t = E(G, w_t, w_{t-1}, d_{t-1}, weight).

    `weight` is one number or a prefix tree of the direction with a number per block. It
    is 1 at the first step: every recursion then returns G(w_0), whatever its memory.
    What an estimator does not keep need not be given. It returns the sample beside the
    direction, for sums of samples.
    """

    keeps_direction: ClassVar[bool] = True
    keeps_point: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(
        self,
        G: Sampled,
        point: Any,
        previous: Any,
        direction: PyTree,
        weight: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """Return d_t, and the sample G(w_t) that it used."""


class Plain(AbstractEstimator):
    """No memory."""

    keeps_direction: ClassVar[bool] = False

    def __call__(self, G, point, previous, direction, weight):
        """Return G(w_t) as both, whatever the weight is."""
        sample = G(point)
        return sample, sample


class MovingAverage(AbstractEstimator):
    """Exponential average of the samples, plain with weight 1."""

    def __call__(self, G, point, previous, direction, weight):
        """Return d_t for weight a, and the sample."""

        def combine(a, d, g):
            return _tree.add_scaled(_tree.scale(1 - a, d), a, g)

        sample = G(point)
        return jax.tree.map(combine, weight, direction, sample), sample


class HeavyBall(AbstractEstimator):
    """A decaying sum of the samples."""

    def __call__(self, G, point, previous, direction, weight):
        """Return d_t for momentum 1 - weight, and the sample."""

        def combine(a, d, g):
            return _tree.add_scaled(g, 1 - a, d)

        sample = G(point)
        return jax.tree.map(combine, weight, direction, sample), sample


class Storm(AbstractEstimator):
    """Momentum with a variance-reducing correction."""

    keeps_point: ClassVar[bool] = True

    def __call__(self, G, point, previous, direction, weight):
        """Return d_t for weight a, and the sample."""
        now, before = at_both(G, point, previous)

        def combine(a, d, g, g_before):
            return _tree.add_scaled(g, 1 - a, _tree.subtract(d, g_before))

        return jax.tree.map(combine, weight, direction, now, before), now


def at_both(G: Sampled, point: Any, previous: Any) -> tuple[PyTree, PyTree]:
    """Evaluate G, whose sample is already drawn, at two points."""
    way = _evaluation.current()
    if way.writes_out_points:
        return G(point), G(previous)
    stacked = jax.tree.map(lambda *pair: jnp.stack(pair), point, previous)
    if way.stacks_points:
        values = jax.vmap(G)(stacked)
    else:
        values = jax.lax.map(G, stacked)
    return jax.tree.map(lambda v: v[0], values), jax.tree.map(lambda v: v[1], values)
