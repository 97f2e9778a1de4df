"""Comparisons: a fair start for all, a ranking that is right, files that stay."""

import json
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import fedbilevel
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.cli.app import app
from fedbilevel.errors import (
    CheckpointError,
    HeterogeneityWarning,
    InvalidInputError,
    NonFiniteError,
)
from fedbilevel.experiments import Experiment, comparison, recommendation
from fedbilevel.experiments.comparison import NamedComparison, compare
from fedbilevel.experiments.recommendation import Advice
from fedbilevel.experiments.tuning import Tuning
from fedbilevel.hypergradient import Neumann, local_inverse_bias
from fedbilevel.problem import Problem
from fedbilevel.report import default_target, draw_curves, ranking
from fedbilevel.report.tables import ranking_table
from fedbilevel.result import Result
from fedbilevel.runtime import SweepRuntime, compilation
from fedbilevel.saved import read_saved
from fedbilevel.standings import equal_cost, t_quantile
from fedbilevel.studies import Comparison
from fedbilevel.studies import comparison as comparison_module
from fedbilevel.studies import seeds as seeds_module
from tests.cases import DX, DY, ROWWISE, quadratic_data

PROGRAM = str(Path(sys.executable).parent / "fedbilevel")
SMALL = Experiment(
    "regularization",
    "fedbio",
    clients=3,
    participants=2,
    rounds=4,
    local_steps=2,
    options={"data": "breast_cancer", "fedbio.lr_x": "0.5"},
    safeguard=False,
)


@pytest.mark.slow
def test_seeds_are_one_program_and_equal_single_runs(monkeypatch):
    before, build = len(compilation._programs), compilation._finished
    # The programs of both are compiled at the same time: each waits for the other.
    both = threading.Barrier(2, timeout=120)
    monkeypatch.setattr(
        compilation, "_finished", lambda *a: (both.wait(), build(*a))[1]
    )
    found = compare(SMALL, ["fedbio", "fedavg"], 3).found
    monkeypatch.undo()
    assert len(compilation._programs) - before == 2
    assert not found.diverged and not found.tuned
    results = found.results
    assert [r.config["seed"] for r in results["fedbio"]] == [0, 1, 2]
    assert results["fedbio"][0].config["parameters"]["lr_x"] == 0.5
    options = {"data": "breast_cancer", "lr_x": "0.5"}
    third = replace(SMALL, seed=2, options=options).run()
    for name, column in third.columns.items():
        np.testing.assert_allclose(
            results["fedbio"][2].columns[name], column, rtol=1e-10
        )


@pytest.mark.parametrize(
    ("names", "options", "told"),
    [
        (["fedbio", "fedbio"], {}, "name each algorithm once"),
        (["fedbio"], {"nothing": "1"}, "unknown option 'nothing'"),
        (["fedbio"], {"fednest.q": "1"}, "unknown algorithm of the option 'fednest'"),
        (["fedbio", "fednest"], {"fedbio.ell": "1"}, "unknown option 'ell'"),
    ],
)
def test_comparisons_that_cannot_be(names, options, told):
    with pytest.raises(InvalidInputError, match=told):
        compare(Experiment("quadratic", rounds=1, options=options), names, 1)


@pytest.mark.slow
def test_what_diverges_does_not_stop_the_others():
    options = {"data": "breast_cancer", "fedbio.lr_y": "1e300"}
    plan = replace(SMALL, options=options)
    found = compare(plan, ["fedbio", "fedavg"], 3).found
    assert list(found.results) == ["fedavg"]
    assert isinstance(found.diverged["fedbio"], NonFiniteError)
    with pytest.raises(NonFiniteError):
        compare(plan, ["fedbio"], 3)


@pytest.mark.slow
def test_every_algorithm_is_tuned_over_its_grid_with_other_seeds():
    lists = {"lower_step": "0.01,1e300,0.5", "fedbio.lr_x": "0.1,0.5"}
    plan = replace(SMALL, options={"data": "breast_cancer", **lists})
    whole = Tuning(rungs=1, seeds=2)
    made = compare(plan, ["fedbio", "fedavg"], 2, tuning=whole)
    trials = {name: [one[1] for one in many] for name, many in made.trials.items()}
    assert [len(values) for values in trials.values()] == [6, 3]
    assert trials["fedavg"][1] == np.inf  # it diverged, and the others went on
    best, _, rounds = min(made.trials["fedbio"], key=lambda trial: trial[1])
    chosen = made.found.results["fedbio"][0].config["parameters"]
    assert chosen["lr_x"] == float(best["lr_x"]) and rounds == 4
    assert not set(made.found.tuned["fedbio"].seeds) & {0, 1}


@pytest.mark.slow
def test_a_stopped_comparison_goes_on_where_it_was(tmp_path):
    folder, names = tmp_path / "comparison", ["fedbio", "fedavg"]
    running = []

    def stop(done, total, newest):
        assert list(newest) == ["upper_loss"]
        if running[-1] == "fedavg" and done >= 2:
            raise KeyboardInterrupt

    kept = {"folder": folder, "about": running.append}
    with pytest.raises(KeyboardInterrupt, match="Kept in"):
        compare(SMALL, names, 2, **kept, watch=stop)
    assert not (folder / "fedavg" / "seed-0").exists()
    # A mark in a finished result shows that it is read, and not computed again.
    mark = replace(Result.load(folder / "fedbio" / "seed-0"), ended="marked")
    mark.save(folder / "fedbio" / "seed-0")
    resumed = compare(SMALL, names, 2, **kept, resume=True).found
    assert resumed.results["fedbio"][0].ended == "marked"
    straight = compare(SMALL, names, 2).found
    for name in names:
        for one, other in zip(
            resumed.results[name], straight.results[name], strict=True
        ):
            assert one.algorithm == other.algorithm == name
            assert one.config == other.config
            for column, values in other.columns.items():
                np.testing.assert_array_equal(one.columns[column], values)


@pytest.mark.slow
def test_a_comparison_goes_on_with_its_own_settings_only(tmp_path):
    folder = tmp_path / "comparison"
    plan = replace(SMALL, options={"data": "breast_cancer"})
    with pytest.raises(CheckpointError, match="no comparison began there"):
        compare(plan, ["fedavg"], 1, folder=folder, resume=True)
    compare(plan, ["fedavg"], 1, folder=folder)
    assert Result.load(folder / "fedavg" / "seed-0").algorithm == "fedavg"
    with pytest.raises(CheckpointError, match="and --resume"):
        compare(plan, ["fedavg"], 1, folder=folder)
    other = replace(plan, rounds=5)
    with pytest.raises(CheckpointError, match="other settings of rounds, seeds"):
        compare(other, ["fedavg"], 2, folder=folder, resume=True)
    more = compare(plan, ["fedavg", "fedprox"], 1, folder=folder, resume=True)
    assert list(more.found.results) == ["fedavg", "fedprox"]


def made_up(name: str, curves: list[list[float]], bytes_per_round: int) -> list[Result]:
    rounds = np.arange(1, 5)
    return [
        Result(
            task="made up",
            algorithm=name,
            config={"seed": seed},
            versions={},
            columns={
                "round": rounds,
                "loss": np.asarray(curve),
                "exchanges": 2 * rounds,
                "bytes": bytes_per_round * rounds,
                "samples": 10 * rounds,
            },
            point={},
            final={},
            counts={},
            seconds={"compile": 0.0, "run": 8.0},
        )
        for seed, curve in enumerate(curves)
    ]


def test_the_ranking_is_by_the_mean_and_tells_the_cost_of_the_target():
    results = {
        "slow": made_up("slow", [[8, 6, 4, 2], [8, 6, 4, 3]], 5),
        "fast": made_up("fast", [[5, 1, 1, 1], [7, 2, 1, 2]], 100),
        "lost": made_up("lost", [[9, 9, 9, np.nan]] * 2, 1),
    }
    first, second, third = ranking(results, "loss", 4.0)
    assert [first.algorithm, second.algorithm, third.algorithm] == [
        "fast",
        "slow",
        "lost",
    ]
    assert (first.mean, first.seeds) == (1.5, 2)
    assert first.spread == pytest.approx(np.std([1, 2], ddof=1))
    assert first.margin is None  # of two seeds
    assert (first.rounds, first.bytes, first.samples, first.seconds) == (2, 200, 20, 4)
    assert (second.rounds, second.bytes, second.seconds) == (3, 15, 6)
    assert third.rounds is None and third.seconds is None
    del results["lost"]
    # The best end is 1.5, the worst beginning 8.
    np.testing.assert_allclose(default_target(results, "loss"), 1.5 + 0.65)
    # Or before the first round, where that was measured.
    many = [replace(one, start={"loss": 21}) for one in results["fast"]]
    np.testing.assert_allclose(default_target({"fast": many}, "loss"), 1.5 + 1.95)


def test_an_interval_is_student_s_and_of_five_seeds_at_least():
    ends = [3.0, 1.0, 4.0, 1.5, 5.0, 2.0]

    def standing(seeds):
        curves = [[9, 9, 9, end] for end in ends[:seeds]]
        return ranking({"one": made_up("one", curves, 1)}, "loss", 9.5)[0]

    assert standing(1).spread is None and standing(1).margin is None
    assert standing(4).spread is not None and standing(4).margin is None
    # The quantiles of printed tables, with 4 and with 5 degrees of freedom.
    for seeds, quantile in ((5, 2.7764), (6, 2.5706)):
        half = quantile * np.std(ends[:seeds], ddof=1) / np.sqrt(seeds)
        assert standing(seeds).margin == pytest.approx(half, rel=5e-4)
    np.testing.assert_allclose(t_quantile(30), 2.0423, rtol=1e-4)
    for seeds, says in ((1, "one seed"), (3, "mean of 3 seeds"), (6, "mean of 6")):
        table = ranking_table([standing(seeds)], "loss", 9.5)
        assert says in str(table.title)
        (cell,) = table.columns[1].cells
        assert ("+-" in str(cell)) == (seeds >= 5)


def test_a_target_that_is_touched_and_left_is_not_reached_there():
    touching = made_up("touching", [[8, 3, 8, 2]], 5)
    leaving = made_up("leaving", [[8, 3, 3, 8]], 5)
    every = {"touching": touching, "leaving": leaving}
    found = {one.algorithm: one for one in ranking(every, "loss", 4.0)}
    assert (found["touching"].rounds, found["touching"].bytes) == (4, 20)
    assert found["leaving"].rounds is None


def test_a_ranking_at_equal_cost_is_not_one_by_rounds():
    many = {
        "dear": made_up("dear", [[8, 4, 2, 1]], 30),
        "cheap": made_up("cheap", [[8, 5, 4, 3]], 10),
        "here": made_up("here", [[8, 7, 7, 6]], 0),
    }
    by_rounds = [one.algorithm for one in ranking(many, "loss", 4.0)]
    assert by_rounds == ["dear", "cheap", "here"]
    # 40 bytes are four rounds of one, and one of the other; the last sends nothing.
    assert equal_cost(many, "bytes") == 40
    found = {one.algorithm: one.mean for one in ranking(many, "loss", 4.0, "bytes")}
    assert found == {"cheap": 3.0, "here": 6.0, "dear": 8.0}
    assert equal_cost(many, "trials") == np.inf
    spent = {"dear": 8.0, "cheap": 4.0, "here": 2.0}
    timed = {n: [replace(many[n][0], seconds={"run": s})] for n, s in spent.items()}
    # Two seconds are one round of the first, two of the second and four of the last.
    assert equal_cost(timed, "seconds") == 2
    found = {one.algorithm: one.mean for one in ranking(timed, "loss", 4.0, "seconds")}
    assert found == {"cheap": 5.0, "here": 6.0, "dear": 8.0}


def test_runs_that_ended_early_count_with_their_last_values():
    early = made_up("early", [[8, 2, 0, 0], [8, 6, 4, 2]], 5)
    short = {name: column[:2] for name, column in early[0].columns.items()}
    results = {"early": [replace(early[0], columns=short), early[1]]}
    (one,) = ranking(results, "loss", 3.0)
    assert one.mean == 2.0
    # The mean over seeds is 8, 4, 3, 2; the first seed sent nothing after round 2.
    assert (one.rounds, one.bytes, one.exchanges) == (3, round((10 + 15) / 2), 5)
    assert draw_curves(results, "loss", 3.0).startswith(b"\x89PNG")


@pytest.mark.slow
def test_compare_saves_results_curves_and_a_ranking(tmp_path):
    folder = tmp_path / "comparison"
    command = "compare two-client --algorithms local-bsgm,fedbio "
    command += "--set local-bsgm.q=5 --seeds 2 --rounds 40 --set noise=0.1 --json --out"
    done = subprocess.run(
        [PROGRAM, *command.split(), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((folder / "comparison.json").read_text())
    names = [one["algorithm"] for one in summary["ranking"]]
    assert sorted(names) == ["fedbio", "local-bsgm"]
    loaded = Result.load(folder / "fedbio" / "seed-1")
    assert loaded.algorithm == "fedbio"
    assert loaded.config["seed"] == 1 and len(loaded.columns["bytes"]) == 40
    assert "2 algorithms compared on" in (folder / "report.html").read_text()
    picture = (folder / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    # One method inverts each client's Hessian, and these clients differ.
    assert "local-bsgm inverts each client's own Hessian" in done.stderr
    assert "33% off" in done.stderr
    unbiased = done.stderr.partition("no such bias: ")[2].partition(".")[0].split(", ")
    assert {"fedbio", "fedbioacc", "fednest", "fednest-sgd"} <= set(unbiased)
    assert not {"local-bsgm", "local-bsgvrm", "lfednest", "fedavg"} & set(unbiased)
    assert "fedbio inverts" not in done.stderr


def numpy_bias(data) -> float:
    share = np.asarray(data.weights) / float(np.sum(data.weights))
    A, C, a = (np.asarray(data.lower[n]).mean(axis=1) for n in ("A", "C", "a"))
    b, r = (np.asarray(data.upper[n]).mean(axis=1) for n in ("b", "r"))
    H, J, low, aim, pull = (np.tensordot(share, one, 1) for one in (A, C, a, b, r))
    x = np.asarray([1.0, 2.0])
    y = -np.linalg.solve(H, J.T @ x + low)
    each = [r[k] * x - C[k] @ np.linalg.solve(A[k], y - b[k]) for k in range(len(A))]
    true = pull * x - J @ np.linalg.solve(H, y - aim)
    return float(np.linalg.norm(share @ each - true) / np.linalg.norm(true))


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 5.0]])
def test_the_bias_of_local_inverses_is_its_formula(weights):
    data = quadratic_data(3, noise=0.0)
    data = replace(data, weights=jax.numpy.asarray(weights))
    start = (jax.numpy.asarray([1.0, 2.0]), jax.numpy.asarray([-1.0, -2.0, -3.0]))
    found = float(local_inverse_bias(ROWWISE, data, *start))
    np.testing.assert_allclose(found, numpy_bias(data), rtol=1e-8)
    assert found > 0.1
    alike = quadratic_data(3, noise=0.0, alike=True)
    assert float(local_inverse_bias(ROWWISE, alike, *start)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "task", "warned"),
    [
        ("local-bsgvrm", "two-client", True),
        ("lfednest", "two-client", True),
        ("fedbioacc", "two-client", False),
        ("fedbioacc-local", "two-client", False),
        ("local-bsgm", "quadratic", False),
    ],
)
def test_a_warning_where_clients_differ(algorithm, task, warned):
    plan = Experiment(task, algorithm, rounds=1, options={"q": "2"} if warned else {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.build().job()
    kinds = [one.category for one in caught]
    assert (HeterogeneityWarning in kinds) == warned


def python_run(algorithm, data, problem=ROWWISE):
    start = (jax.numpy.asarray([1.0, 2.0]), jax.numpy.asarray([-1.0, -2.0, -3.0]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fedbilevel.run(problem, data, start, algorithm, rounds=1)
    told = [one for one in caught if one.category is HeterogeneityWarning]
    # Where the call is, so that a filter by module finds it.
    assert all(one.filename == __file__ for one in told)
    return [str(one.message) for one in told]


LOCAL = LocalBSGM(Neumann(1, 0.3), 0.1, 1.0, 1.0, 0.5, 0.5, local_steps=1)


def test_a_run_in_python_warns_as_the_command_does():
    (told,) = python_run(LOCAL, quadratic_data(3, noise=0.0))
    assert told.startswith("LocalBSGM inverts each client's own Hessian")
    _, others = told.split("that has no such bias: ")
    assert {"fedbio", "fedbio-controls", "fedbioacc"} <= set(others[:-1].split(", "))
    assert python_run(LOCAL, quadratic_data(3, noise=0.0, alike=True)) == []


@pytest.mark.slow
def test_a_command_warns_once():
    plan = Experiment("two-client", "lfednest", rounds=1, options={"q": "2"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.run()
    assert [one.category for one in caught].count(HeterogeneityWarning) == 1


@pytest.mark.slow
def test_without_an_inverse_there_is_no_bias():
    """A lower level that curves downwards somewhere has no inverse to speak of."""
    data = quadratic_data(3, noise=0.0)
    bent = Problem(
        ROWWISE.upper, lambda x, y, rows: ROWWISE.lower(x, y, rows) - 2 * y[0] ** 2
    )
    start = (jax.numpy.asarray([1.0, 2.0]), jax.numpy.asarray([-1.0, -2.0, -3.0]))
    assert np.isnan(float(local_inverse_bias(bent, data, *start)))
    assert python_run(LOCAL, data, bent) == []


def test_without_names_the_recommended_methods_are_compared(monkeypatch):
    asked = []

    def advised(task, situation):
        asked.append((task.task, situation.participants))
        return [Advice(name, "", (), "", "") for name in ("soba", "fedbio")]

    def stopped(experiment, names, seeds, **more):
        asked.append(list(names))
        raise InvalidInputError("stopped here")

    monkeypatch.setattr(recommendation, "recommend", advised)
    monkeypatch.setattr(comparison, "compare", stopped)
    done = CliRunner().invoke(app, ["compare", "two-client", "--participants", "1"])
    assert asked == [("two-client", 1), ["soba", "fedbio"]]
    assert "recommended here: soba, fedbio" in done.output


@pytest.mark.parametrize("equal", ["trials", "samples", "bytes", "seconds"])
def test_a_flag_says_what_is_alike_for_all(equal, monkeypatch):
    asked = []

    def made(experiment, names, seeds, **more):
        asked.append(more["equal"])
        many = {
            "dear": made_up("dear", [[8, 4, 2, 1]], 30),
            "cheap": made_up("cheap", [[8, 5, 4, 3]], 10),
        }
        return NamedComparison(Comparison("loss", many, equal=more["equal"]), {})

    monkeypatch.setattr(comparison, "compare", made)
    flags = ["compare", "two-client", "--algorithms", "soba,fedbio"]
    flags += [] if equal == "trials" else ["--equal", equal]
    done = CliRunner().invoke(app, flags)
    assert asked == [equal] and not done.exception
    at = {"samples": "at 40 samples each", "bytes": "at 40 bytes each"}
    said = {**at, "seconds": "at 8 seconds each", "trials": "after the last round"}
    assert said[equal] in " ".join(done.output.split())
    best = "cheap" if equal == "bytes" else "dear"
    assert done.output.index(best) == min(map(done.output.index, ("cheap", "dear")))
    told = CliRunner().invoke(app, [*flags, "--json"])
    assert json.loads(told.output)["equal"] == equal


@pytest.mark.slow
def test_a_flag_tunes_and_ranks_at_equal_bytes():
    words = (
        "compare two-client --algorithms fedbio,fednest --tune --trials 2 --rounds 2"
    )
    words += " --rounds 2 --seeds 1 --equal bytes --tuning-seeds 1 --json"
    done = CliRunner().invoke(app, words.split())
    told = json.loads(done.output)
    assert told["equal"] == "bytes" and told["equal_cost"] > 0
    assert {one["unit"] for one in told["tuning"].values()} == {"bytes"}
    assert len({one["budget"] for one in told["tuning"].values()}) == 1


def test_a_timed_run_is_warm_and_alone(monkeypatch, tmp_path):
    log, order = [], (3, 1)

    def noted(kind, holder, name):
        function = getattr(holder, name)

        def noting(given, *rest, **more):
            steps = getattr(given, "job", given).algorithm.unwrapped().local_steps
            log.append((kind, steps))
            made = function(given, *rest, **more)
            log.append((f"{kind} ends", steps))
            return made

        monkeypatch.setattr(holder, name, noting)

    noted("compile", comparison_module, "compile_seeds")
    noted("round", SweepRuntime, "advance")
    noted("timed", seeds_module.single, "executed")
    many = {str(p): FedBiO(0.01, 0.02, 0.01, local_steps=p) for p in order}
    start = (np.ones(DX), np.ones(DY))
    found = fedbilevel.compare(
        ROWWISE,
        quadratic_data(2),
        start,
        many,
        rounds=1,
        seeds=(0, 1),
        keeping=fedbilevel.Keeping(tmp_path),
    )
    # All are compiled before one runs, and every one makes a round that is not timed.
    compiled = [entry for entry in log if entry[0].startswith("compile")]
    assert log[:4] == compiled and len(compiled) == 4
    one = ["round", "round ends", "timed", "round", "round ends", "timed ends"]
    assert log[4:] == [(kind, p) for p in order for kind in one]
    for (result, _), steps in zip(found.results.values(), order, strict=True):
        assert result.config["parameters"]["local_steps"] == steps
        assert result.seconds["compile"] > 0
    # Before the first round all are at the same point, on all rows of all clients.
    held = quadratic_data(2)
    sizes = np.asarray(held.upper_sizes)
    each = [
        float(ROWWISE.upper(*start, {n: a[k, :size] for n, a in held.upper.items()}))
        for k, size in enumerate(sizes)
    ]
    kept = fedbilevel.Comparison.load(tmp_path)
    for result in (one for many in kept.results.values() for one in many):
        expected = np.average(each, weights=np.asarray(held.weights))
        np.testing.assert_allclose(result.start["upper_loss"], expected, rtol=1e-6)
        first = {name: column[0] for name, column in result.from_start.items()}
        np.testing.assert_allclose(first["upper_loss"], expected, rtol=1e-6)
        assert (first["round"], first["bytes"], first["samples"]) == (0, 0, 0)
    # What ended reads as finished, though no command wrote a summary.
    saved = read_saved(tmp_path)
    assert not saved.unfinished and saved.headline == "upper_loss"
    (tmp_path / "comparison.json").unlink()
    assert read_saved(tmp_path).unfinished
