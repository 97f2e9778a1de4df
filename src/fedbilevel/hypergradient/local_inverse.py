r"""How wrong it is to invert each client's own Hessian in place of the mean one.

    mean_k J_k H_k^-1 b_k   against   Jbar Hbar^-1 bbar

The two agree for clients that are alike. Where they differ, methods that average the
clients' own hypergradients converge to another point, however small their steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool

from fedbilevel import _tree
from fedbilevel._types import Lower, Scalar, Upper
from fedbilevel.hypergradient.conjugate_gradient import (
    ConjugateGradient,
    solve_if_convex,
)
from fedbilevel.problem import ClientData, Oracle, Problem


def _mean(problem: Problem, data: ClientData, of_client: Callable[[Oracle], Any]):
    """Return the mean over clients, one after the other to save memory."""
    share = data.weights / jnp.sum(data.weights)

    def value(client: Array) -> Any:
        return of_client(Oracle(problem, data, client, None, None))

    def add(total: Any, client: Array) -> tuple[Any, None]:
        return _tree.add_scaled(total, share[client], value(client)), None

    every = jnp.arange(data.clients, dtype=jnp.int32)
    nothing = _tree.zeros_like(jax.eval_shape(value, every[0]))
    return jax.lax.scan(add, nothing, every)[0]


@eqx.filter_jit
def local_inverse_bias(
    problem: Problem, data: ClientData, x: Upper, y: Lower, steps: int = 30
) -> Scalar:
    """Return the relative error of the mean of the clients' own hypergradients.

    Over all rows, one Newton step below the start y, because at a start of zeros the
    cross term may vanish. Systems are solved by `steps` conjugate-gradient steps. NaN
    where the mean lower level curves downwards in the solve: there is no inverse then.
    """
    mean = partial(_mean, problem, data)

    def inverse(at: Lower, b: Lower) -> tuple[Lower, Bool[Array, ""]]:
        def product(v: Lower) -> Lower:
            return mean(lambda one: one.hessian_product(x, at, v, one.all_lower()))

        return solve_if_convex(product, b, steps)

    slope = mean(lambda one: one.lower_gradient(x, y, one.all_lower()))
    descent, convex = inverse(y, slope)
    near = _tree.subtract(y, descent)
    direct, fy = mean(lambda one: one.upper_gradients(x, near, one.all_upper()))
    z, convex_there = inverse(near, fy)
    crossed = mean(lambda one: one.cross_product(x, near, z, one.all_lower()))
    true = _tree.subtract(direct, crossed)
    estimator = ConjugateGradient(steps)
    own = mean(lambda one: estimator(one, x, near, estimator.draw(one, jr.key(0))))
    size, error = _tree.norm(true), _tree.norm(_tree.subtract(own, true))
    relative = error / jnp.where(size > 0, size, 1)
    return jnp.where(convex & convex_there, relative, jnp.nan)
