"""The one definition of how replies become an average, and of what is measured."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import is_any, join
from fedbilevel._types import Pair, Scalar
from fedbilevel.algorithms import Phase, Turn
from fedbilevel.runtime.job import Job, Kept

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


def answer(
    job: Job,
    phase: Phase,
    message: PyTree,
    kept: Kept,
    turn: Turn,
    client: Array | int,
) -> tuple[Kept, PyTree, Array]:
    """Do one client's part of an exchange.

    `message` is what the server sent. Return anew what the client keeps, the reply that
    may travel, and whether all of the reply was finite.
    """
    memory, own, full = kept.memory, kept.own, message
    if is_any(job.private):
        full = join(message, own)
    memory, reply = phase.local(full, memory, job.oracle(client), turn)
    if is_any(job.private):
        # Private blocks are updated as the server updates the others; with some there,
        # a message is all of the server's state.
        own = job.own(phase.up(full, reply))
    return Kept(memory, own), job.public(reply), _tree.all_finite(reply)


def absorb(job: Job, phase: Phase, server: PyTree, mean: PyTree) -> PyTree:
    """Return the server's state after it has taken in the mean reply."""
    return job.public(phase.up(server, mean))


class Measurement(eqx.Module):
    """What one client measures at its point; means over clients make the columns."""

    upper: Scalar
    slope: PyTree
    own_slope: Scalar
    metrics: dict[str, Scalar]


def client_measurement(
    job: Job,
    client: Array | int,
    server: PyTree,
    own: PyTree,
    *,
    everything: bool = False,
) -> Measurement:
    """Measure over all of a client's rows, at the shared point with its own blocks.

    Metrics of a point that all share are left to the server, unless `everything` is to
    be measured here, where the rows are.
    """
    point, oracle = job.algorithm.point(join(server, own)), job.oracle(client)
    upper = oracle.upper_loss(point.x, point.y, oracle.all_upper())
    slope = Pair(None, oracle.lower_gradient(point.x, point.y, oracle.all_lower()))
    mine = job.own(slope)
    square = _tree.dot(mine, mine) if jax.tree.leaves(mine) else jnp.zeros_like(upper)
    metrics = {}
    if (everything or is_any(job.private)) and job.metrics is not None:
        metrics = job.metrics(point.x, point.y)
    return Measurement(upper, job.public(slope), square, metrics)


def combine_measurements(job: Job, server: PyTree, mean: Measurement) -> dict:
    """Return the columns of one round from the clients' mean measurements.

    The slope of a private block is its root mean square over clients. Where blocks are
    private a metric is the mean of its values on the clients.
    """
    square = mean.own_slope
    if jax.tree.leaves(mean.slope):
        square = square + _tree.dot(mean.slope, mean.slope)
    columns = {"upper_loss": mean.upper, "lower_gradient_norm": jnp.sqrt(square)}
    if is_any(job.private) or job.metrics is None:
        return {**columns, **mean.metrics}
    point = job.algorithm.point(server)
    return {**columns, **job.metrics(point.x, point.y)}
