"""The one definition of how replies become an average, and of what is measured."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedbilevel import _tree
from fedbilevel._types import Scalar
from fedbilevel.problem import Oracle
from fedbilevel.runtime.job import Job

Reduce = Callable[[Any], Any]


def weighted_mean(
    replies: PyTree, weights: Float[Array, " slots"], total: Reduce
) -> PyTree:
    """Average replies by weights; `total` adds up what other devices hold.

    Slots of weight 0 are not clients and are left out whatever they hold.
    """
    share = weights / total(jnp.sum(weights))

    def mean(leaf: Array) -> Array:
        across = (-1,) + (1,) * (leaf.ndim - 1)
        part = share.astype(leaf.dtype).reshape(across)
        return total(jnp.sum(jnp.where(part > 0, part * leaf, 0), axis=0))

    return jax.tree.map(mean, replies)


def client_measurements(oracle: Oracle, x: PyTree, y: PyTree) -> tuple[Scalar, PyTree]:
    """Return f_k and grad_y g_k over all of a client's rows."""
    upper = oracle.upper_loss(x, y, oracle.all_upper())
    return upper, oracle.lower_gradient(x, y, oracle.all_lower())


def combine_measurements(
    job: Job, x: PyTree, y: PyTree, mean: tuple[Scalar, PyTree]
) -> dict[str, Scalar]:
    """Return the columns of one round from the clients' mean measurements."""
    upper, gradient = mean
    columns = {"upper_loss": upper, "lower_gradient_norm": _tree.norm(gradient)}
    extra = {} if job.metrics is None else job.metrics(x, y)
    return {**columns, **extra}
