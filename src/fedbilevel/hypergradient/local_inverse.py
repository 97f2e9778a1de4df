r"""How wrong it is to invert each client's own Hessian in place of the mean one.

    mean_k J_k H_k^-1 b_k   against   Jbar Hbar^-1 bbar

The two agree for clients that are alike. Where they differ, methods that average the
clients' own hypergradients converge to another point, however small their steps.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Lower, Scalar, Upper
from fedbilevel.hypergradient.conjugate_gradient import ConjugateGradient, newton_step
from fedbilevel.problem import ClientData, Oracle, Problem

__all__ = ["local_inverse_bias"]


@eqx.filter_jit
def local_inverse_bias(
    problem: Problem, data: ClientData, x: Upper, y: Lower, steps: int = 30
) -> Scalar:
    """Return the relative error of the mean of the clients' own hypergradients.

    Over all rows, one Newton step below the start y, because at a start of zeros the
    cross term may vanish. Systems are solved by `steps` conjugate-gradient steps.
    """
    together = Oracle(problem, data, None, None, None)
    rule, near = ConjugateGradient(steps), newton_step(together, x, y, steps)

    def hypergradient(oracle: Oracle) -> Upper:
        return rule(oracle, x, near, rule.draw(oracle, jr.key(0)))

    def of_client(client: Array) -> Upper:
        return hypergradient(Oracle(problem, data, client, None, None))

    each = jax.lax.map(of_client, jnp.arange(data.clients, dtype=jnp.int32))
    share = data.weights / jnp.sum(data.weights)
    mean = jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, 1), each)
    true = hypergradient(together)
    size = _tree.norm(true)
    error = _tree.norm(_tree.subtract(mean, true))
    return error / jnp.where(size > 0, size, 1)
