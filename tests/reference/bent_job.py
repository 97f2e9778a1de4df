"""The problem of `bent_oracles` as the package takes it, on the rows of quadratics."""

import jax.numpy as jnp
import numpy as np

from fedbilevel._blocks import NOTHING
from fedbilevel._types import Pair
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.problem import ClientData, Data, Problem
from fedbilevel.runtime import Job, Sampling
from tests.cases import DX, DY, ROWWISE
from tests.reference.bent_oracles import BEND


def _upper(x, y, rows):
    return ROWWISE.upper(x, y, rows) + BEND * jnp.sum(x) * jnp.sum(y)


def _lower(x, y, rows):
    squares = jnp.sum(x**2) * jnp.sum(y**2)
    return ROWWISE.lower(x, y, rows) + BEND * (jnp.sum(y**4) / 12 + squares / 4)


X0, Y0 = np.arange(1.0, DX + 1), -np.arange(1.0, DY + 1)


def bent_job(
    algorithm: AbstractAlgorithm,
    data: Data,
    *,
    seed: int = 0,
    private: Pair = NOTHING,
    batch: int | None = 1,
    participants: int | None = None,
) -> Job:
    """Return a job on bent quadratics, started at (X0, Y0)."""
    start = (jnp.asarray(X0), jnp.asarray(Y0))
    problem = Problem(_upper, _lower, private=private)
    sampling = Sampling(batch, participants)
    return Job.of(algorithm, problem, data, *start, seed=seed, sampling=sampling)


def only_rows(data: ClientData):
    """Return each client's one upper and one lower row, where there is no noise."""
    assert data.upper_sizes.max() == data.lower_sizes.max() == 1
    return [
        tuple(
            {name: np.asarray(leaf[k]) for name, leaf in level.items()}
            for level in (data.upper, data.lower)
        )
        for k in range(data.clients)
    ]
