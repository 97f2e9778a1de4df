"""Methods of one level repeat their listings, sample by sample."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.algorithms.presets import (
    CompressedLocalSGD,
    FedAdam,
    FedAvgM,
    FedCOM,
    FedPAQ,
    FedProx,
)
from fedbilevel.algorithms.single_level.bvr_l_sgd import BVRLSGD
from fedbilevel.algorithms.single_level.fedcomgate import FedCOMGATE
from fedbilevel.algorithms.single_level.stem import STEM
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData
from fedbilevel.runtime import Job, SimulatorRuntime, execute, keys
from fedbilevel.schedules import CubeRootDecay
from fedbilevel.tasks.quadratic import PROBLEM, client_rows
from tests.cases import quadratic_data
from tests.reference import level_listings
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.replay_phases import draw_phase, phase_number, zeta

ROUNDS, P, CLIENTS = 8, 3, 3
SLOW = pytest.mark.slow


def job_of(algorithm: AbstractAlgorithm) -> Job:
    return bent_job(algorithm, quadratic_data(CLIENTS), seed=3)


def end_of(job: Job, rounds: int = ROUNDS) -> Any:
    return execute(SimulatorRuntime(job), rounds, measure_every=rounds).state


def reported(job: Job, rounds: int = ROUNDS) -> Any:
    return job.algorithm.point(end_of(job, rounds).server)


def assert_close(left, right, tolerance=1e-10):
    np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)


def drawn(job: Job) -> list[list[Any]]:
    return draw_phase(job, "local", ROUNDS * P, zeta)


def test_fedprox_is_its_listing():
    job = job_of(FedProx(0.1, 0.7, local_steps=P))
    y = level_listings.fedprox(X0, Y0, drawn(job), p=P, lr=0.1, mu=0.7)
    assert_close(reported(job).y, y)


def test_fedavgm_is_its_listing():
    letters = {"lr": 0.1, "beta": 0.6, "lr_server": 0.7}
    job = job_of(FedAvgM(**letters, local_steps=P))
    y, v = level_listings.fedavgm(X0, Y0, drawn(job), p=P, **letters)
    server = end_of(job).server
    assert_close(server.server.point.y, y)
    assert_close(server.optimizer["local"].y, v)


def test_fedadam_is_its_listing():
    letters = {"lr": 0.1, "lr_server": 0.2, "beta1": 0.8, "beta2": 0.9, "tau": 0.05}
    job = job_of(FedAdam(**letters, local_steps=P))
    y, m, v = level_listings.fedadam(X0, Y0, drawn(job), p=P, **letters)
    server = end_of(job).server
    assert_close(server.server.point.y, y)
    # The transformation takes changes for negative gradients.
    assert_close(server.optimizer["local"].m.y, -m)
    assert_close(server.optimizer["local"].v.y, v)


def first_samples(job: Job, count: int) -> list[list[Any]]:
    """Return what every client draws beside its first sample."""
    found = []
    for client in range(CLIENTS):
        turn = keys.client_turn(job.key, (keys.ROUNDS, 0), jnp.asarray(client), 0)
        oracle = job.oracle(jnp.asarray(client))
        batches = [oracle.draw_lower(key) for key in turn.spare_keys(count)]
        found.append([jax.tree.map(np.asarray, one.rows) for one in batches])
    return found


def test_stem_is_its_listing():
    algorithm = STEM(0.2, 3.0, CubeRootDecay(0.8, 8.0), first_batch=3, local_steps=P)
    job = job_of(algorithm)
    y, d = level_listings.stem(
        X0,
        Y0,
        drawn(job),
        first_samples(job, 2),
        p=P,
        lr=0.2,
        c=3.0,
        eta=lambda t: 0.8 / np.cbrt(8 + t),
    )
    server = end_of(job).server
    assert_close(server.point.y, y)
    assert_close(server.direction.y, d)


def test_bvr_l_sgd_is_its_listing():
    B = 2
    job = job_of(BVRLSGD(0.1, large_batch=B, local_steps=P))
    slopes = draw_phase(job, "anchor", ROUNDS * B, zeta)
    anchors = [[own[r * B : (r + 1) * B] for own in slopes] for r in range(ROUNDS)]
    where = (keys.ROUNDS, phase_number(job, "local"))
    every = [keys.shared_key(job.key, *where, r) for r in range(ROUNDS)]
    equal = jnp.log(jnp.ones(CLIENTS))
    picks = [int(jr.categorical(key, equal)) for key in every]
    assert len(set(picks)) == CLIENTS  # each of them once, or nothing is shown
    y, v = level_listings.bvr_l_sgd(X0, Y0, anchors, drawn(job), picks, p=P, lr=0.1)
    server = end_of(job).server
    assert_close(server.point.y, y)
    assert_close(server.direction.y, v)


def rounding(job: Job) -> list[list[np.ndarray]]:
    """Return the uniform numbers that every client rounds its reply by, by round."""

    def one(client: int, r: int) -> np.ndarray:
        turn = keys.client_turn(job.key, (keys.ROUNDS, 0), jnp.asarray(client), r)
        block = jr.fold_in(turn.channel_key(), 0)
        return np.asarray(jr.uniform(jr.fold_in(block, 0), Y0.shape))

    return [[one(k, r) for k in range(CLIENTS)] for r in range(ROUNDS)]


def assert_is_fedcom(algorithm: AbstractAlgorithm, lr_server: float) -> None:
    job = job_of(algorithm)
    letters = {"lr": 0.1, "lr_server": lr_server, "bits": 4}
    y = level_listings.fedcom(X0, Y0, drawn(job), rounding(job), p=P, **letters)
    assert_close(reported(job).y, y)


def test_fedcom_is_its_listing():
    assert_is_fedcom(FedCOM(0.1, 0.7, 4, local_steps=P), 0.7)


def test_fedpaq_is_its_listing():
    assert_is_fedcom(FedPAQ(lr=0.1, bits=4, local_steps=P), 1.0)


def test_fedcomgate_is_its_listing():
    letters = {"lr": 0.1, "lr_server": 0.7, "bits": 4}
    job = job_of(FedCOMGATE(**letters, local_steps=P))
    y, deltas = level_listings.fedcomgate(
        X0, Y0, drawn(job), rounding(job), p=P, **letters
    )
    state = end_of(job)
    assert_close(state.server.point.y, y)
    # A client renews its delta_k when it is told the new y.
    own = state.clients.memory
    mean = (own.start - y) / 0.7
    assert_close(own.delta + (own.change - mean) / (P * 0.1), np.stack(deltas))


def test_compressed_local_sgd_is_its_listing():
    job = job_of(CompressedLocalSGD(0.1, 0.5, local_steps=P))
    y, errors = level_listings.compressed_local_sgd(
        X0, Y0, drawn(job), p=P, lr=0.1, kept=2
    )
    state = end_of(job)
    assert_close(state.server.point.y, y)
    (((kept,),),) = state.clients.channel.values()
    assert_close(kept, np.stack(errors))
    assert np.abs(errors).max() > 1e-3  # something was left to be sent


H, M = np.asarray([1.0, 4.0, 10.0]), np.asarray([3.0, -1.0, 0.5])


def scalar_clients() -> ClientData:
    """Return three clients with g_k = (h_k/2)(y - m_k)^2."""
    rows = [
        client_rows(
            np.full((1, 1), h), np.zeros((1, 1)), np.full(1, -h * m), M[:1], 0.5, 0.0
        )
        for h, m in zip(H, M, strict=True)
    ]
    return ClientData.from_clients([up for up, _ in rows], [low for _, low in rows])


def drift_formula(lr: float, p: int, mu: float = 0.0) -> float:
    a = H / (H + mu) * (1 - (1 - lr * (H + mu)) ** p)
    return float(np.sum(a * M) / np.sum(a))


MINIMIZER = float(np.sum(H * M) / np.sum(H))
LIMITS = {
    "fedprox": (FedProx(0.05, 2.0, local_steps=10), drift_formula(0.05, 10, 2.0), 1e-9),
    "fedavgm": (FedAvgM(0.05, 0.5, local_steps=10), drift_formula(0.05, 10), 1e-9),
    "fedadam": (
        FedAdam(0.05, 0.02, tau=0.1, local_steps=10),
        drift_formula(0.05, 10),
        1e-4,
    ),
    "bvr-l-sgd": (BVRLSGD(0.02, large_batch=1, local_steps=10), MINIMIZER, 1e-9),
    "fedcomgate": (FedCOMGATE(0.05, bits=0, local_steps=10), MINIMIZER, 1e-9),
    "stem": (STEM(0.01, 0.1, local_steps=10), 0.2537, 5e-5),
}


FAST = ("fedprox", "bvr-l-sgd")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [one if one in FAST else pytest.param(one, marks=SLOW) for one in LIMITS],
)
def test_a_method_of_one_level_stops_where_it_is_known_to(name):
    """T3: where clients differ, local steps drift, but for those of an anchor."""
    algorithm, expected, tolerance = LIMITS[name]
    start = (jnp.zeros(1), jnp.zeros(1))
    job = Job.of(algorithm, PROBLEM, scalar_clients(), *start)
    assert_close(reported(job, 400).y, expected, tolerance)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedProx(0.1, -1.0, local_steps=1), "mu=...\\)` must be at least 0"),
        (
            lambda: FedAvgM(0.1, 1.0, local_steps=1),
            "beta=...\\)` must be at least 0 and",
        ),
        (
            lambda: FedAdam(0.1, beta2=1.5, local_steps=1),
            "beta2=...\\)` must be at least",
        ),
        (lambda: FedAdam(0.1, tau=0.0, local_steps=1), "tau=...\\)` must be above 0"),
        (lambda: FedCOM(0.1, bits=17, local_steps=1), "between 2 and 16 bits"),
        (
            lambda: FedCOMGATE(0.1, 0.0, local_steps=1),
            "lr_server=...\\)` must be above",
        ),
        (lambda: CompressedLocalSGD(0.1, 1.5, local_steps=1), "a share above 0"),
        (lambda: BVRLSGD(0.1, large_batch=0, local_steps=1), "must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()
