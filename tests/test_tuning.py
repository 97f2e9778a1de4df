"""Tuning: what it looks at, what it spends, what it keeps, and what it finds."""

import json
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import algorithms, tasks
from fedbilevel.cli.app import app
from fedbilevel.errors import CheckpointError, InvalidInputError, NonFiniteError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.tuning import NamedSearch, Tuning, search_of, tune
from fedbilevel.runtime.driver import Outcome
from fedbilevel.studies import budgets, searching
from fedbilevel.studies.budgets import looks
from fedbilevel.studies.searching import Range, Search, Values
from fedbilevel.studies.setting import Setting
from fedbilevel.studies.tuning import tuned, tuning_seeds
from fedbilevel.studies.validation import HELD_OUT, held_out

SIZES = (11, 4, 6)  # upper rows of the clients
START = (jnp.zeros(2), jnp.zeros(2))


def upper(x, y, rows):
    return jnp.mean(jnp.sum((y - rows["aim"]) ** 2, axis=1)) + 0.1 * jnp.sum(x**2)


def lower(x, y, rows):
    return 0.5 * jnp.mean(jnp.sum((y - x - rows["at"]) ** 2, axis=1))


def clients(seed=0):
    draw = np.random.default_rng(seed)
    uppers = [{"aim": 2 + draw.standard_normal((size, 2))} for size in SIZES]
    lowers = [{"at": draw.standard_normal((5, 2))} for _ in SIZES]
    return uppers, lowers


PROBLEM, DATA = fb.Problem(upper, lower), fb.ClientData.from_clients(*clients())
ALL_ROWS = fb.Sampling(batch=None)
MAKE = partial(fb.FedBiO, lr_z=0.5, local_steps=1)
SPACE = {"lr_x": Range(0.01, 1), "lr_y": Range(0.05, 0.8)}


def rows_of(data, client):
    size = int(data.upper_sizes[client])
    return np.asarray(data.upper["aim"][client, :size])


def test_a_fifth_of_the_upper_rows_is_held_out_and_every_row_is_somewhere():
    kept, judged = held_out(DATA)
    assert judged is not None
    assert judged.upper_sizes.tolist() == [2, 0, 1]
    assert kept.upper_sizes.tolist() == [9, 4, 5]
    assert judged.weights.tolist() == [1, 0, 1] and kept.weights.tolist() == [1] * 3
    for client, size in enumerate(SIZES):
        parts = [rows_of(kept, client), rows_of(judged, client)]
        both = np.concatenate(parts)
        assert len(np.unique(both[:, 0])) == size
        given = rows_of(DATA, client)
        assert sorted(both[:, 0]) == sorted(given[:, 0])
        assert not np.array_equal(parts[0], given[: len(parts[0])]) or size < 5


def test_without_five_upper_rows_nothing_is_held_out():
    few = [{"aim": np.ones((4, 2))}] * 3
    data = fb.ClientData.from_clients(few, clients()[1])
    assert held_out(data) == (data, None)
    pooled, judged = held_out(DATA.pooled())
    assert isinstance(pooled, fb.PooledData) and isinstance(judged, fb.PooledData)


def test_a_trial_is_a_run_on_the_other_rows_judged_on_those_held_out():
    """Also of the one that came to the end in two rungs, from where it was."""
    search = Search(MAKE, SPACE, trials=4, sampler="even")
    shared = {"rounds": 6, "sampling": ALL_ROWS}
    found = fb.tune(PROBLEM, DATA, START, search, seeds=[7, 8], rungs=2, **shared)
    assert found.judged_by == HELD_OUT and found.seeds == (7, 8)
    kept, judged = held_out(DATA)
    judging = [rows_of(judged, client) for client in (0, 2)]
    assert Counter(trial.rounds for trial in found.trials) == {2: 2, 6: 2}
    for trial in found.trials:
        ends = {2: [1, 2], 6: [3, 4, 5, 6]}[trial.rounds]  # of each rung, five at most
        expected = []
        for end in ends:
            shared["rounds"] = end
            alone = fb.run(PROBLEM, kept, START, trial.algorithm, **shared)
            x, y = np.asarray(alone.x), np.asarray(alone.y)
            losses = [np.mean(np.sum((y - rows) ** 2, axis=1)) for rows in judging]
            expected.append(np.mean(losses) + 0.1 * np.sum(x**2))
        assert trial.value == pytest.approx(np.mean(expected), rel=1e-9)
        assert np.mean(trial.by_seed) == pytest.approx(trial.value)
    last = [trial for trial in found.trials if trial.rounds == 6]
    assert found.algorithm is min(last, key=lambda trial: trial.value).algorithm
    assert found.point == {
        "lr_x": pytest.approx(float(found.algorithm.lr_x)),  # type: ignore[attr-defined]
        "lr_y": pytest.approx(float(found.algorithm.lr_y)),  # type: ignore[attr-defined]
    }


@pytest.mark.slow
def test_metrics_which_may_know_test_rows_are_not_computed():
    def tested(x, y):
        raise AssertionError("tuning looks at test rows")

    candidates = [MAKE(lr_x=0.1, lr_y=step) for step in (0.1, 0.5)]
    more = {"rounds": 2, "seeds": [0], "rungs": 1, "sampling": ALL_ROWS}
    fb.tune(PROBLEM, DATA, START, candidates, metrics=tested, **more)
    with pytest.raises(AssertionError, match="looks at test rows"):
        fb.tune(
            PROBLEM, DATA, START, candidates, metrics=tested, headline="far", **more
        )


def write_table(path, flipped):
    """Write rows of which the first fifth in the task's order, which tests, differs."""
    draw = np.random.default_rng(1)
    features = draw.standard_normal((60, 3))
    label = (features[:, 0] > 0).astype(int)
    tested = np.random.default_rng(0).permutation(60)[:12]
    if flipped:
        label[tested] = 1 - label[tested]
    told = np.where(label == 1, "yes", "no")
    pairs = zip(features.tolist(), told, strict=True)
    rows = [f"{a},{b},{c},{ill}" for (a, b, c), ill in pairs]
    path.write_text("\n".join(["a,b,c,ill", *rows]) + "\n")


@pytest.mark.slow
def test_other_test_rows_change_nothing_of_what_is_chosen(tmp_path):
    found = {}
    for flipped in (False, True):
        path = tmp_path / f"{flipped}.csv"
        write_table(path, flipped)
        options = {"data": str(path), "label": "ill"}
        plan = Experiment(
            "regularization", "fedavg", 2, rounds=4, local_steps=2, options=options
        )
        built = plan.build()
        entry = algorithms.find("fedavg")
        usual, count = built.task.recommended, built.task.data.clients
        given = {"lower_step": "0.01,0.3,2"}
        named = search_of(plan, entry, usual, count, given)
        search = named.search(27, "even")
        assert search is not None
        for by in (built.setting.tuned_by, "test_loss"):
            setting = replace(built.setting, tuned_by=by)
            trials = tuned(setting, search, 4, [3], rungs=1).trials
            found[by, flipped] = [trial.value for trial in trials]
    assert found[HELD_OUT, False] == found[HELD_OUT, True]
    # The mistake that this is for: test rows as what tuning looks at.
    assert found["test_loss", False] != found["test_loss", True]
    orders = [np.argmin(found["test_loss", flipped]) for flipped in (False, True)]
    assert orders[0] != orders[1]


@pytest.mark.slow
def test_no_task_is_tuned_by_its_test_rows():
    """Of a closed form there are no rows that could be learned by heart."""
    by = {}
    for name in tasks.names():
        source = tasks.find(name)
        small = {"clients": 2} if name != "architecture" else {}
        by[name] = source(**small).tuned_by
    exact = {name for name, told in by.items() if told}
    assert exact == {"quadratic", "minimax", "two-client"}


@pytest.mark.slow
def test_a_third_goes_on_and_all_of_it_is_seven_runs():
    search = Search(MAKE, SPACE, trials=27, sampler="even")
    shared = {"sampling": fb.Sampling(batch=2), "rounds": 9}
    found = fb.tune(PROBLEM, DATA, START, search, seeds=[0], rungs=3, **shared)
    assert Counter(trial.rounds for trial in found.trials) == {1: 18, 3: 6, 9: 3}
    alone = fb.run(PROBLEM, held_out(DATA)[0], START, found.algorithm, **shared)
    drawn = int(alone.columns["samples"][-1])
    assert drawn > 0 and (found.cost, found.unit) == (7 * drawn, "samples")


@pytest.mark.slow
@pytest.mark.parametrize("batch", [pytest.param(2, marks=pytest.mark.slow), None])
def test_a_budget_pays_for_so_many_trials(batch):
    """Of samples, which are all rows of a client where there is no batch."""
    search = Search(MAKE, SPACE, trials=27)
    shared = {"sampling": fb.Sampling(batch), "rounds": 4, "seeds": [0], "rungs": 1}
    (one,) = fb.tune(PROBLEM, DATA, START, search, budget=1, **shared).trials
    # FedBiO draws five samples in a step, in each of three clients: two of them above.
    kept = held_out(DATA)[0]
    above, below = (int(n.sum()) for n in (kept.upper_sizes, kept.lower_sizes))
    each = 4 * (2 * above + 3 * below) if batch is None else 4 * 3 * 5 * batch
    paid = fb.tune(PROBLEM, DATA, START, search, budget=3 * each - 1, **shared)
    assert len(paid.trials) == 2 and paid.cost == 2 * each
    assert paid.trials[0].point == one.point


@pytest.mark.slow
def test_a_budget_of_seconds_pays_for_what_a_forecast_says(tmp_path, monkeypatch):
    """The forecast is made once: a search that goes on has as many trials."""
    monkeypatch.setattr(budgets, "_seconds_of_round", lambda job: (0.25, 0.0))
    search = Search(MAKE, SPACE, trials=27)
    more = {"sampling": fb.Sampling(2), "rounds": 4, "seeds": [0, 1]}
    more |= {"budget": 7.9, "unit": "seconds"}

    def trials_of(resume):
        kept = fb.Keeping(tmp_path / "kept", resume)
        return fb.tune(PROBLEM, DATA, START, search, keeping=kept, **more)

    # Four rounds from two seeds are two seconds a trial.
    found = trials_of(False)
    assert len(found.trials) == 3
    assert (found.unit, found.budget) == ("seconds", 7.9)
    assert 0 < found.cost < 60 and found.spent()["unit"] == "seconds"
    monkeypatch.setattr(budgets, "_seconds_of_round", lambda job: (1e-9, 0.0))
    again = trials_of(True)
    assert [one.value for one in again.trials] == [one.value for one in found.trials]
    for other in ({"budget": 79}, {"unit": "samples"}):
        more |= {"budget": 7.9, "unit": "seconds"} | other
        with pytest.raises(CheckpointError, match="of 7.9 seconds, not of"):
            trials_of(True)


@pytest.mark.slow
def test_seconds_are_forecast_from_rounds_that_are_compiled():
    setting = Setting(PROBLEM, DATA, START, sampling=fb.Sampling(2))
    job = setting.job(MAKE(lr_x=0.1, lr_y=0.1))
    assert budgets.costs_of_rungs(job, [10], "seconds") > 0
    wild = setting.job(MAKE(lr_x=0.1, lr_y=1e300))
    assert not budgets.costs_of_rungs(wild, [10], "seconds").any()


@pytest.mark.slow
def test_searches_of_a_comparison_are_timed_once(tmp_path, monkeypatch):
    """The dearest keeps its trials, and a resumed comparison its budget."""
    times = iter([1.00003, 0.5])  # and an error at a third look
    monkeypatch.setattr(budgets, "_seconds_of_round", lambda job: (next(times), 0.0))
    searches = {name: Search(MAKE, SPACE, trials=2) for name in ("dear", "cheap")}
    more = {"rounds": 2, "seeds": [0], "equal": "seconds", "sampling": ALL_ROWS}
    for resume in (False, True):
        kept = fb.Keeping(tmp_path / "kept", resume)
        found = fb.compare(PROBLEM, DATA, START, searches, keeping=kept, **more)
        trials = {name: len(one.trials) for name, one in found.tuned.items()}
        assert trials == {"dear": 2, "cheap": 4}
        assert {one.budget for one in found.tuned.values()} == {8.0}


def test_forecast_rounds_are_measured_as_often_as_those_of_a_trial(monkeypatch):
    """A round takes a second here, and a measurement ten."""

    def took(runtime, rounds, measure_every=1):
        spent = {"run": rounds + 10.0 * (rounds // measure_every)}
        return Outcome(None, {}, spent)

    monkeypatch.setattr(budgets, "execute", took)
    job = Setting(PROBLEM, DATA, START).job(MAKE(lr_x=0.1, lr_y=0.1))
    found = budgets.costs_of_rungs(job, [30, 90], "seconds")
    assert found.tolist() == [30 + 5 * 10, 60 + 5 * 10]


@pytest.mark.slow
def test_what_diverges_ends_in_its_rung_and_counts_as_the_worst():
    candidates = [MAKE(lr_x=0.1, lr_y=step) for step in (1e300, 0.1, 0.2, 0.3)]
    shared = {"rounds": 6, "seeds": [0, 1], "rungs": 2, "sampling": ALL_ROWS}
    found = fb.tune(PROBLEM, DATA, START, candidates, **shared)
    assert found.trials[0].value == math.inf and found.trials[0].rounds == 2
    assert found.algorithm in candidates[1:]
    with pytest.raises(NonFiniteError):
        fb.tune(PROBLEM, DATA, START, candidates[:1], **shared)
    with pytest.raises(InvalidInputError, match="at least one candidate"):
        fb.tune(PROBLEM, DATA, START, [], **shared)


def test_an_interrupted_search_goes_on_where_it_was(tmp_path):
    search = Search(MAKE, SPACE, trials=4, sampler="even")
    seen = []

    def tuning(folder=None, resume=False, seeds=(7, 8), stop=False):
        def watch(done, total, newest):
            seen.append(done)
            if stop and done > 2:
                raise KeyboardInterrupt

        kept = None if folder is None else fb.Keeping(folder, resume, every_rounds=1)
        more = {"rungs": 2, "sampling": ALL_ROWS, "keeping": kept, "watch": watch}
        return fb.tune(PROBLEM, DATA, START, search, rounds=6, seeds=seeds, **more)

    folder = tmp_path / "search"
    with pytest.raises(KeyboardInterrupt, match=r"Kept in .*Keeping\("):
        tuning(folder, stop=True)
    with pytest.raises(CheckpointError, match="not empty"):
        tuning(folder)
    seen.clear()
    resumed = tuning(folder, resume=True)
    assert min(seen) > 2  # nothing of the first rung was run again
    seen.clear()
    straight = tuning()
    assert seen == sorted(seen)  # the second rung goes on where the first ended
    assert [t.value for t in resumed.trials] == [t.value for t in straight.trials]
    assert resumed.point == straight.point
    with pytest.raises(CheckpointError, match="another configuration"):
        tuning(folder, resume=True, seeds=(7, 9))


@pytest.mark.slow
def test_a_search_of_several_batches_goes_on_in_the_one_it_was_in(tmp_path):
    search, folder = Search(MAKE, SPACE, trials=4), tmp_path / "search"
    assert search.batches(4) == [2, 1, 1]

    def tuning(stop=False):
        def watch(done, total, newest):
            if stop and len(list(folder.glob("*batch-1*"))):
                raise KeyboardInterrupt

        kept = fb.Keeping(folder, folder.exists(), every_rounds=1) if stop else None
        more = {"sampling": ALL_ROWS, "keeping": kept, "watch": watch}
        return fb.tune(PROBLEM, DATA, START, search, rounds=2, seeds=[7], **more)

    straight = tuning()
    with pytest.raises(KeyboardInterrupt):
        tuning(stop=True)
    first = sorted(folder.glob("*batch-0*/*"))
    written = [path.stat().st_mtime_ns for path in first]
    assert first and not list(folder.glob("*batch-2*"))
    more = {"sampling": ALL_ROWS, "keeping": fb.Keeping(folder, True)}
    resumed = fb.tune(PROBLEM, DATA, START, search, rounds=2, seeds=[7], **more)
    assert [path.stat().st_mtime_ns for path in first] == written
    told = [[(t.point, t.value) for t in one.trials] for one in (straight, resumed)]
    assert told[0] == told[1] and straight.point == resumed.point


def test_a_trial_is_judged_over_its_last_tenth():
    assert looks(90) == [82, 84, 86, 88, 90]
    assert looks(3) == [1, 2, 3] and looks(6, 2) == [3, 4, 5, 6]


def test_later_points_are_neighbors_of_the_best():
    """Of the middle here, a fifth of each range away; then half as far."""
    space = {"a": Range(0.1, 10), "b": Range(0.25, 4)}
    search = Search(MAKE, space)
    assert search.batches(20) == [8, 4, 4, 4] and search.batches(1) == [1]
    first = search.proposed(8, ())

    def told(best):
        return [(p, 1 + math.log(p["a"] / best) ** 2 + p["b"]) for p in first]

    for batch, (low, high) in {1: (0.398, 2.51), 2: (0.631, 1.58)}.items():
        found = {tuple(p.values()) for p in search.proposed(4, told(1.0), batch)}
        centre = search.best(told(1.0))
        b = first[centre]["b"]
        assert (low * first[centre]["a"], b) == pytest.approx(min(found), rel=0.01)
        assert (high * first[centre]["a"], b) == pytest.approx(max(found), rel=0.01)
    # At an end of the ranges there are fewer, and other places take their part.
    edge = [({"a": 0.1, "b": 0.25}, 0.01), *told(1.0)]
    found = search.proposed(4, edge, 1)
    assert {"a": 0.251, "b": 0.25} in found and {"a": 0.1, "b": 0.435} in found
    assert len({tuple(point.values()) for point in found}) == 4


def test_a_lucky_value_among_bad_ones_is_not_believed():
    """What the least value would take is far away; what is right stands in the code."""
    draw = np.random.default_rng(3)
    search = Search(MAKE, {"a": Range(0.01, 1)}, trials=24)
    points = search.proposed(24, ())
    shares = np.asarray([0.5 + math.log10(p["a"]) / 2 + 0.5 for p in points])
    values = np.exp(8 * (shares - 0.3) ** 2 + 0.1 * draw.standard_normal(24))
    lucky = int(np.argmax(shares > 0.8))
    values[lucky] = 0.8 * values.min()
    told = list(zip(points, values.tolist(), strict=True))
    assert int(np.argmin(values)) == lucky
    assert abs(shares[search.best(told)] - 0.3) < 0.15
    # What diverged is never the best, wherever it is.
    near = int(np.argmin(abs(shares - 0.3)))
    told[near] = (points[near], math.inf)
    assert search.best(told) != near


def test_seeds_of_tuning_are_others():
    assert not set(tuning_seeds([0, 1, 2], 2)) & {0, 1, 2}
    assert len(set(tuning_seeds([5], 3))) == 3


def test_points_go_on_by_powers_of_the_golden_ratio():
    golden, plastic = (1 + 5**0.5) / 2, 1.324717957244746
    line = (0.5 + np.arange(9) / golden) % 1
    np.testing.assert_allclose(searching._spread(1, 9)[:, 0], line, atol=1e-12)
    square = (0.5 + np.outer(np.arange(9), [1 / plastic, plastic**-2])) % 1
    np.testing.assert_allclose(searching._spread(2, 9), square, atol=1e-12)


def test_points_are_spread_evenly_the_middle_first():
    space = {"a": Range(0.1, 10), "b": Range(0.25, 4), "c": Range(0.1, 10)}
    points = Search(MAKE, space, sampler="even").proposed(27, ())
    assert points[0] == {"a": 1, "b": 1, "c": 1}
    for name, one in space.items():
        values = np.asarray([point[name] for point in points])
        assert ((one.low <= values) & (values <= one.high)).all()
        share = np.log(values / one.low) / np.log(one.high / one.low)
        counts = np.histogram(share, bins=3, range=(0, 1))[0]
        assert (counts >= 7).all()
        assert all(float(f"{value:.3g}") == value for value in values)
    lists = Search(MAKE, {"a": Values((1, 2)), "b": Values(("x", "y"))}, trials=1)
    assert lists.count == 4
    pairs = [tuple(point.values()) for point in lists.proposed(4, ())]
    assert pairs == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Range(1, 0.5), "from 1 to 0.5"),
        (lambda: Range(0, 1), "numbers above 0"),
        (lambda: Range(1, math.nan), "from 1 to nan"),
        (lambda: Values(()), "there are none"),
        (lambda: Search(MAKE, SPACE, trials=0), "0 trials"),
        (lambda: Search(MAKE, SPACE, sampler="best"), "unknown sampler 'best'"),
        (lambda: Search(MAKE, dict.fromkeys("abc", Values((1,) * 11))), "1331 trials"),
        (lambda: Tuning(rungs=0), "rungs=0"),
    ],
)
def test_searches_that_cannot_be(make, told):
    with pytest.raises(InvalidInputError, match=told):
        make()


def test_optuna_looks_where_earlier_points_were_good():
    pytest.importorskip("optuna")
    space = {"a": Range(0.1, 10), "b": Values(("x", "y"))}
    search = Search(MAKE, space, trials=27, sampler="optuna")
    assert search.batches(27) == [11, 6, 6, 4]
    first = search.proposed(20, ())

    def proposed(best):
        told = [(point, abs(math.log(point["a"] / best))) for point in first]
        told.append(({"a": 1.0, "b": "x"}, math.inf))
        later = search.proposed(20, told)
        assert later == search.proposed(20, told)  # so that a search can be resumed
        return np.mean([math.log(point["a"]) for point in later])

    # The same points, told to be good at either end: it goes where they are.
    assert proposed(0.1) < 0 < proposed(10)


def named(name, given):
    plan = Experiment("quadratic", name, 2)
    entry = algorithms.find(name)
    task = plan.build_task()[0]
    return search_of(plan, entry, task.recommended, task.data.clients, given)


@pytest.mark.parametrize(
    ("name", "given", "searched"),
    [
        ("local-bsgvrm", {}, ["upper_step", "lower_step", "weight"]),
        ("fedbioacc", {}, ["upper_step", "lower_step", "weight"]),
        ("fedbio", {}, ["upper_step", "lower_step"]),
        ("fedavg", {}, ["lower_step"]),
        ("momentum-local-sgd", {}, ["lower_step", "weight"]),
        ("fedbio", {"upper_step": "0.1"}, ["lower_step"]),
        ("fedbio", {"lr_x": "0.1"}, ["lower_step"]),
        ("fedbio", {"lr_x": "0.1..1"}, ["lr_x"]),
        ("fedavg", {"lower_step": "0.1"}, []),
    ],
)
def test_what_is_searched_is_what_a_method_has_and_nobody_has_chosen(
    name, given, searched
):
    search = named(name, given).search(27, "even")
    assert list(search.space if search else {}) == searched


def test_points_become_options_in_the_units_of_the_task():
    recommended = {"upper_step": "0.2", "lower_step": "0.5/L", "upper_weight": "0.5"}
    made = NamedSearch(str, recommended, recommended, {})  # type: ignore[arg-type]
    point = {"upper_step": 0.1, "lower_step": 3.0, "weight": 10.0}
    assert made.options(point) == {
        "upper_step": "0.02",
        "lower_step": "1.5/L",
        "upper_weight": "1",  # of which more makes no sense
    }
    own = {"lower_step": "0.1/L..0.9/L", "theta": "2"}
    asked = replace(made, given=own)
    assert asked.options({"lower_step": 0.3}) == {"theta": "2", "lower_step": "0.3/L"}
    for wrong in ("0.1..0.9/L", "a..1", "1.."):
        with pytest.raises(InvalidInputError, match="write a range as"):
            replace(made, given={"lower_step": wrong}).search(9, "even")


def test_a_range_holds_its_ends_also_as_they_are_rounded():
    recommended = {"lower_step": "0.5/L"}
    made = NamedSearch(str, recommended, recommended, {"lower_step": "0.1/L..0.9/L"})  # type: ignore[arg-type]
    for amount in ("0.1", "0.0995", "0.9", "0.9045"):
        made.require_within({"lower_step": f"{amount}/L"})
    for text in ("0.098/L", "0.92/L", "0.5", "0.5*auto", "x/L"):
        with pytest.raises(InvalidInputError, match="outside of what is tuned"):
            made.require_within({"lower_step": text})


def test_nothing_to_tune_is_told():
    plan = Experiment("quadratic", "fedavg", 2, options={"lower_step": "0.1"})
    with pytest.raises(InvalidInputError, match="nothing to tune: fedavg"):
        tune(plan)
    plan = Experiment("quadratic", "fedavg", 2, options={"lower_steps": "1..2"})
    with pytest.raises(InvalidInputError, match="unknown option 'lower_steps'"):
        tune(plan)


def typed(*words):
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, [*words], catch_exceptions=False)
    return done.exit_code, done.stdout


SMALL = "two-client --algorithm fedbio --local-steps 1 --rounds 3 --tuning-seeds 1"
SMALL += " --set lower_step=0.01,0.2 --rungs 1 --precision float64 --json"


@pytest.mark.slow
def test_the_command_prints_what_to_type_and_goes_on_where_it_was(tmp_path):
    folder = tmp_path / "tuned"
    code, printed = typed("tune", *SMALL.split(), "--out", str(folder))
    told = json.loads(printed)
    assert code == 0 and told == json.loads((folder / "tuned.json").read_text())
    assert told["judged_by"] == "grad_norm_sq" and len(told["trials"]) == 2
    best = min(told["trials"], key=lambda trial: trial["value"])
    assert told["options"] == best["options"]
    assert f"--set lower_step={best['options']['lower_step']}" in told["command"]
    assert 0 not in told["seeds"]
    # The same command finds it all done, another one is refused.
    assert typed("tune", *SMALL.split(), "--out", str(folder)) == (0, printed)
    more = SMALL.replace("--rounds 3", "--rounds 4").split()
    assert typed("tune", *more, "--out", str(folder))[0] == 2


@pytest.mark.slow
def test_a_run_takes_what_tuning_found(tmp_path):
    place = tmp_path / "run"
    code, printed = typed("run", *SMALL.split(), "--tune", "--out", str(place))
    assert code == 0
    told = json.loads((place / "tuning" / "tuned.json").read_text())
    assert Experiment.load(place).options == told["options"]
    taken = json.loads(printed)["config"]["parameters"]["lr_y"]
    assert taken == float(told["options"]["lower_step"])
    assert typed("run", *SMALL.split(), "--tune", "--out", str(place))[0] == 2


def test_the_search_of_the_guide_can_be_made():
    guide = Path(__file__).parent.parent / "docs" / "tuning.md"
    (code,) = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    made = names["search"].first()
    assert (float(made.lr_x), float(made.lr_y)) == pytest.approx((0.1, 0.158))


@pytest.mark.slow
def test_methods_are_tuned_at_one_cost_also_when_a_comparison_goes_on(tmp_path):
    """The dearer one decides, which takes twice as many steps, and not the first."""
    long = partial(fb.FedBiO, lr_z=0.5, local_steps=2)
    searches = {
        "short": Search(MAKE, SPACE, trials=9, sampler="even"),
        "long": Search(long, SPACE, trials=9, sampler="even"),
    }

    def compared(resume=False):
        more = {"sampling": fb.Sampling(batch=1), "rounds": 9, "seeds": [0]}
        kept = fb.Keeping(tmp_path / "kept", resume)
        more |= {"equal": "samples", "keeping": kept}
        return fb.compare(PROBLEM, DATA, START, searches, **more)

    begun = compared()
    # What counts in samples is timed by nobody.
    assert not (tmp_path / "kept" / "timed.json").exists()
    # A trial of the second costs two of the first, so that nine pay for eighteen.
    trials = {name: len(one.trials) for name, one in begun.tuned.items()}
    assert trials == {"short": 18, "long": 9}
    for name, (result,) in begun.results.items():
        spent = result.config["tuning"]
        assert (spent["trials"], spent["unit"]) == (trials[name], "samples")
        assert spent["cost"] == spent["budget"] == begun.tuned["long"].cost
    shutil.rmtree(tmp_path / "kept" / "long")
    again = compared(resume=True).tuned
    for name, one in begun.tuned.items():
        assert [t.value for t in again[name].trials] == [t.value for t in one.trials]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["bytes", "seconds"])
def test_methods_are_tuned_and_ranked_at_equal_bytes_or_seconds(unit, monkeypatch):
    def forecast(job):
        nests = isinstance(job.algorithm.unwrapped(), fb.FedNest)
        return (0.5 if nests else 0.125), 0.0

    monkeypatch.setattr(budgets, "_seconds_of_round", forecast)
    nested = partial(fb.FedNest, beta=0.1, ell=4.0, terms=1, local_steps=1)
    searches = {
        "fedbio": Search(MAKE, SPACE, trials=2, sampler="even"),
        "fednest": Search(nested, {"alpha": Range(0.01, 1)}, trials=2, sampler="even"),
    }
    more = {"sampling": fb.Sampling(batch=1), "rounds": 3, "seeds": [0]}
    found = fb.compare(PROBLEM, DATA, START, searches, equal=unit, **more)
    price = {"fedbio": 0.125 * 3, "fednest": 0.5 * 3}
    if unit == "bytes":
        price = {n: one.columns["bytes"][-1] for n, (one,) in found.results.items()}
    assert price["fednest"] > 1.5 * price["fedbio"]
    # Two trials from two seeds each.
    budget = 2 * 2 * price["fednest"]
    for name, one in found.tuned.items():
        assert len(one.trials) == budget // (2 * price[name])
        spent = found.results[name][0].config["tuning"]
        assert spent["unit"] == unit and spent["budget"] == pytest.approx(budget)
    assert found.equal == unit and f" {unit}," in f"{repr(found).splitlines()[0]},"
