"""The loss of a point over all rows, and step sizes of a sensible order."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from benchmarks.zoo.cases import Case
from jax.flatten_util import ravel_pytree
from jax.scipy.optimize import minimize

from fedbilevel import ClientData, Problem

STEPS = 100  # of y, then of z, before the gradient of x is taken


def mean_loss(loss: Callable, rows: Any, sizes: jax.Array, x: Any, y: Any) -> jax.Array:
    """Return the mean over clients of the mean over the rows of each."""

    def of_row(row: Any) -> jax.Array:
        return loss(x, y, jax.tree.map(lambda leaf: leaf[None], row))

    def of_client(own: Any, size: jax.Array) -> jax.Array:
        values = jax.vmap(of_row)(own)
        real = (
            jnp.arange(values.size, dtype=size.dtype) < size
        )  # rows beyond it are padding
        return jnp.sum(jnp.where(real, values, 0)) / size.astype(values.dtype)

    return jnp.mean(jax.vmap(of_client)(rows, sizes))


@eqx.filter_jit
def _upper_loss(problem: Problem, data: ClientData, x: Any, y: Any) -> jax.Array:
    return mean_loss(problem.upper, data.upper, data.upper_sizes, x, y)


def upper_loss(problem: Problem, data: ClientData, x: Any, y: Any) -> float:
    """Return the upper loss on all upper rows, as every client counts the same."""
    return float(_upper_loss(problem, data, x, y))


def judged(case: Case, x: Any, y: Any) -> float:
    """Return the upper loss of a point, of an opposed problem that of x alone."""
    if case.opposed:
        y = _settled(case.problem, case.data, x, case.start[1])
    return upper_loss(case.problem, case.data, x, y)


@eqx.filter_jit
def _settled(problem: Problem, data: ClientData, x: Any, y: jax.Array) -> jax.Array:
    """Return the y that solves the lower level, found from the start."""

    def g(y: jax.Array) -> jax.Array:
        return mean_loss(problem.lower, data.lower, data.lower_sizes, x, y)

    return minimize(g, y, method="BFGS").x


@eqx.filter_jit
def _scales(
    problem: Problem, data: ClientData, start: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """Return the curvature below and the norm of the gradient of x above."""
    numbers, rest = eqx.partition(start, eqx.is_inexact_array)
    (x, to_x), (y, to_y) = (ravel_pytree(level) for level in numbers)

    def flat(loss: Callable, rows: Any, sizes: jax.Array) -> Callable:
        def of_flat(x: jax.Array, y: jax.Array) -> jax.Array:
            whole = eqx.combine((to_x(x), to_y(y)), rest)
            return mean_loss(loss, rows, sizes, *whole)

        return of_flat

    f = flat(problem.upper, data.upper, data.upper_sizes)
    g = flat(problem.lower, data.lower, data.lower_sizes)
    slope = jax.grad(g, 1)

    def product(y: jax.Array, z: jax.Array) -> jax.Array:
        return jax.jvp(lambda y: slope(x, y), (y,), (z,))[1]

    def largest(y: jax.Array) -> jax.Array:
        def again(_: Any, v: jax.Array) -> jax.Array:
            w = product(y, v)
            return w / jnp.maximum(jnp.linalg.norm(w), 1e-30)

        v = jax.lax.fori_loop(0, 30, again, jr.normal(jr.key(0), y.shape))
        return jnp.maximum(jnp.linalg.norm(product(y, v)), 1e-6)

    curvature = largest(y)
    there = jax.lax.fori_loop(0, STEPS, lambda _, y: y - slope(x, y) / curvature, y)
    there = jnp.where(jnp.isfinite(there), there, y)
    below, above = largest(there), jax.grad(f, (0, 1))(x, there)
    z = jax.lax.fori_loop(
        0, STEPS, lambda _, z: z - (product(there, z) - above[1]) / below, 0 * y
    )
    cross = jax.grad(lambda x: jnp.vdot(slope(x, there), z))(x)
    return jnp.maximum(curvature, below), jnp.linalg.norm(above[0] - cross)


def rough_steps(case: Case) -> tuple[float, float]:
    """Return steps of x and y of a sensible order, at the start with y trained a while.

    A step of y is one over the curvature. A step of x moves its entries by about one
    within the run if its gradient stays as it is.
    """
    curvature, gradient = map(float, _scales(case.problem, case.data, case.start))
    x = eqx.filter(case.start[0], eqx.is_inexact_array)
    entries = sum(leaf.size for leaf in jax.tree.leaves(x))
    upper = entries**0.5 / (max(gradient, 1e-6) * case.rounds * case.local_steps)
    return _finite(upper), _finite(1 / curvature)


def _finite(step: float) -> float:
    return step if 0 < step < float("inf") else 1.0
