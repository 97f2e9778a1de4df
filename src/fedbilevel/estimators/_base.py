"""The contract of an estimator, and the evaluation at two points."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fedbilevel import _evaluation

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


def blockwise(combine: Callable[..., PyTree], weight: PyTree, *trees: PyTree) -> PyTree:
    """Apply `combine(weight, *subtrees)` to every block that has its own weight."""
    return jax.tree.map(combine, weight, *trees)


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
