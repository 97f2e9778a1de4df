"""One row per algorithm. Every test that runs over this table runs for a new row too.

The algorithms are small enough for the slow runtime and fit the problems below.
"""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.algorithms.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import Job
from fedbilevel.schedules import CubeRootDecay
from fedbilevel.tasks._quadratics import PROBLEM, ClosedForm, client_rows

DX, DY = 2, 3
THETA = 0.3


@dataclass(frozen=True)
class Case:
    """An algorithm, its module, and the floats it sends each way in a round."""

    name: str
    algorithm: AbstractAlgorithm
    floats: Callable[[int, int], int]


CASES = [
    Case(
        "local-bsgm",
        LocalBSGM(Neumann(1, THETA), 0.1, 3.0, 4.0, 0.5, 0.8, local_steps=2),
        floats=lambda dx, dy: 2 * (dx + dy),
    ),
    Case(
        "local-bsgvrm",
        LocalBSGVRM(
            Neumann(1, THETA),
            CubeRootDecay(0.3, 8.0),
            5.0,
            6.0,
            0.5,
            0.8,
            local_steps=2,
            warm_start=1,
            first_batch=2,
        ),
        floats=lambda dx, dy: 2 * (dx + dy),
    ),
]
NAMES = [case.name for case in CASES]


# Without the noise functions: here a sample is a row, drawn from a client's few.
ROWWISE = Problem(PROBLEM.upper, PROBLEM.lower)


def quadratic_data(
    clients: int, *, noise: float = 0.3, alike: bool = False, seed: int = 0
) -> ClientData:
    """Return clients with quadratics of curvature near 0.5 to 2, equal or different.

    With noise client k holds 3 + k rows that scatter around its quadratic, without it
    one row.
    """
    every = [_client(0 if alike else k, noise, seed, 3 + k) for k in range(clients)]
    return ClientData.from_clients([up for up, _ in every], [low for _, low in every])


def _client(client: int, noise: float, seed: int, count: int):
    draw = np.random.default_rng((seed, client))
    basis, _ = np.linalg.qr(draw.standard_normal((DY, DY)))
    A = basis @ np.diag(np.linspace(0.5, 2, DY)) @ basis.T
    C = 0.5 * draw.standard_normal((DX, DY))
    a, b = draw.standard_normal(DY), draw.standard_normal(DY)
    rows = []
    for _ in range(count if noise else 1):
        half = 0.1 * noise * draw.standard_normal((DY, DY))
        near = (A + half + half.T, C + 0.1 * noise * draw.standard_normal((DX, DY)))
        ends = (
            a + noise * draw.standard_normal(DY),
            b + noise * draw.standard_normal(DY),
        )
        rows.append(client_rows(*near, *ends, 0.5, noise=0.0))
    uppers, lowers = zip(*rows, strict=True)
    return tuple(
        {name: np.concatenate([row[name] for row in level]) for name in level[0]}
        for level in (uppers, lowers)
    )


def quadratic_job(
    algorithm: AbstractAlgorithm,
    data: ClientData,
    *,
    seed: int = 0,
    participants: int | None = None,
    precision: str = "float64",
) -> Job:
    """Return a job on quadratics, started away from zero."""
    job = Job.of(
        algorithm,
        ROWWISE,
        data,
        jnp.arange(1.0, DX + 1),
        -jnp.arange(1.0, DY + 1),
        metrics=ClosedForm.of(data),
        seed=seed,
        participants=participants,
    )
    return with_precision(job, precision)


def with_precision(job: Job, precision: str) -> Job:
    """Return a job with all its floating numbers in another precision."""
    kind = jnp.dtype(precision)

    def cast(leaf):
        floating = eqx.is_inexact_array(leaf)
        return leaf.astype(kind) if floating else leaf

    return jax.tree.map(cast, job)
