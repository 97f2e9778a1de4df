"""Costs of a run: the formulas of the paper, and calls counted one by one."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import _evaluation
from fedbilevel._types import Pair
from fedbilevel.algorithms import AbstractAlgorithm, Phase, Pointed
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.hypergradient import (
    ConjugateGradient,
    Exact,
    ForwardGradient,
    FrozenNeumann,
    Neumann,
    RandomNeumann,
)
from fedbilevel.problem import Problem
from fedbilevel.runtime import Job, Ledger, ReferenceRuntime, Sampling, count, keys
from fedbilevel.runtime.contract import Span
from fedbilevel.runtime.driver import NEVER
from fedbilevel.runtime.stopping import Rule, Stopping, Track, affordable_rounds
from fedbilevel.tasks import find
from tests.cases import DX as QX
from tests.cases import DY as QY
from tests.cases import (
    EVERY,
    data_for,
    quadratic_data,
    quadratic_job,
)
from tests.watching import watching

CLIENTS, DX, DY, Q, P = 3, 5, 6, 4, 2
TASK = find("quadratic")(CLIENTS)
# Counts do not depend on the noise, but uncompiled random numbers take most of a run.
QUIET = Problem(TASK.problem.upper, TASK.problem.lower)


def make_job(
    algorithm: type[LocalBSGM] | type[LocalBSGVRM] = LocalBSGM,
    *,
    problem=TASK.problem,
    rule=None,
    participants=None,
    batch: int | None = 1,
    dtype=None,
    **counts,
):
    built = algorithm(
        Neumann(Q, 0.3) if rule is None else rule,
        0.5,
        alpha=0.5,
        beta=0.4,
        rho1=0.1,
        rho2=0.1,
        local_steps=P,
        **counts,
    )

    def cast(leaf):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if dtype and floating else leaf

    data, x, y = jax.tree.map(cast, (TASK.data, TASK.x, TASK.y))
    drawing = Sampling(batch, participants)
    return Job.of(built, problem, data, x, y, sampling=drawing)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [LocalBSGM, LocalBSGVRM])
@pytest.mark.parametrize("dtype, width", [(jnp.float32, 4), (jnp.float64, 8)])
def test_traffic_is_two_points_and_two_directions_each_way(algorithm, dtype, width):
    rounds, participants = 7, 2
    found = count(make_job(algorithm, participants=participants, dtype=dtype), rounds)
    floats = 2 * (DX + DY)
    for way in ("down", "up"):
        assert found["per_client_and_round"][f"floats_{way}"] == floats
        assert found["per_client_and_round"][f"bytes_{way}"] == width * floats
        assert found[f"floats_{way}"] == rounds * participants * floats
        assert found[f"bytes_{way}"] == width * rounds * participants * floats
    assert found["exchanges"] == found["rounds"] == rounds
    assert found["participants"] == participants


@pytest.mark.parametrize("rounds", [0, 1, 5])
@pytest.mark.parametrize("participants", [2, CLIENTS])
@pytest.mark.parametrize(
    "algorithm, first, points",
    [(LocalBSGM, 1, 1), (LocalBSGVRM, 1, 2), (LocalBSGVRM, 4, 2)],
)
def test_samples_and_calls(algorithm, first, points, participants, rounds):
    batch = 3
    rest = {} if first == 1 else {"first_batch": first}
    job = make_job(algorithm, participants=participants, batch=batch, **rest)
    found = count(job, rounds)
    steps = rounds * P * participants
    extra = (first - 1) * participants if rounds else 0
    # One bundle and one zeta a step: xi above, zeta and zeta_0..zeta_Q below.
    bundles = steps + extra
    assert found["samples"] == {
        "upper_samples": bundles * batch,
        "lower_samples": bundles * (Q + 2) * batch,
    }
    # A bundle is evaluated at one or two points in the loop, at one before it.
    evaluations = points * steps + extra
    assert found["calls"] == {
        "upper_gradients": evaluations,
        "lower_gradient": evaluations,
        "hessian_product": evaluations * Q,
        "cross_product": evaluations,
    }


@pytest.mark.parametrize("algorithm", [LocalBSGM, LocalBSGVRM])
def test_warm_start_is_one_exchange_more(algorithm):
    without = count(make_job(algorithm), 3)
    found = count(make_job(algorithm, warm_start=5), 3)
    assert found["exchanges"] == without["exchanges"] + 1
    # x and y go to the warm start; in the first round only y is new.
    assert found["floats_down"] == without["floats_down"] + CLIENTS * DY
    assert found["floats_up"] == without["floats_up"] + CLIENTS * DY
    assert found["bytes_down"] == 8 * found["floats_down"]
    assert found["bytes_up"] == 8 * found["floats_up"]
    assert found["per_client_and_round"] == without["per_client_and_round"]
    assert Counter(found["calls"]) - Counter(without["calls"]) == {
        "lower_gradient": 5 * CLIENTS
    }
    assert Counter(found["samples"]) - Counter(without["samples"]) == {
        "lower_samples": 5 * CLIENTS
    }


@pytest.fixture
def tally():
    """Count the oracle's real calls: the reference runtime makes every one."""
    with watching() as seen:
        yield seen.calls


def unmeasured(index: int) -> Span:
    """Return one round of nine that are measured at their end."""
    limits = np.asarray([9], np.int32)
    rule = Rule.of(NEVER, jnp.asarray(9))
    return Span(index, index + 1, 9, 9, limits, rule, Track.start(), False)


def assert_counts_are_real(job, tally):
    # Checking a job and tracing it call the oracle as well, hence before the run.
    counts = [count(job, rounds) for rounds in (1, 2)]
    tally.clear()
    runtime = ReferenceRuntime(job)
    state, _ = runtime.start()
    for index, found in enumerate(counts):
        # No measurement falls into these rounds: it would take gradients, too.
        state = runtime.advance(state, unmeasured(index)).state
        jax.effects_barrier()
        assert +Counter({**found["calls"], **found["samples"]}) == tally


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, rest",
    [
        (LocalBSGM, {}),
        (LocalBSGM, {"participants": 2, "warm_start": 3}),
        (LocalBSGVRM, {"first_batch": 1}),
        (LocalBSGVRM, {"participants": 2, "warm_start": 1, "first_batch": 3}),
    ],
)
def test_counts_are_the_calls_of_a_real_run(tally, algorithm, rest):
    assert_counts_are_real(make_job(algorithm, problem=QUIET, batch=2, **rest), tally)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        Exact(),
        ConjugateGradient(3),
        FrozenNeumann(3, 0.3),
        RandomNeumann(Q + 1, 0.3),
        ForwardGradient(2, 0.3, 3),
    ],
)
def test_counts_of_other_rules_are_the_calls_of_a_real_run(tally, rule):
    job = make_job(LocalBSGVRM, problem=QUIET, rule=rule, batch=2)
    assert_counts_are_real(job, tally)


def test_a_solve_that_a_tolerance_ends_counts_at_most_all_of_its_steps():
    whole, ended = (
        count(make_job(LocalBSGVRM, rule=ConjugateGradient(7, tolerance=part)), 2)
        for part in (0.0, 0.1)
    )
    assert ended["calls"] == whole["calls"] and "bounds" not in whole
    assert ended["bounds"] == {"hessian_product": "at most"}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Neumann(Q, 0.3), RandomNeumann(Q + 1, 0.3)])
def test_an_accelerator_draws_later_but_the_same_samples(rule):
    # With noise: a client of this task has one row, whatever the key.
    job = make_job(LocalBSGVRM, rule=rule, batch=2, first_batch=3)

    def estimate():
        oracle, y = job.oracle(0), job.y + 1
        return rule(oracle, job.x, y, rule.draw(oracle, jax.random.key(3)))

    counts, value = count(job, 2), estimate()
    # The accelerator's program can be traced, and its parts run, on the CPU.
    with _evaluation.using(_evaluation.ACCELERATOR):
        assert count(job, 2) == counts
        np.testing.assert_allclose(estimate(), value, rtol=1e-12)


PLAIN_STEPS = FedBiO(0.1, 0.2, 0.15, local_steps=2)
SIZES = 3 + 4 + 5  # rows of three clients at either level
PERIOD = 3


class Held(Pointed):
    """A server that holds the point."""

    point: Pair


class Refreshing(AbstractAlgorithm):
    """Steps below along one row; every third time, or by a coin, along all of them."""

    decided_by: str = eqx.field(static=True, default="turn")

    def init_server(self, x, y):
        return Held(Pair(x, y))

    def phases(self):
        return (Phase("step", lambda server: server.point, self.local, self.up),)

    def up(self, server, y):
        return Held(Pair(server.point.x, y))

    def due(self, turn, y):
        return {
            "turn": turn.index % PERIOD == 0,
            "coin": jax.random.bernoulli(turn.shared),
            "point": y[0] > 0,
        }[self.decided_by]

    def local(self, point, memory, oracle, turn):
        def step(y, key):
            def along(draw):
                batch = draw()
                return 0.1 * oracle.lower_gradient(point.x, y, batch)

            whole = partial(along, oracle.all_lower)
            some = partial(along, partial(oracle.draw_lower, key))
            # Under a jit inside of a loop: where it is decided is outside of both.
            decided = jax.jit(lambda due: jax.lax.cond(due, whole, some))
            return y - decided(due), None

        due = self.due(turn, point.y)
        return memory, jax.lax.scan(step, point.y, turn.keys(2))[0]


@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_a_branch_that_the_turn_decides_counts_when_it_is_taken(rounds):
    job = quadratic_job(Refreshing(), quadratic_data(3))
    refreshed = -(-rounds // PERIOD)
    below = 2 * (refreshed * SIZES + (rounds - refreshed) * 3)
    found = count(job, rounds)
    assert found["samples"] == {"upper_samples": 0, "lower_samples": below}
    assert found["calls"] == {"lower_gradient": 2 * 3 * rounds}
    assert "bounds" not in found
    assert Ledger(job).cumulative(job.key, rounds)["samples"][-1] == below


@pytest.mark.slow
def test_a_branch_that_the_turn_decides_is_that_of_a_real_run(tally):
    assert_counts_are_real(quadratic_job(Refreshing(), quadratic_data(3)), tally)


@pytest.mark.parametrize("decided_by", ["coin", "point"])
def test_a_branch_that_nobody_knows_counts_at_most(decided_by):
    found = count(quadratic_job(Refreshing(decided_by), quadratic_data(3)), 5)
    assert found["samples"]["lower_samples"] == 5 * 2 * SIZES
    assert found["bounds"] == {"lower_samples": "at most"}


def test_full_batches_count_all_rows():
    # A step has one xi and zeta, zeta_0, and zeta_1 to zeta_Q, which are the same rows
    # and read once. A client has one row.
    found = count(make_job(batch=None), 3)
    steps = 3 * P * CLIENTS
    expected = {"upper_samples": steps, "lower_samples": 3 * steps}
    assert found["samples"] == expected
    assert found["calls"]["upper_gradients"] == steps


def test_full_batches_of_unlike_clients_count_their_own_rows():
    job = quadratic_job(PLAIN_STEPS, quadratic_data(3))
    whole = replace(job, upper_batch=None, lower_batch=None)
    one, every = count(job, 2)["samples"], count(whole, 2)["samples"]
    # What was one row a client is all of them.
    assert every == {kind: number * SIZES // 3 for kind, number in one.items()}
    pooled = quadratic_job(PLAIN_STEPS, quadratic_data(3).pooled())
    whole = replace(pooled, upper_batch=None, lower_batch=None)
    one, here = count(pooled, 2)["samples"], count(whole, 2)["samples"]
    assert here == {kind: number * SIZES for kind, number in one.items()} == every
    # Of a cohort as many as two of three clients have on the average.
    job = quadratic_job(PLAIN_STEPS, quadratic_data(3), participants=2)
    drawn = count(replace(job, upper_batch=None, lower_batch=None), 2)["samples"]
    assert drawn == {kind: number * 2 // 3 for kind, number in every.items()}


def test_a_budget_of_samples_ends_a_run_of_full_batches():
    job = quadratic_job(Refreshing(), quadratic_data(3))
    ends = affordable_rounds(Stopping(samples=60), 9, Ledger(job), [job.key])
    # 24, then 6, 6, 24 and 6.
    assert ends.tolist() == [4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [Neumann(0, 0.3), FrozenNeumann(0, 0.3), RandomNeumann(1, 0.3)]
)
def test_a_series_without_factors_runs_in_the_reference_runtime(tally, rule):
    assert_counts_are_real(make_job(problem=QUIET, rule=rule, batch=2), tally)


@EVERY
def test_traffic_is_the_formula_of_the_literature(case):
    found = count(quadratic_job(case.algorithm, data_for(case, 3)), 5)
    down = case.floats_down or case.floats
    for way, floats in (("down", down(QX, QY)), ("up", case.floats(QX, QY))):
        assert found["per_client_and_round"][f"floats_{way}"] == floats
        own = case.bytes_up if way == "up" else None
        size = 8 * floats if own is None else own(QX, QY)
        assert found["per_client_and_round"][f"bytes_{way}"] == size
    assert found["exchanges"] == 5 * case.exchanges + len(case.algorithm.setup())


NEST: dict[str, Any] = {"alpha": 0.1, "beta": 0.1, "inner_rounds": 2, "local_steps": 2}


def test_random_lengths_cost_what_is_drawn():
    terms, rounds = 4, 30
    job = quadratic_job(FedNest(**NEST, ell=3.0, terms=terms), quadratic_data(3))
    # The series is the second entry of a round; the two phases of FedInn come before
    # its start, and so its only phase has the number 3.
    lengths = [
        int(keys.draw_length(job.key, keys.ROUNDS, 3, index, terms - 1))
        for index in range(rounds)
    ]
    assert set(lengths) == {0, 1, 2, 3}
    found = count(job, rounds)
    assert found["exchanges"] == sum(2 * 2 + length + 3 for length in lengths)
    up = sum((2 * 2 + 1 + length) * QY + 2 * QX for length in lengths)
    assert found["floats_up"] == 3 * up
    # Down it is as much, and y once more at the start.
    assert found["floats_down"] == 3 * (up + QY)
    assert found["calls"]["hessian_product"] == 3 * sum(lengths)


def test_a_fresh_cohort_is_sent_all_it_needs():
    nest = FedNest(**NEST, ell=3.0, terms=2, random_length=False)
    job = quadratic_job(nest, quadratic_data(3), participants=2)
    # x and y with every exchange; q, the term, the sum, h where they are used.
    exchanges = 2 * 2 + 2 + 3
    down = exchanges * (QX + QY) + (2 + 2 + 1) * QY + QX
    assert count(job, 3)["per_client_and_round"]["floats_down"] == down


def test_costs_add_up_over_the_rounds():
    job = quadratic_job(FedNest(**NEST, ell=3.0, terms=4), quadratic_data(3))
    ledger = Ledger(job)
    columns, total = ledger.cumulative(job.key, 6), ledger.summary(job.key, 6)
    assert columns["bytes"][-1] == total["bytes_up"] + total["bytes_down"]
    assert columns["samples"][-1] == sum(total["samples"].values())
    assert (np.diff(columns["bytes"]) > 0).all()
