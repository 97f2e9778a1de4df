"""When runs end: a target, no progress, a budget, an interrupt, or a failure."""

from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel
from fedbilevel import Keeping, Sampling
from fedbilevel._types import Number, Pair
from fedbilevel.algorithms import AbstractAlgorithm, Phase, Repeat
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.errors import InvalidInputError, NonFiniteError
from fedbilevel.problem import ClientData, Problem
from fedbilevel.result import Result
from fedbilevel.runtime import (
    Checkpoints,
    Job,
    Ledger,
    Outcome,
    ReferenceRuntime,
    SimulatorRuntime,
    Stopping,
    SweepRuntime,
    driver,
    execute,
)
from fedbilevel.runtime.stopping import (
    PATIENCE,
    RUNNING,
    SPARSE,
    TARGET,
    Rule,
    Track,
    is_measured,
    spacing,
)
from fedbilevel.runtime.sweeping import single_outcomes
from fedbilevel.schedules import as_number
from fedbilevel.studies.single import measured_every, run_job
from tests.cases import quadratic_data, quadratic_job, some_of

pytestmark = pytest.mark.two_devices

ROUNDS, SEEDS = 12, (0, 1, 2, 3)
METRIC = "lower_error"


class Stroll(AbstractAlgorithm):
    """A lower step or more a round, as many as are drawn; clients count theirs."""

    reference: ClassVar[str] = "none"
    provenance: ClassVar[str] = "for these tests"
    lr: Number = eqx.field(converter=as_number)

    def init_server(self, x, y):
        return Pair(x, y)

    def init_client(self, x, y):
        return jnp.zeros((), jnp.int32)

    def phases(self):
        def local(point, turns, oracle, turn):
            zeta = oracle.draw_lower(turn.keys(1)[0])
            slope = oracle.lower_gradient(point.x, point.y, zeta)
            return turns + 1, point.y - self.lr * slope

        def phase(name):
            return Phase(name, lambda s: s, local, lambda s, y: Pair(s.x, y))

        return phase("first"), Repeat(3, (phase("more"),), random=True)

    def point(self, server):
        return server


DATA = quadratic_data(3)


def job_of(seed: int = 0, lr: float = 0.3) -> Job:
    return quadratic_job(Stroll(lr), DATA, participants=2, seed=seed)


def in_chunks(monkeypatch, size: int) -> None:
    """Let the host look at the run every so many rounds."""
    monkeypatch.setattr(driver, "_next_chunk", lambda *_: size)


def assert_close(a, b, tolerance: float = 0.0) -> None:
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def without_end(job: Job, rounds: int = ROUNDS) -> Outcome:
    return execute(SimulatorRuntime(job), rounds)


@pytest.fixture(scope="module")
def column() -> np.ndarray:
    """Return the metric after each round of a run that nothing ends."""
    return without_end(job_of()).columns[METRIC]


def first_at_or_below(column, target: float, every: int) -> int:
    (hits,) = np.nonzero(column[every - 1 :: every] <= target)
    return every * (int(hits[0]) + 1)


def last_of_patience(column, patience: int) -> int:
    best, stale = np.inf, 0
    for index, value in enumerate(column):
        stale = 0 if value < best else stale + 1
        best = min(best, value)
        if stale == patience:
            return index + 1
    raise AssertionError("patience was never lost")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "chunk", "every"),
    [
        (SimulatorRuntime, 1, 1),
        *some_of([(SimulatorRuntime, 5, 1), (SimulatorRuntime, 1, 3)], 0),
        (SimulatorRuntime, 5, 3),
        pytest.param(ReferenceRuntime, ROUNDS, 3, marks=pytest.mark.slow),
    ],
)
def test_a_target_ends_a_run_at_the_first_measurement_at_or_below_it(
    column, runtime, chunk, every, monkeypatch
):
    # Between two values, for the runtimes agree up to rounding only.
    target = float(column[2:4].mean())
    last = first_at_or_below(column, target, every)
    assert last == {1: 4, 3: 6}[every]
    in_chunks(monkeypatch, chunk)
    stopping = Stopping(METRIC, target=target)
    made = runtime(job_of())
    outcome = execute(made, ROUNDS, measure_every=every, stopping=stopping)
    assert outcome.ended == f"after round {last}: {METRIC} reached {target:g}"
    assert outcome.columns["round"].tolist() == list(range(every, last + 1, every))
    assert_close(outcome.columns[METRIC], column[every - 1 : last : every], 1e-12)
    assert_close(outcome.state, without_end(job_of(), last).state, 1e-12)


@pytest.mark.parametrize(
    ("runtime", "chunk", "patience"),
    [
        (SimulatorRuntime, 1, 2),
        (SimulatorRuntime, 5, 2),
        pytest.param(ReferenceRuntime, ROUNDS, 1, marks=pytest.mark.slow),
    ],
)
def test_patience_counts_measurements_without_a_new_best(
    column, runtime, chunk, patience, monkeypatch
):
    last = last_of_patience(column, patience)
    # After a single worse value a best one may follow, as it does here.
    assert last == {1: 5, 2: 8}[patience]
    in_chunks(monkeypatch, chunk)
    stopping = Stopping(METRIC, patience=patience)
    outcome = execute(runtime(job_of()), ROUNDS, stopping=stopping)
    told = f"after round {last}: {patience} measurements without a lower {METRIC}"
    assert outcome.ended == told
    assert outcome.columns["round"].tolist() == list(range(1, last + 1))
    assert_close(outcome.state, without_end(job_of(), last).state, 1e-12)


def test_equal_is_at_the_target_and_no_new_best():
    rule = Rule.of(Stopping("m", target=1.0, patience=2), jnp.asarray(9))
    due, start = jnp.asarray(True), Track.start()
    assert int(start.seen(rule, {"m": 1.0}, due).reason) == TARGET
    track = start.seen(rule, {"m": 2.0}, due).seen(rule, {"m": 2.0}, due)
    assert int(track.reason) == RUNNING and int(track.stale) == 1
    assert int(track.seen(rule, {"m": 2.0}, due).reason) == PATIENCE
    # A value that is no number is no progress either.
    assert int(track.seen(rule, {"m": jnp.nan}, due).reason) == PATIENCE
    assert int(track.seen(rule, {"m": 2.0}, jnp.asarray(False)).reason) == RUNNING


@pytest.mark.slow
@pytest.mark.parametrize("runtime", [SimulatorRuntime, ReferenceRuntime])
def test_what_is_never_reached_ends_nothing(runtime):
    rounds = 2
    stopping = Stopping(METRIC, target=-1.0, bytes=10**9)
    outcome = execute(runtime(job_of()), rounds, stopping=stopping)
    assert outcome.ended == f"after all {rounds} rounds"
    assert_close(outcome.state, without_end(job_of(), rounds).state, 1e-12)


def spending(name: str, amount: int) -> Stopping:
    limits: dict[str, Any] = {name: amount}
    return Stopping(**limits)


@pytest.mark.parametrize("name", ["bytes", "samples"])
def test_a_budget_ends_after_the_last_round_that_it_pays_for(name):
    job, paid = job_of(), 6
    costs = Ledger(job).cumulative(job.key, ROUNDS)[name]
    for budget, last in ((costs[paid - 1], paid), (costs[paid - 1] - 1, paid - 1)):
        stopping = spending(name, int(budget))
        outcome = execute(
            SimulatorRuntime(job), ROUNDS, measure_every=4, stopping=stopping
        )
        told = f"after round {last}: the budget of {name} is spent"
        assert outcome.ended == told
        assert outcome.columns["round"].tolist() == [4, last]
        assert_close(outcome.state, without_end(job, last).state)
    stopping = spending(name, int(costs[0]) - 1)
    with pytest.raises(InvalidInputError, match=f"alone takes {costs[0]}"):
        execute(SimulatorRuntime(job), ROUNDS, stopping=stopping)


def test_of_two_budgets_the_smaller_counts():
    job = job_of()
    costs = Ledger(job).cumulative(job.key, ROUNDS)
    stopping = Stopping(bytes=int(costs["bytes"][6]), samples=int(costs["samples"][3]))
    outcome = execute(SimulatorRuntime(job), ROUNDS, stopping=stopping)
    told = "after round 4: the budget of bytes or samples is spent"
    assert outcome.ended == told


def test_a_budget_of_seconds_ends_at_a_measurement(monkeypatch):
    in_chunks(monkeypatch, 1)
    stopping = Stopping(seconds=1e-9)
    options: Any = {"measure_every": 5, "stopping": stopping}
    outcome = execute(SimulatorRuntime(job_of()), ROUNDS, **options)
    assert outcome.ended == "after round 5: the budget of seconds is spent"
    assert outcome.columns["round"].tolist() == [5]
    assert_close(outcome.state, without_end(job_of(), 5).state)


# Every round, then four times while their number doubles, and the last.
SPARSE_ROUNDS = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 50]


def test_sparse_measurements_change_nothing_else_and_go_on_after_a_stop(tmp_path):
    def run(rounds: int = 50, **more: Any) -> Outcome:
        return execute(SimulatorRuntime(job_of()), rounds, **more)

    every, sparse = run(), run(measure_every=None)
    assert sparse.columns["round"].tolist() == SPARSE_ROUNDS
    assert_close(sparse.state, every.state)
    for name, column in sparse.columns.items():
        assert np.array_equal(
            column, every.columns[name][np.asarray(SPARSE_ROUNDS) - 1]
        )
    options: Any = {"measure_every": None, "checkpoints": Checkpoints(tmp_path)}
    assert run(41, **options).columns["round"].tolist() == [*SPARSE_ROUNDS[:17], 41]
    again = run(**options)
    assert_close((again.state, again.columns), (sparse.state, sparse.columns))


@pytest.mark.parametrize(
    ("done", "every", "then"), [(8, None, 8), (9, None, 10), (33, None, 40), (6, 5, 10)]
)
def test_a_run_that_must_end_goes_on_to_the_next_measurement(done, every, then):
    assert driver._next_measured(done, spacing(every)) == then


@pytest.mark.parametrize(
    ("stopping", "measured"),
    [
        (Stopping(), [*range(1, 9), 10, 12]),
        # It must be seen when it is over.
        (Stopping(METRIC, patience=ROUNDS), [*range(1, ROUNDS + 1)]),
    ],
)
def test_a_rule_that_looks_at_measurements_has_all_of_them(stopping, measured):
    options: Any = {"measure_every": None, "stopping": stopping, "config": {}}
    result = run_job(job_of(), ROUNDS, **options)
    assert result.columns["round"].tolist() == measured
    assert result.config["measure_every"] == (1 if stopping.looks else None)


def ridge_of_many_rows() -> Job:
    """Return a job whose rounds look at few of 32,000 rows."""

    def loss(x, y, rows):
        return jnp.mean((rows @ y) ** 2)

    rows, start = [np.ones((400, 40))] * 40, jnp.ones(40)
    problem = Problem(loss, lambda x, y, rows: loss(x, y, rows) + jnp.sum(x * y**2))
    setting = (problem, ClientData.from_clients(rows, rows), start, start)
    few = Sampling(batch=20, participants=10)
    return Job.of(FedBiO(0.1, 0.1, 0.1, local_steps=1), *setting, sampling=few)


def test_dear_measurements_are_a_tenth_of_what_a_run_looks_at():
    job, rounds = ridge_of_many_rows(), 1000
    ledger = Ledger(job)
    drawn = sum(ledger.summary(job.key, rounds)["samples"].values())
    every = measured_every(ledger, None, Stopping())
    assert every is not None
    share = 16_000 * (rounds // every) / drawn
    assert 100 < every < 600 and 0.07 < share < 0.11
    # Few rows, or many that a round looks at, too.
    for cheap in (job_of(), replace(job, participants=40, lower_batch=400)):
        assert measured_every(Ledger(cheap), None, Stopping()) is None
    assert measured_every(ledger, 3, Stopping()) == 3


def test_what_was_prepared_before_is_no_time_of_the_rounds():
    """Taken from it, a budget of seconds would last as much longer."""
    runtime = SimulatorRuntime(job_of())
    runtime.compile_seconds += 1000.0
    spent = execute(runtime, ROUNDS).seconds
    assert spent["compile"] >= 1000.0 and spent["run"] > 0.0


def stop_after(rounds: int):
    def watch(done: int, total: int, newest: dict[str, float]) -> None:
        if done >= rounds:
            raise KeyboardInterrupt

    return watch


def test_a_stopped_run_is_resumed(tmp_path, monkeypatch):
    in_chunks(monkeypatch, 3)
    stopping, keep = Stopping(METRIC, patience=2), Checkpoints(tmp_path)
    once = execute(SimulatorRuntime(job_of()), ROUNDS, stopping=stopping)

    def resumed(stopping, watch=None) -> Outcome:
        return execute(
            SimulatorRuntime(job_of()),
            ROUNDS,
            stopping=stopping,
            checkpoints=keep,
            watch=watch,
        )

    with pytest.raises(KeyboardInterrupt):
        resumed(stopping, stop_after(6))
    # What was measured before the interrupt counts; once ended, nothing is left to do.
    for again in (resumed(stopping), resumed(stopping)):
        assert again.ended == once.ended
        assert_close((again.state, again.columns), (once.state, once.columns))
    longer = Stopping(METRIC, patience=3)
    more = execute(SimulatorRuntime(job_of()), ROUNDS, stopping=longer)
    assert len(more.columns["round"]) > len(once.columns["round"])
    again = resumed(longer)
    assert again.ended == more.ended
    assert_close((again.state, again.columns), (more.state, more.columns))


def test_a_run_that_ended_between_measurements_goes_on_as_if_it_had_not(tmp_path):
    costs = Ledger(job_of()).cumulative(job_of().key, ROUNDS)["bytes"]

    def run(budget: int, **more: Any) -> Outcome:
        stopping = Stopping(METRIC, patience=1, bytes=budget)
        options = {"measure_every": 2, "stopping": stopping, **more}
        return execute(SimulatorRuntime(job_of()), ROUNDS, **options)

    keep = Checkpoints(tmp_path)
    assert run(int(costs[4]), checkpoints=keep).columns["round"].tolist() == [2, 4, 5]
    # After round 5 there was no new best, but nobody would have looked there.
    whole, again = run(int(costs[-1])), run(int(costs[-1]), checkpoints=keep)
    assert again.ended == whole.ended and whole.ended.startswith("after round 8: 1 ")
    assert_close(again.state, whole.state)


def swept(**options: Any) -> list[Any]:
    """Run all seeds together; return what each came to."""
    many = options.pop("algorithms", ())
    stopping = options.setdefault("stopping", Stopping())
    every = options.setdefault("measure_every", 1)
    runtime = SweepRuntime(job_of(), algorithms=many, seeds=SEEDS)
    outcome = execute(runtime, ROUNDS, **options)
    return single_outcomes(runtime, outcome, stopping, ROUNDS, every)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "chunk", "stopping"),
    some_of(
        [
            (1, 2, Stopping(METRIC, target=0.2, patience=3)),
            (1, ROUNDS, Stopping(METRIC, target=0.2, patience=3)),
            # After round 8, where the others end, the third one would be at its target.
            (5, 2, Stopping(METRIC, target=0.4, bytes=3000)),
            (2, ROUNDS, Stopping(METRIC, patience=1, bytes=3000)),
            (5, 2, Stopping(bytes=3300)),
        ],
        2,
    ),
)
def test_runs_of_a_sweep_end_where_they_would_alone(
    every, stopping, chunk, monkeypatch
):
    in_chunks(monkeypatch, chunk)
    options: Any = {"measure_every": every, "stopping": stopping}
    ends = set()
    for seed, outcome in zip(SEEDS, swept(**options), strict=True):
        alone = execute(SimulatorRuntime(job_of(seed)), ROUNDS, **options)
        assert outcome.ended == alone.ended
        assert outcome.columns["round"].tolist() == alone.columns["round"].tolist()
        assert_close(outcome.columns, alone.columns, 1e-12)
        assert_close(outcome.state, alone.state, 1e-12)
        ends.add(outcome.ended)
    assert len(ends) > 2


@pytest.mark.parametrize("runtime", [SimulatorRuntime, ReferenceRuntime])
def test_an_unknown_metric_is_refused_by_name(runtime):
    stopping = Stopping("lower_eror", target=0.1)
    with pytest.raises(InvalidInputError, match="'lower_eror'.*mean 'lower_error'"):
        execute(runtime(job_of()), ROUNDS, stopping=stopping)


@pytest.mark.parametrize("name", ["patience", "bytes", "samples", "seconds"])
def test_a_rule_that_ends_at_once_is_refused(name):
    with pytest.raises(InvalidInputError, match=f"{name}=0"):
        spending(name, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopping", "measured"),
    [
        (Stopping(), [*range(1, 9), 10, ROUNDS]),
        (Stopping(METRIC, patience=ROUNDS), [*range(1, ROUNDS + 1)]),
    ],
)
def test_a_sweep_and_a_comparison_are_measured_like_runs(stopping, measured):
    job, seeds = job_of(), [0, 1]
    setting = (job.problem, DATA, (job.x, job.y))
    more = {"rounds": ROUNDS, "seeds": seeds, "measure_every": None}
    more |= {"sampling": Sampling(batch=1, participants=2), "metrics": job.metrics}
    more |= {"stopping": stopping}
    swept = fedbilevel.sweep(*setting, job.algorithm, **more)
    found = fedbilevel.compare(*setting, {"one": job.algorithm}, **more)
    for result in (*swept, *found.results["one"]):
        assert isinstance(result, Result)
        assert result.columns["round"].tolist() == measured


@pytest.mark.slow
def test_an_interrupted_sweep_is_resumed(tmp_path, monkeypatch):
    in_chunks(monkeypatch, 2)
    job = job_of()

    def sweep(**more: Any) -> list[Any]:
        return fedbilevel.sweep(
            job.problem,
            DATA,
            (job.x, job.y),
            job.algorithm,
            rounds=ROUNDS,
            seeds=SEEDS,
            sampling=Sampling(batch=1, participants=2),
            metrics=job.metrics,
            **more,
        )

    whole = sweep()
    with pytest.raises(KeyboardInterrupt, match=f"After round 5 of {ROUNDS}. Kept in"):
        sweep(keeping=Keeping(tmp_path), watch=stop_after(4))
    for one, again in zip(
        whole, sweep(keeping=Keeping(tmp_path, resume=True)), strict=True
    ):
        assert isinstance(again, Result)
        assert again.columns["round"].tolist() == list(range(1, ROUNDS + 1))
        assert_close((again.columns, again.point), (one.columns, one.point))
        assert again.config["seed"] == one.config["seed"]


@pytest.mark.parametrize("chunk", [2, ROUNDS])
def test_runs_that_diverge_leave_their_error_and_the_others_go_on(
    chunk, tmp_path, monkeypatch
):
    in_chunks(monkeypatch, chunk)
    steps = (0.3, 1e40, 0.2, 1e30)
    many = [Stroll(step) for step in steps]
    keep = Checkpoints(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        swept(algorithms=many, checkpoints=keep, watch=stop_after(5))
    found = swept(algorithms=many, checkpoints=keep)
    for seed, step, one in zip(SEEDS, steps, found, strict=True):
        alone = SimulatorRuntime(replace(job_of(seed), algorithm=Stroll(step)))
        if step < 1:
            expected = execute(alone, ROUNDS)
            assert_close(one.state, expected.state, 1e-12)
            assert_close(one.columns, expected.columns, 1e-12)
            continue
        with pytest.raises(NonFiniteError) as raised:
            execute(alone, ROUNDS)
        assert isinstance(one, NonFiniteError) and 3 < one.round < 6
        assert str(one) == str(raised.value)
        assert f"run {seed} of the sweep" in one.__notes__[0]


def test_a_sweep_in_which_all_diverge_raises():
    with pytest.raises(NonFiniteError, match="round 4, "):
        swept(algorithms=[Stroll(1e40) for _ in SEEDS])


def test_sparse_measurements_are_after_rounds_of_three_leading_bits():
    """All up to 8, then four while their number doubles, however many rounds."""
    edges = [2**power + more for power in range(3, 31) for more in (-1, 0, 1)]
    edges += [2**power * head // 4 for power in range(3, 29) for head in (5, 6, 7)]
    done = np.asarray([*range(1, 600), *edges], np.int32)
    zeros = [number & -number for number in done.tolist()]  # the last bit that is set
    heads = [n // zero for n, zero in zip(done.tolist(), zeros, strict=True)]
    expected = [head < 8 for head in heads]
    np.testing.assert_array_equal(is_measured(done, SPARSE), expected)
