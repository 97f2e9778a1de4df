"""What holds for every row of the table, read from one run of it in each runtime.

The runs are shared (`tests.watching`): a test here adds a comparison, and a program of
its own only where it says so.
"""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbilevel.algorithms import AbstractAlgorithm, Iterate, every_phase
from fedbilevel.algorithms.wrappers.optimizer import LocalOptimizer, ServerOptimizer
from fedbilevel.runtime import Checkpoints, SimulatorRuntime, execute, keys
from tests.cases import (
    DEMANDING,
    Case,
    asks_everyone,
    cohort_of,
    has_several_phases,
    keeps_something,
    of_structures,
    structures_first,
)
from tests.watching import ROUNDS, cohort_job, observed, simulated

pytestmark = pytest.mark.two_devices

NOTHING_NEW = optax.sgd(1.0)


def assert_close(a, b, tolerance):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def end_of(case: Case, algorithm: AbstractAlgorithm):
    """Return where the row's run ends with another algorithm: one program more."""
    job = dataclasses.replace(cohort_job(case), algorithm=algorithm)
    state = execute(SimulatorRuntime(job), ROUNDS).state
    return algorithm.point(state.joined())


def own_end(case: Case):
    """Return where the row's own run ends."""
    return case.algorithm.point(simulated(case.name).state.joined())


@structures_first()
def test_simulator_is_reference_for_cohorts(case):
    fast, slow = simulated(case.name), observed(case.name).outcome
    assert_close(fast.state, slow.state, 1e-12)
    assert list(fast.columns) == list(slow.columns)
    assert_close(fast.columns, slow.columns, 1e-12)
    assert case.algorithm.point(fast.state.server).x.dtype == "float64"


@pytest.mark.slow
@structures_first()
def test_counts_are_the_calls_of_a_real_run(case):
    one = observed(case.name)
    for done, calls in enumerate(one.calls, 1):
        found = one.counted(done)
        assert Counter({**found["calls"], **found["samples"]}) == calls
    assert len(one.calls) == ROUNDS


@structures_first()
def test_every_exchange_draws_a_cohort_of_its_own(case):
    one = observed(case.name)
    assert len(set(one.cohorts)) == len(one.cohorts)
    # Where everybody takes part there is nobody to draw.
    drawn = one.job.participants < one.job.clients
    exchanges = one.counted(ROUNDS)["exchanges"] - ROUNDS * asks_everyone(case)
    assert len(one.cohorts) == (exchanges if drawn else 0)


@structures_first(lambda case: not case.pools)
def test_no_two_draws_of_a_run_share_a_key(case):
    """Over setup, rounds, phases, clients, local iterations and the first batch."""
    one = observed(case.name)
    assert set(one.keys.values()) <= {1}
    # A sample is one row here; who takes all rows draws none.
    assert len(one.keys) in (0, sum(one.counted(ROUNDS)["samples"].values()))


@structures_first()
def test_states_keep_their_shapes_and_types(case):
    runtime = SimulatorRuntime(cohort_job(case))
    before, after = runtime.fetch(runtime.start()[0]), simulated(case.name).state
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for left, right in zip(
        jax.tree.leaves(before), jax.tree.leaves(after), strict=True
    ):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)


@structures_first(
    lambda case: (
        keeps_something(case)
        and not asks_everyone(case)
        and cohort_of(case, 2) is not None
    )
)
def test_absent_clients_keep_their_state(case):
    job = cohort_job(case)
    runtime = SimulatorRuntime(job)
    before = runtime.fetch(runtime.start()[0])
    after = execute(runtime, 1).state
    present = set(np.asarray(keys.draw_cohort(job.key, keys.ROUNDS, 0, 0, 3, 2)))
    for client in range(3):
        changed = any(
            not np.array_equal(left[client], right[client])
            for left, right in zip(
                jax.tree.leaves(before.clients),
                jax.tree.leaves(after.clients),
                strict=True,
            )
        )
        assert changed == (client in present)


@DEMANDING
def test_resumed_is_the_run_never_stopped(case, tmp_path):
    job = cohort_job(case)
    whole = execute(SimulatorRuntime(job), 4)
    keep = Checkpoints(tmp_path, every_rounds=1)
    execute(SimulatorRuntime(job), 2, checkpoints=keep)
    resumed = execute(SimulatorRuntime(job), 4, checkpoints=keep)
    assert_close((whole.state, whole.columns), (resumed.state, resumed.columns), 0)


def shorter(algorithm):
    """Return the algorithm with all its numbers a little smaller."""
    return jax.tree.map(lambda leaf: 0.9 * leaf, algorithm)


@DEMANDING
def test_another_step_size_does_not_compile_again(case):
    job = cohort_job(case)
    execute(SimulatorRuntime(job), 2)
    other = dataclasses.replace(job, algorithm=shorter(case.algorithm))
    second = SimulatorRuntime(other)
    execute(second, 5)
    assert second.compile_seconds == 0


@pytest.mark.slow
@DEMANDING
def test_measuring_less_often_measures_the_same(case):
    job = cohort_job(case)
    every = execute(SimulatorRuntime(job), 7)
    third = execute(SimulatorRuntime(job), 7, measure_every=3)
    assert third.columns["round"].tolist() == [3, 6, 7]
    for name, column in third.columns.items():
        np.testing.assert_array_equal(column, every.columns[name][[2, 5, 6]])


def moves(case) -> bool:
    return any(phase.moves for phase in every_phase(case.algorithm.phases()))


def moves_alone(case) -> bool:
    server = case.algorithm.init_server(jnp.zeros(1), jnp.zeros(1))
    # Corrected steps need what an exchange brings, so that none can stand alone.
    corrected = getattr(case.algorithm, "drift", None) is not None
    alone = not has_several_phases(case) and not corrected
    return moves(case) and isinstance(server, Iterate) and alone


@pytest.mark.exhaustive
@of_structures(moves)
def test_steps_of_length_one_are_the_method_itself(case):
    """On the server, and on clients where a local step can stand alone: one program."""
    inner: Any = case.algorithm
    if moves_alone(case):
        one = inner.with_local_steps(1)
        inner = LocalOptimizer(one, NOTHING_NEW, local_steps=inner.local_steps)
    wrapped = ServerOptimizer(inner, NOTHING_NEW)
    assert_close(end_of(case, wrapped), own_end(case), 1e-13)
