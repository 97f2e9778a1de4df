"""Every degenerate case of the methods of one machine, over random numbers.

Shapes stay fixed within a test, so that hypothesis varies inputs of one program.
"""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import tasks
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.ma_soba import MASOBA
from fedbilevel.algorithms.saba import SABA
from fedbilevel.algorithms.soba import SOBA
from fedbilevel.algorithms.spaba import SPABA
from fedbilevel.algorithms.srba import SRBA
from fedbilevel.algorithms.srmba import SRMBA
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from tests.cases import quadratic_data
from tests.reference.bent_job import bent_job

few = settings(max_examples=5, deadline=None, derandomize=True)
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


@few
@given(seed=seeds, lr=small)
def test_an_average_that_forgets_all_is_soba(seed, lr):
    data, steps = quadratic_data(CLIENTS), (lr, 2 * lr, lr)
    assert_same(
        point_of(MASOBA(*steps, 1.0), data, seed), point_of(SOBA(*steps), data, seed)
    )


@few
@given(seed=seeds, lr=small)
def test_recursions_with_nothing_but_single_batches_are_soba(seed, lr):
    """The period 1, and the probability 1; both draw by the keys of the phase 0."""
    data, steps = quadratic_data(CLIENTS), (lr, 2 * lr, lr)
    plain = point_of(SOBA(*steps), data, seed)
    period = SRBA(*steps, period=1, large_batch=1)
    coin = SPABA(*steps, 1.0, large_batch=1, longest=4)
    assert_same(point_of(period, data, seed), plain)
    assert_same(point_of(coin, data, seed), plain)


@few
@given(lr=small)
def test_without_noise_all_of_the_family_are_soba(lr):
    data, steps = quadratic_data(CLIENTS, noise=0.0), (lr, 2 * lr, lr)
    plain = point_of(SOBA(*steps, local_steps=4), data, rounds=3)
    for other in (
        SRBA(*steps, period=4, large_batch=1),
        SABA(*steps, parts=1, local_steps=4),
    ):
        assert_same(point_of(other, data, rounds=3), plain)


@few
@given(seed=seeds, eta=small, weight=st.floats(0.5, 4.0))
def test_srmba_on_clients_is_fedbioacc(seed, eta, weight):
    data = quadratic_data(CLIENTS)
    letters: dict[str, Any] = {"a": 0.4, "eta": eta, "gamma": 0.3, "tau": 0.2}
    letters |= {"c_nu": weight, "c_omega": weight, "c_q": weight, "local_steps": 2}
    one, other = SRMBA(**letters), FedBiOAcc(**letters)
    assert_same(point_of(one, data, seed), point_of(other, data, seed))


def two_client_end(algorithm, rounds):
    """Return x after a run on the two clients of T2, whose rows stay apart."""
    task = tasks.find("two-client")()
    job = Job.of(
        algorithm, task.problem, task.data, task.x, task.y, sampling=Sampling(None)
    )
    state = execute(SimulatorRuntime(job), rounds, measure_every=rounds).state
    return float(algorithm.point(state.server).x[0])


T2 = (0.5, 0.3, 0.3)
SAFE = {
    "soba": (SOBA(*T2, local_steps=10), 30),
    "ma-soba": (MASOBA(*T2, 0.9, local_steps=10), 30),
    "saba": (SABA(*T2, parts=1, local_steps=10), 30),
    "srba": (SRBA(*T2, period=10, large_batch=1), 30),
    "spaba": (SPABA(*T2, 0.2, large_batch=1, longest=10), 90),
}


@pytest.mark.parametrize("name", SAFE)
def test_two_clients_that_differ_end_where_one_machine_would(name):
    """T2 without noise, every step averaged: x = 1 for all that keep a z."""
    algorithm, rounds = SAFE[name]
    assert abs(two_client_end(algorithm, rounds) - 1) < 1e-6
