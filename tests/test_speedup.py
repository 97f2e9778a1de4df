"""The paper's claim in small: the error falls like 1/K (T1, linear speed-up)."""

import numpy as np
import pytest

from fedbilevel import tasks
from fedbilevel.algorithms.local_bsgm import LocalBSGM
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import Job, sweep
from tests.cases import with_precision

ROUNDS, P, SEEDS = 200, 10, range(16)  # T = 2000 local iterations


@pytest.mark.parametrize("clients", [1, 8])
def test_error_times_clients_is_flat(clients):
    task = tasks.find("quadratic")(clients)
    algorithm = LocalBSGM(Neumann(20, 0.4), 0.1, 1.0, 1.0, 0.5, 0.5, local_steps=P)
    job = Job.of(
        algorithm, task.problem, task.data, task.x, task.y, metrics=task.metrics
    )
    outcomes = sweep(with_precision(job, "float32"), ROUNDS, seeds=SEEDS)
    tails = [one.columns["grad_norm_sq"][ROUNDS // 2 :].mean() for one in outcomes]
    assert 1.0 < clients * np.mean(tails) < 2.4
