"""Degenerate cases of the later federated methods, over random numbers.

Shapes stay fixed within a test, so that hypothesis varies inputs of one program.
"""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.algorithms.local.br_fedbim import BRFedBiM
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbio_momentum import FedBiOMomentum
from fedbilevel.algorithms.local.fedmsa import FedMSA
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.algorithms.nested.e_aipod import EAiPOD
from fedbilevel.algorithms.one_machine.ma_soba import MASOBA
from fedbilevel.algorithms.presets import (
    EFSOBA,
    FedBiODifferences,
    FedNestSGD,
    MemFBO,
    ShroFBO,
)
from fedbilevel.runtime import SimulatorRuntime, execute
from tests.cases import quadratic_data, quadratic_job
from tests.reference.bent_job import bent_job

few = settings(max_examples=3)
seeds = st.integers(0, 2**31 - 1)
small = st.floats(0.01, 0.2)
CLIENTS, ROUNDS = 3, 6


def point_of(algorithm, data, seed=0, rounds=ROUNDS, batch: int | None = 1):
    job = bent_job(algorithm, data, seed=seed, batch=batch)
    state = execute(SimulatorRuntime(job), rounds, measure_every=rounds).state
    return algorithm.point(state.server)


def assert_same(left, right, tolerance=1e-12):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_an_average_that_forgets_all_is_fedbio(seed, lr):
    data, steps = quadratic_data(CLIENTS), (lr, 2 * lr, lr)
    one = FedBiOMomentum(*steps, 1.0, local_steps=2)
    other = FedBiO(*steps, local_steps=2)
    assert_same(point_of(one, data, seed), point_of(other, data, seed))


@pytest.mark.slow
@few
@given(lr=small, weight=st.floats(0.1, 0.9))
def test_momentum_at_every_average_is_that_of_ma_soba(lr, weight):
    """Without noise it does not matter which samples the lines share."""
    data, steps = quadratic_data(CLIENTS, noise=0.0), (lr, 2 * lr, lr)
    one = FedBiOMomentum(*steps, weight, local_steps=1)
    assert_same(point_of(one, data), point_of(MASOBA(*steps, weight), data))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_an_exchange_after_every_lower_step_is_fednest_without_anchors(seed, lr):
    """With the chance 1 controls cancel in the mean of the clients."""
    data = quadratic_data(CLIENTS)
    shared: dict[str, Any] = {"alpha": lr, "inner_rounds": 2, "local_steps": 1}
    shared |= {"ell": 4.0, "terms": 2}
    one = EAiPOD(**shared, lr_y=2 * lr, probability=1.0, longest=1)
    other = FedNestSGD(**shared, beta=2 * lr)
    assert_same(point_of(one, data, seed), point_of(other, data, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_a_recursion_of_one_step_that_forgets_all_is_fedbio(seed, lr):
    data = quadratic_data(CLIENTS)
    one = FedMSA(lr, 2 * lr, 1.0, terms=0, local_steps=1)
    other = FedBiO(lr, 2 * lr, 2 * lr, local_steps=1)
    assert_same(point_of(one, data, seed), point_of(other, data, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_with_equal_numbers_of_steps_shrofbo_is_simfbo(seed, lr):
    data, steps = quadratic_data(CLIENTS), (lr, 2 * lr, lr, 0.1, 0.2, 0.1)
    one = ShroFBO(*steps, fewest_steps=2, local_steps=2)
    other = SimFBO(*steps, local_steps=2)
    assert_same(point_of(one, data, seed), point_of(other, data, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_memfbo_whose_server_steps_like_its_clients_is_fedbio_with_differences(
    seed, lr
):
    data, steps = quadratic_data(CLIENTS), (lr, 2 * lr, lr)
    one = MemFBO(*steps, *steps, 0.3, local_steps=2)
    other = FedBiODifferences(*steps, 0.3, local_steps=2)
    assert_same(point_of(one, data, seed), point_of(other, data, seed), 1e-11)


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_the_mean_of_momentum_that_forgets_all_is_fedbio(seed, lr):
    data, steps = quadratic_data(CLIENTS), (lr, 2 * lr, lr)
    one, other = BRFedBiM(*steps, 1.0, robust="mean"), FedBiO(*steps, local_steps=1)
    assert_same(point_of(one, data, seed), point_of(other, data, seed))


@pytest.mark.slow
@few
@given(lr=small)
def test_without_compression_ef_soba_is_fedbio(lr):
    """At every average, without noise: its lines share their samples."""
    data, steps = quadratic_data(CLIENTS, noise=0.0), (lr, 2 * lr, lr)
    one, other = EFSOBA(*steps, fraction=0), FedBiO(*steps, local_steps=1)
    assert_same(point_of(one, data), point_of(other, data))


@pytest.mark.slow
def test_what_ef_soba_holds_back_leaves_a_floor_of_the_order_of_the_step():
    data = quadratic_data(CLIENTS, noise=0.0)

    def wanders(lr, fraction):
        job = quadratic_job(EFSOBA(lr, lr, lr, fraction=fraction), data)
        columns = execute(SimulatorRuntime(job), int(400 / lr)).columns
        return float(np.max(np.sqrt(columns["grad_norm_sq"][-50:])))

    long, short = (wanders(lr, 0.3) for lr in (0.2, 0.025))
    assert wanders(0.2, 0) < 1e-12
    assert long > 1e-2 and short < long / 4
