"""The one definition of an exchange on both of its ends, and of what is measured."""

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
from fedbilevel.channels import weighted_mean
from fedbilevel.runtime.job import Job, Kept, reply_shape

Across = Callable[[Any], Any]  # of what the devices hold


class Link(eqx.Module):
    """One phase of a job between a client and the server, through the job's channel.

    `where` is the stage and the number of the phase; `like` has the shapes of a reply
    where the channel codes it.
    """

    job: Job
    phase: Phase
    where: tuple[int, int] = eqx.field(static=True)
    like: PyTree

    @staticmethod
    def of(job: Job, phase: Phase, where: tuple[int, int]) -> "Link":
        """Find out the shapes, where they are needed."""
        like = reply_shape(job, phase) if job.channel.coders else None
        return Link(job, phase, where, like)

    def work(
        self, message: PyTree, kept: Kept, turn: Turn, client: Array | int
    ) -> tuple[Kept, PyTree, Array]:
        """Do one client's part.

        `message` is what the server sent. Return anew what the client keeps, exactly
        what travels back, and whether all of the reply was finite.
        """
        job, phase, own, full = self.job, self.phase, kept.own, message
        if is_any(job.private):
            full = join(message, own)
        memory, reply = phase.local(full, kept.memory, job.oracle(client), turn)
        if is_any(job.private):
            # Private blocks are updated as the server updates the others; with some
            # there, a message is all of the server's state.
            own = job.own(phase.up(full, reply))
        coded, held = job.public(reply), kept.channel
        if held is not None:
            change = self._combine(_tree.subtract, coded, message)
            key = turn.channel_key()
            coded, after = job.channel.encode(change, held[self.where], key)
            held = {**held, self.where: after}
        return Kept(memory, own, held), coded, _tree.all_finite(reply)

    def received(self, message: PyTree, coded: PyTree) -> PyTree:
        """Do the server's part: return the reply that arrives with what was sent."""
        if not self.job.channel.coders:
            return coded
        change = self.job.channel.decode(coded, self.like)
        return self._combine(_tree.add, change, message)

    def answer(
        self, message: PyTree, kept: Kept, turn: Turn, client: Array | int
    ) -> tuple[Kept, PyTree, Array]:
        """Do both, where nothing lies between them."""
        kept, coded, finite = self.work(message, kept, turn, client)
        return kept, self.received(message, coded), finite

    def _combine(self, combine: Callable, tree: PyTree, message: PyTree) -> PyTree:
        if self.phase.about is None:
            return tree
        return combine(tree, self.phase.about(message))


def reduce_replies(
    job: Job,
    replies: PyTree,
    weights: Float[Array, " places"],
    total: Across,
    together: Across,
) -> PyTree:
    """Make one reply of all; places of weight 0 are not clients.

    `total` adds up what the devices hold, `together` lines it up.
    """
    if job.channel.reduction.adds_up:
        return weighted_mean(replies, weights, total)
    return job.channel.reduction(*together((replies, weights)))


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
