"""What is to be run, and what is carried while it runs."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PyTree

from fedbilevel._types import Key, Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import (
    ClientData,
    Oracle,
    Problem,
    check_problem,
    largest_curvature,
)

__all__ = ["OWN_COLUMNS", "Job", "State", "start_state", "strongly_typed"]

OWN_COLUMNS = ("round", "upper_loss", "lower_gradient_norm")


class Job(eqx.Module):
    """An algorithm on a problem with data, start, metrics, cohort size and key."""

    algorithm: AbstractAlgorithm
    problem: Problem
    data: ClientData
    x: Upper
    y: Lower
    metrics: Metrics | None
    key: Key
    participants: int = eqx.field(static=True)
    upper_batch: int | None = eqx.field(static=True)
    lower_batch: int | None = eqx.field(static=True)

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
    ) -> "Job":
        """Check everything that can be checked before running, and bind it.

        `batch` is the number of rows per sample on both levels; None takes all rows,
        so that oracles are deterministic.
        """
        x, y = jax.tree.map(strongly_typed, (x, y))
        count = data.clients if participants is None else participants
        if not 1 <= count <= data.clients:
            raise InvalidInputError(
                f"participants={count}: choose between 1 and the {data.clients} "
                "clients there are."
            )
        if batch is not None and batch < 1:
            raise InvalidInputError(f"batch={batch}: draw at least one row.")
        check_problem(problem, data, x, y)
        key = jr.key(seed)
        job = Job(algorithm, problem, data, x, y, metrics, key, count, batch, batch)
        job.check_curvature(algorithm)
        job._check_metrics()
        return job

    def oracle(self, client: Array | int) -> Oracle:
        """Return the oracle of one client."""
        return Oracle(
            self.problem, self.data, client, self.upper_batch, self.lower_batch
        )

    def check_curvature(self, *algorithms: AbstractAlgorithm) -> None:
        """Raise if the lower level curves too much at the start for one of them."""
        probe = jr.fold_in(self.key, 2)
        values = np.asarray(
            largest_curvature(
                self.oracle(jnp.asarray(0)), self.data.clients, self.x, self.y, probe
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


class State(eqx.Module):
    """What the server carries and what every client keeps, stacked over clients."""

    server: PyTree
    clients: PyTree


def start_state(job: Job) -> State:
    """Return the states before the first exchange."""
    server = job.algorithm.init_server(job.x, job.y)
    client = job.algorithm.init_client(job.x, job.y)
    server, client = jax.tree.map(strongly_typed, (server, client))
    count = job.data.clients
    stacked = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), client)
    return State(server, stacked)


def strongly_typed(leaf: Any) -> Array:
    """Strip the weak type of `jnp.asarray(0.5)`: it would make two programs of one."""
    value = jnp.asarray(leaf)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return jnp.asarray(value, dtype=value.dtype)
