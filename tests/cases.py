"""One row per algorithm. Every test that runs over this table runs for a new row too.

The algorithms are small enough for the slow runtime and fit the problems below.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.algorithms.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData
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


def quadratic_data(
    clients: int, *, noise: float = 0.3, alike: bool = False, seed: int = 0
) -> ClientData:
    """Return clients with quadratics of curvature 0.5 to 2, equal or different."""
    rows = []
    for client in range(clients):
        draw = np.random.default_rng((seed, 0 if alike else client))
        basis, _ = np.linalg.qr(draw.standard_normal((DY, DY)))
        A = basis @ np.diag(np.linspace(0.5, 2, DY)) @ basis.T
        C = 0.5 * draw.standard_normal((DX, DY))
        a, b = draw.standard_normal(DY), draw.standard_normal(DY)
        rows.append(client_rows(A, C, a, b, 0.5, noise))
    return ClientData.from_clients([up for up, _ in rows], [low for _, low in rows])


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
        PROBLEM,
        data,
        jnp.arange(1.0, DX + 1),
        -jnp.arange(1.0, DY + 1),
        metrics=ClosedForm.of(data),
        seed=seed,
        participants=participants,
    )
    kind = jnp.dtype(precision)
    floating = jnp.floating

    def cast(leaf):
        is_float = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, floating)
        return leaf.astype(kind) if is_float else leaf

    return jax.tree.map(cast, job)
