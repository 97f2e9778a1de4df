r"""The local loop of all single-loop methods.

A method states the point it carries, the directions it evaluates there, the estimator
that filters them, its weights and steps. At local iteration t with sample bundle b_t:

    d_t     = estimator(G(., b_t), w_t, w_{t-1}, d_{t-1}, weight_t)
    w_{t+1} = w_t - step_t d_t
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Int, PyTree

from fedbilevel import _tree
from fedbilevel._types import Key, Pair
from fedbilevel.estimators import AbstractEstimator

__all__ = ["Iterate", "Memory", "Sample", "local_steps"]

Sample = Callable[[Key], Callable[[Any], PyTree]]


class Iterate(eqx.Module):
    """A point and the directions it moved along; this is what travels."""

    point: Pair
    direction: Pair


class Memory(eqx.Module):
    """A client's own last point before averaging, and the round it is from."""

    previous: Pair
    round: Int[Array, ""]


def local_steps(
    iterate: Iterate,
    previous: Any,
    times: tuple[Int[Array, " steps"], Key],
    sample: Sample,
    estimator: AbstractEstimator,
    weight: Callable[[Array], PyTree],
    step: Callable[[Array], PyTree],
) -> tuple[Iterate, Any]:
    """Run the loop above; return the last iterate and the point before it.

    `sample(key)` draws a bundle and returns G, the directions at a point with it.
    """

    def one(carry: tuple[Iterate, Any], time: tuple[Array, Key]):
        (at, before), (t, key) = carry, time
        direction = estimator(sample(key), at.point, before, at.direction, weight(t))
        moved = jax.tree.map(
            lambda s, w, d: _tree.add_scaled(w, -s, d), step(t), at.point, direction
        )
        return (Iterate(moved, direction), at.point), None

    return jax.lax.scan(one, (iterate, previous), times)[0]
