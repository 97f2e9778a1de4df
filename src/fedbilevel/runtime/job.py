"""What is to be run, and what is carried while it runs."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Int, PyTree, UInt8

from fedbilevel._blocks import NOTHING, either, is_any, join, split
from fedbilevel._types import Key, Lower, Metrics, Pair, Upper
from fedbilevel.algorithms import AbstractAlgorithm, Phase, Turn, every_phase
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import (
    ClientData,
    Oracle,
    Problem,
    check_problem,
    largest_curvature,
)
from fedbilevel.runtime import _keys

__all__ = [
    "ABSENT",
    "OWN_COLUMNS",
    "PRESENT",
    "RENEWED",
    "Job",
    "Kept",
    "State",
    "reply_shape",
    "start_kept",
    "start_server",
    "start_state",
    "strongly_typed",
]

ABSENT, PRESENT, RENEWED = 0, 1, 2  # of a client in an exchange
OWN_COLUMNS = ("round", "upper_loss", "lower_gradient_norm", "bytes", "samples")


class Job(eqx.Module):
    """An algorithm on a problem with data, start, metrics, cohort size, key, channel.

    `channel` is what is done to replies between clients and server.
    """

    algorithm: AbstractAlgorithm
    problem: Problem
    data: ClientData
    x: Upper
    y: Lower
    metrics: Metrics | None
    key: Key
    private: Pair = eqx.field(static=True)
    participants: int = eqx.field(static=True)
    upper_batch: int | None = eqx.field(static=True)
    lower_batch: int | None = eqx.field(static=True)
    attendance: UInt8[Array, "exchanges clients"] | None = None
    channel: Channel = PLAIN

    @staticmethod
    def of(
        algorithm: AbstractAlgorithm,
        problem: Problem,
        data: ClientData,
        x: Upper,
        y: Lower,
        *,
        metrics: Metrics | None = None,
        seed: int = 0,
        participants: int | None = None,
        batch: int | None = 1,
        private: Pair = NOTHING,
        channel: Channel = PLAIN,
    ) -> "Job":
        """Check everything that can be checked before running, and bind it.

        `batch` is the number of rows per sample on both levels; None takes all rows,
        so that oracles are deterministic. `private` marks blocks of x or y (True, or a
        tree of True and False) that each client keeps to itself.
        """
        x, y = jax.tree.map(strongly_typed, (x, y))
        count = data.clients if participants is None else participants
        if not 1 <= count <= data.clients:
            raise InvalidInputError(
                f"participants={count}: choose between 1 and the {data.clients} "
                "clients there are."
            )
        if algorithm.pools:
            count = 1
        if batch is not None and batch < 1:
            raise InvalidInputError(f"batch={batch}: draw at least one row.")
        check_problem(problem, data, x, y)
        marks = _private_blocks(algorithm, private, x, y)
        key = jr.key(seed)
        job = Job(
            algorithm, problem, data, x, y, metrics, key, marks, count, batch, batch
        )
        job = replace(job, channel=_checked(channel, job))
        job.check_curvature(algorithm)
        job._check_metrics()
        return job

    @property
    def sites(self) -> int:
        """How many take part: the clients, or the one machine that holds all rows."""
        return 1 if self.algorithm.pools else self.data.clients

    def oracle(self, client: Array | int) -> Oracle:
        """Return the oracle of one client."""
        where = None if self.algorithm.pools else client
        return Oracle(
            self.problem, self.data, where, self.upper_batch, self.lower_batch
        )

    def public(self, tree: PyTree) -> PyTree:
        """Return what of a message, a reply or the server's state may travel."""
        return split(tree, self.private)[0]

    def own(self, tree: PyTree) -> PyTree:
        """Return the rest, which stays on its client."""
        return split(tree, self.private)[1]

    def replaying(self, attendance: np.ndarray) -> "Job":
        """Return the job with the clients of every exchange as recorded.

        ABSENT, PRESENT, or RENEWED: the client took part after it had lost what it
        kept. A client that is absent keeps what it had before.
        """
        shape = (attendance.ndim, attendance.shape[-1:])
        if shape != (2, (self.sites,)) or not (attendance > ABSENT).any(axis=1).all():
            raise InvalidInputError(
                f"attendance of shape {attendance.shape}: give a row per exchange with "
                f"an entry for each of the {self.sites} clients, one of them present."
            )
        self.channel.check(int((attendance > ABSENT).sum(axis=1).min()))
        record = jnp.asarray(attendance, jnp.uint8)
        return replace(self, attendance=record, participants=self.sites)

    def check_curvature(self, *algorithms: AbstractAlgorithm) -> None:
        """Raise if the lower level curves too much at the start for one of them."""
        probe = jr.fold_in(self.key, 2)
        values = np.asarray(
            largest_curvature(
                self.oracle(jnp.asarray(0)), self.sites, self.x, self.y, probe
            )
        )
        worst = int(np.argmax(values))
        for algorithm in algorithms:
            algorithm.check(float(values[worst]), worst)

    def _check_metrics(self) -> None:
        shapes = (
            {} if self.metrics is None else jax.eval_shape(self.metrics, self.x, self.y)
        )
        for name, shape in shapes.items():
            if name in OWN_COLUMNS or shape.shape != ():
                raise InvalidInputError(
                    f"metric '{name}' of shape {shape.shape}: a metric is one number, "
                    f"under a name other than {', '.join(OWN_COLUMNS)}."
                )


class Kept(eqx.Module):
    """What one client keeps between exchanges, or all of them, stacked.

    `memory` is the algorithm's, `own` the private blocks that the server never has,
    `channel` what its coders remember of each phase, by stage and number.
    """

    memory: PyTree
    own: PyTree
    channel: dict[tuple[int, int], PyTree] | None = None


class State(eqx.Module):
    """What the server carries, and what every client keeps, stacked over clients.

    `exchanges` counts those so far where a record of attendance is replayed.
    """

    server: PyTree
    clients: Kept
    exchanges: Int[Array, ""] | None = None

    def joined(self) -> PyTree:
        """Return the server's state with the private blocks of all clients, stacked."""
        return join(self.server, self.clients.own)


def start_server(job: Job) -> PyTree:
    """Return what the server carries before the first exchange."""
    return job.public(_first_server(job))


def start_kept(job: Job) -> Kept:
    """Return what a client keeps before its first exchange."""
    memory = jax.tree.map(strongly_typed, job.algorithm.init_client(job.x, job.y))
    return Kept(memory, job.own(_first_server(job)), _start_channel(job))


def _start_channel(job: Job) -> dict[tuple[int, int], PyTree] | None:
    if not job.channel.coders:
        return None
    stages = {
        _keys.ROUNDS: job.algorithm.phases(),
        _keys.SETUP: job.algorithm.setup(),
    }
    return {
        (stage, number): job.channel.start(reply_shape(job, phase))
        for stage, phases in stages.items()
        for number, phase in enumerate(every_phase(phases))
    }


def reply_shape(job: Job, phase: Phase) -> PyTree:
    """Return the shapes of what a client may send in a phase; nothing is computed."""

    def reply() -> PyTree:
        memory = job.algorithm.init_client(job.x, job.y)
        message = phase.down(_first_server(job))
        return phase.local(message, memory, job.oracle(0), Turn(job.key, 0))[1]

    return job.public(jax.eval_shape(reply))


def start_state(job: Job) -> State:
    """Return the states before the first exchange."""
    clients = jax.tree.map(
        lambda a: jnp.broadcast_to(a, (job.sites, *a.shape)), start_kept(job)
    )
    counter = None if job.attendance is None else jnp.zeros((), jnp.int32)
    return State(start_server(job), clients, counter)


def _first_server(job: Job) -> PyTree:
    return jax.tree.map(strongly_typed, job.algorithm.init_server(job.x, job.y))


def _checked(channel: Channel, job: Job) -> Channel:
    """Return the channel for the participants of a job that it suits."""
    if channel.is_plain:
        return channel
    if job.algorithm.pools:
        raise InvalidInputError(
            f"`{type(job.algorithm).__name__}` holds all rows in one place, so nothing "
            "travels that a channel could protect, compress or reduce. Leave it out."
        )
    weights = np.asarray(job.data.weights)
    if channel.privacy is not None and (weights != weights[0]).any():
        raise InvalidInputError(
            "clip and noise protect clients of equal weight: the mean of others "
            f"depends more on some of them. The weights are {weights.min():g} to "
            f"{weights.max():g}; make them equal, or leave out clip and noise."
        )
    channel.check(job.participants)
    return channel.shared_by(job.participants)


def _private_blocks(
    algorithm: AbstractAlgorithm, private: Pair, x: Upper, y: Lower
) -> Pair:
    if is_any(private) and not algorithm.allows_private:
        raise InvalidInputError(
            f"`{type(algorithm).__name__}` needs whole levels in one place, but blocks "
            "of this problem are private to each client. Use a method of one loop, "
            "such as FedBiO or LocalBSGVRM."
        )
    try:
        return either(private, algorithm.private, x, y)
    except ValueError as error:
        raise InvalidInputError(
            f"private={private}: give True, False, or a tree of them shaped like the "
            f"start, for each of x and y. {error}"
        ) from error


def strongly_typed(leaf: Any) -> Array:
    """Strip the weak type of `jnp.asarray(0.5)`: it would make two programs of one."""
    value = jnp.asarray(leaf)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return jnp.asarray(value, dtype=value.dtype)
