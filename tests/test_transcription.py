"""Both runtimes repeat the paper's listings, sample by sample."""

from typing import Any

import numpy as np
import pytest

from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import ReferenceRuntime, SimulatorRuntime, execute
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data, quadratic_job
from tests.reference import listings
from tests.reference.replay import draw_samples

P, THETA = 2, 0.3
# Uncompiled, every operation of a round costs: there fewer rounds must do.
BOTH = pytest.mark.parametrize(
    ("runtime", "rounds"),
    [(SimulatorRuntime, 50), pytest.param(ReferenceRuntime, 8, marks=pytest.mark.slow)],
)
LETTERS: dict[str, Any] = {"alpha": 3.0, "beta": 4.0, "rho1": 0.5, "rho2": 0.8}


def assert_same(state, expected):
    x, y, u, v = (np.mean(part, axis=0) for part in expected)
    server = state.server
    np.testing.assert_allclose(server.point.x, x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(server.point.y, y, rtol=0, atol=1e-10)
    np.testing.assert_allclose(server.direction.x, u, rtol=0, atol=1e-10)
    np.testing.assert_allclose(server.direction.y, v, rtol=0, atol=1e-10)


@BOTH
def test_local_bsgm_is_algorithm_1(runtime, rounds):
    algorithm = LocalBSGM(Neumann(1, THETA), 0.1, local_steps=P, **LETTERS)
    job = quadratic_job(algorithm, quadratic_data(2), seed=3)
    samples, _ = draw_samples(job, rounds * P)
    expected = listings.local_bsgm(
        np.asarray(job.x),
        np.asarray(job.y),
        samples,
        p=P,
        eta=0.1,
        theta=THETA,
        **LETTERS,
    )
    outcome = execute(runtime(job), rounds, measure_every=rounds)
    assert_same(outcome.state, expected)


@BOTH
def test_local_bsgvrm_is_algorithm_2(runtime, rounds):
    algorithm = LocalBSGVRM(
        Neumann(1, THETA),
        CubeRootDecay(0.3, 8),
        local_steps=P,
        first_batch=4,
        **LETTERS,
    )
    job = quadratic_job(algorithm, quadratic_data(2), seed=4)
    samples, firsts = draw_samples(job, rounds * P, first_batch=4)
    expected = listings.local_bsgvrm(
        np.asarray(job.x),
        np.asarray(job.y),
        samples,
        firsts,
        p=P,
        eta=lambda t: 0.3 / np.cbrt(8 + t),
        theta=THETA,
        **LETTERS,
    )
    outcome = execute(runtime(job), rounds, measure_every=rounds)
    assert_same(outcome.state, expected)


@pytest.mark.slow
def test_one_client_is_mrbo():
    algorithm = LocalBSGVRM(
        Neumann(1, THETA), CubeRootDecay(0.3, 8), local_steps=5, **LETTERS
    )
    job = quadratic_job(algorithm, quadratic_data(1), seed=5)
    samples, _ = draw_samples(job, 40)
    x, y = listings.mrbo(
        np.asarray(job.x),
        np.asarray(job.y),
        samples[0],
        gamma=LETTERS["rho1"],
        lam=LETTERS["rho2"],
        c1=LETTERS["alpha"],
        c2=LETTERS["beta"],
        eta=lambda t: 0.3 / np.cbrt(8 + t),
        theta=THETA,
    )
    server = execute(SimulatorRuntime(job), 8, measure_every=8).state.server
    np.testing.assert_allclose(server.point.x, x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(server.point.y, y, rtol=0, atol=1e-12)
