"""Small parts that several single-loop methods share."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel._types import Key
from fedbilevel.algorithms._single_loop import Directions
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule

__all__ = [
    "at_time",
    "coupled",
    "first_or_coupled",
    "hypergradient_and_slope",
    "lower_slope",
]


def at_time(schedule: Schedule, t: Any, like: Array) -> Array:
    """Return a schedule's value; one of another library chooses its own precision."""
    return jnp.asarray(schedule(t), like.dtype)


def coupled(factor: Array, schedule: Schedule, t: Any, power: int) -> Array:
    """Return the momentum weight factor * schedule(t-1)^power."""
    earlier = jnp.maximum(jnp.asarray(t) - 1, 0)
    return factor * at_time(schedule, earlier, factor) ** power


def first_or_coupled(
    factor: Array, schedule: Schedule, t: Any, power: int, first_bundles: int = 1
) -> Array:
    """Return the same, and 1/B at t = 0."""
    weight = coupled(factor, schedule, t, power)
    return jnp.where(t == 0, jnp.asarray(1 / first_bundles, weight.dtype), weight)


def hypergradient_and_slope(
    rule: AbstractHypergradient, oracle: Oracle, key: Key
) -> Directions:
    """Draw a bundle and zeta, independent; return h_k for x and grad_y g_k for y."""
    for_bundle, for_zeta = jr.split(key)
    bundle = rule.draw(oracle, for_bundle)
    slope = lower_slope(oracle, for_zeta)
    return {"x": lambda w: rule(oracle, w.x, w.y, bundle), **slope}


def lower_slope(oracle: Oracle, key: Key) -> Directions:
    """Draw zeta; return grad_y g_k for y."""
    zeta = oracle.draw_lower(key)
    return {"y": lambda w: oracle.lower_gradient(w.x, w.y, zeta)}
