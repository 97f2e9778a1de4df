"""Where methods of one level become one another, over random numbers."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.algorithms import AbstractAlgorithm, quantile_clipped
from fedbilevel.algorithms.presets import (
    CompressedLocalSGD,
    FedAvgM,
    FedCOM,
    FedProx,
    Scaffold,
)
from fedbilevel.algorithms.single_level.bvr_l_sgd import BVRLSGD
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.algorithms.single_level.fedcomgate import FedCOMGATE
from fedbilevel.algorithms.single_level.stem import STEM
from fedbilevel.algorithms.wrappers.optimizer import ServerOptimizer
from fedbilevel.runtime import Job, SimulatorRuntime, execute
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.level_listings import storm
from tests.reference.replay_phases import draw_phase, zeta

few = settings(max_examples=5)
seeds = st.integers(0, 2**31 - 1)
small = st.floats(0.01, 0.2)
weights = st.floats(0.05, 0.9)
ROUNDS, P = 4, 3


def end_of(job: Job, rounds: int = ROUNDS) -> Any:
    state = execute(SimulatorRuntime(job), rounds, measure_every=rounds).state
    return job.algorithm.point(state.server).y


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def both(left: AbstractAlgorithm, right: AbstractAlgorithm, seed: int, **data: Any):
    """Return where two methods end on the same samples."""
    clients = quadratic_data(3, **data)
    return (end_of(bent_job(one, clients, seed=seed)) for one in (left, right))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_fedprox_that_is_not_held_back_is_fedavg(seed, lr):
    held, free = FedProx(lr, 0.0, local_steps=P), FedAvg(lr, local_steps=P)
    assert_close(*both(held, free, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_fedavgm_without_momentum_is_fedavg(seed, lr):
    still, plain = FedAvgM(lr, 0.0, local_steps=P), FedAvg(lr, local_steps=P)
    assert_close(*both(still, plain, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small, beta=weights)
def test_fedavgm_is_fedavg_with_a_server_of_optax(seed, lr, beta):
    own = FedAvgM(lr, beta, 0.7, local_steps=P)
    made = ServerOptimizer(FedAvg(lr, local_steps=P), optax.sgd(0.7, beta))
    assert_close(*both(own, made, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_scaffold_of_clients_that_are_alike_is_fedavg(seed, lr):
    controlled, plain = Scaffold(lr, local_steps=P), FedAvg(lr, local_steps=P)
    assert_close(*both(controlled, plain, seed, noise=0.0, alike=True))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_stem_without_memory_is_fedavg(seed, lr):
    assert_close(*both(STEM(lr, 1.0, local_steps=P), FedAvg(lr, local_steps=P), seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small, c=weights)
def test_stem_of_one_client_is_storm_whatever_the_period(seed, lr, c):
    ends, samples = [], []
    for p in (1, P):
        algorithm = STEM(lr, c, CubeRootDecay(2.0, 8.0), local_steps=p)
        job = bent_job(algorithm, quadratic_data(1), seed=seed)
        ends.append(end_of(job, 12 // p))
        samples.append(draw_phase(job, "local", 12, zeta)[0])
    expected, _ = storm(
        X0, Y0, samples[0], lr=lr, c=c, eta=lambda t: 2.0 / np.cbrt(8 + t)
    )
    for end in ends:
        assert_close(end, expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, *samples))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_bvr_l_sgd_of_clients_that_are_alike_is_fedavg(seed, lr):
    # Without noise SARAH's direction is the slope itself, and all iterates are one.
    recursive = BVRLSGD(lr, large_batch=2, local_steps=P)
    plain = FedAvg(lr, local_steps=P)
    assert_close(*both(recursive, plain, seed, noise=0.0, alike=True))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_fedcom_without_compression_is_fedavg(seed, lr):
    whole, plain = FedCOM(lr, bits=0, local_steps=P), FedAvg(lr, local_steps=P)
    assert_close(*both(whole, plain, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_compressed_local_sgd_that_sends_all_is_fedavg(seed, lr):
    whole = CompressedLocalSGD(lr, 1.0, local_steps=P)
    assert_close(*both(whole, FedAvg(lr, local_steps=P), seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small, lr_server=weights)
def test_fedcomgate_without_compression_is_scaffold_of_all(seed, lr, lr_server):
    tracked = FedCOMGATE(lr, lr_server, bits=0, local_steps=P)
    assert_close(*both(tracked, Scaffold(lr, lr_server, local_steps=P), seed))


def test_a_local_step_of_fedprox_does_not_begin_a_round():
    """Cut step by step, too, all steps are drawn back to where the round began."""
    data = quadratic_data(3)
    held, free = FedProx(0.1, 0.3, local_steps=P), FedAvg(0.1, local_steps=P)
    # A first round measures, and cuts nothing.
    ends = [
        end_of(bent_job(method, data), 1)
        for method in (held, quantile_clipped(held, 0.5), free)
    ]
    assert_close(ends[0], ends[1])
    assert np.abs(ends[0] - ends[2]).max() > 1e-6
