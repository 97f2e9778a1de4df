"""Metrics of a run before its first round."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel.problem.every_client import mean_of_clients, weight_of_client
from fedbilevel.problem.running_once import runs_once
from fedbilevel.problem.stored_rows import fetched
from fedbilevel.runtime.exchange import (
    client_measurement,
    combine_measurements,
    start_state,
)
from fedbilevel.runtime.job import Job


def measured_at_start(job: Job) -> dict[str, float]:
    """Return the columns of a run before its first exchange: the same for all seeds."""
    return {name: float(value) for name, value in _columns(job).items()}


@runs_once
def _columns(job: Job) -> dict[str, Array]:
    state, everybody = start_state(job), jnp.arange(job.clients, dtype=jnp.int32)

    def of_client(client: Array):
        own = jax.tree.map(lambda leaf: leaf[client], state.clients.own)
        return client_measurement(job, client, state.server, fetched(own))

    shares = job.data.weights / jnp.sum(job.data.weights)
    weight = weight_of_client(job.problem, job.data, job.x, job.y)
    mean = mean_of_clients(of_client, everybody, shares, weight)
    return combine_measurements(job, state.server, mean)
