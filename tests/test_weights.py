"""What sites count in means: by their rows on data, alike elsewhere, or as chosen."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.errors import CheckpointError, HeterogeneityWarning, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.run_folder import require_extension, run_command
from fedbilevel.experiments.theory import setting_of
from fedbilevel.problem import Oracle

SIZES = {"North": 60, "South": 25, "West": 8}


def table_of(place, sizes=None, seed=0):
    """Write rows of some sites with two columns and two classes."""
    draw = np.random.default_rng(seed)
    lines = ["age,weight,site,ill"]
    for number, (site, count) in enumerate((sizes or SIZES).items()):
        for age, weight, noise in draw.normal(size=(count, 3)):
            ill = "yes" if age + noise > number / 2 else "no"
            lines.append(f"{age:.4f},{weight:.4f},{site},{ill}")
    place.write_text("\n".join(lines) + "\n")
    return place


@pytest.fixture
def own(tmp_path):
    """Return an experiment on a table of three unlike sites."""
    options = {"data": str(table_of(tmp_path / "rows.csv")), "site": "site"}
    return Experiment("regularization", options=options, rounds=2, local_steps=1)


def counted(experiment):
    task, *_ = experiment.build_task()
    sites = task.origin.summary["sites"]
    # Where rows take turns, all of them train and validate.
    rows = [one.get("rows", one["training"] + one["validation"]) for one in sites]
    return np.asarray(task.data.weights).tolist(), rows, task.origin.summary["remarks"]


def test_sites_count_by_their_rows_and_it_is_said(own):
    weights, rows, remarks = counted(own)
    assert weights == rows and len(set(rows)) == 3
    assert f"sites count by their rows: {', '.join(map(str, rows))}" in remarks
    assert counted(replace(own, weights="rows")) == (weights, rows, remarks)


def test_sites_count_alike_if_that_is_chosen_and_by_numbers(own):
    weights, _, remarks = counted(replace(own, weights="equal"))
    assert weights == [1, 1, 1] and "sites count alike" in remarks
    weights, _, remarks = counted(replace(own, weights=(1, 2, 3)))
    assert weights == [1, 2, 3] and "sites count 1, 2, 3" in remarks


def test_the_objective_is_the_mean_over_all_rows(own, tmp_path):
    """But for rounding, where a site is cut for training and validation."""
    table_of(tmp_path / "rows.csv", {"North": 600, "South": 100, "West": 20})
    task, *_ = own.build_task()
    x, y = task.x, task.y + 0.5 * np.asarray([[1.0], [-1.0]])
    sizes, held = np.asarray(task.data.upper_sizes), task.data.upper
    each = [{n: v[k, :size] for n, v in held.items()} for k, size in enumerate(sizes)]
    every = {n: np.concatenate([one[n] for one in each]) for n in held}
    pooled = float(task.problem.upper(x, y, every))

    def value(weights):
        data = replace(own, weights=weights).build_task()[0].data.pooled()
        oracle = Oracle(task.problem, data, 0, None, None)
        return float(oracle.upper_loss(x, y, oracle.all_upper()))

    assert abs(value(None) - pooled) < 0.003
    assert abs(value("equal") - pooled) > 0.03


def test_equal_sites_are_exactly_as_without_weights(tmp_path):
    options = {"partition": "iid", "rows": "400"}  # 80 test, 80 train, 240 validate
    digits = Experiment("regularization", clients=4, options=options)
    weights, rows, remarks = counted(digits)
    assert rows == [80] * 4 and weights == [1] * 4
    assert "sites count by their rows: 80 each" in remarks


@pytest.mark.parametrize(
    "given", [{"clip": 1.0}, {"clip": 1.0, "noise": 1.0}, {"aggregate": "median"}]
)
def test_what_counts_sites_makes_them_count_alike_and_says_so(own, given):
    guarded = replace(own, **given, safeguard=False)
    weights, _, remarks = counted(guarded)
    assert weights == [1, 1, 1]
    assert any(one.startswith("sites count alike: ") for one in remarks)
    with pytest.raises(InvalidInputError, match="weight"):
        replace(guarded, weights="rows").build().job()


def test_a_secure_mean_counts_rows(own):
    weights, rows, _ = counted(replace(own, aggregate="secure"))
    assert weights == rows


@pytest.mark.parametrize("task", ["quadratic", "two-client", "minimax"])
def test_closed_forms_stay_means_over_clients(task):
    made, *_ = Experiment(task).build_task()
    assert set(np.asarray(made.data.weights).tolist()) == {1}
    with pytest.raises(InvalidInputError, match="no rows of a data set"):
        Experiment(task, weights="rows").build_task()


def test_theorems_are_about_clients_that_count_alike():
    options = {"partition": "dirichlet:0.3", "rows": "300"}
    digits = Experiment("regularization", "fedbioacc", options=options)
    assert set(np.asarray(setting_of(digits)(3).data.weights).tolist()) == {1}


def test_a_folder_of_before_has_the_weights_of_its_task(own, tmp_path):
    """Until now experiments were written with no weights, which were equal ones."""
    folder = tmp_path / "run"
    folder.mkdir()
    own.save(folder)
    held = json.loads((folder / "experiment.json").read_text())
    (folder / "experiment.json").write_text(json.dumps({**held, "weights": []}))
    before = Experiment.load(folder)
    assert counted(before)[0] == [1, 1, 1]
    assert "--weights task" in run_command({**held, "weights": []}, "simulator")
    with pytest.raises(CheckpointError, match="weights is task there and None here"):
        require_extension(own, folder)


@pytest.mark.slow
def test_words_on_the_command_line_are_read_and_mistyped_ones_refused():
    words = "run quadratic --clients 2 --rounds 1 --weights".split()
    assert CliRunner().invoke(app, [*words, "equal"]).exit_code == 0
    done = CliRunner().invoke(app, [*words, "alike"])
    assert done.exit_code == 2 and "--weights alike" in done.output
    with pytest.raises(InvalidInputError, match="unknown value of weights"):
        Experiment("quadratic", weights="alike")


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "fedmbo"},
        {"algorithm": "fedbio", "participants": 2},
        {"algorithm": "br-fedbim"},
        {"algorithm": "fedbio", "aggregate": "median"},
    ],
)
def test_who_loses_weights_warns(given):
    unlike = Experiment("quadratic", clients=3, weights=(1, 2, 3), **given)
    with pytest.warns(HeterogeneityWarning, match="clients count 1 to 3, but"):
        unlike.build().job()
    replace(unlike, weights=(1, 1.05, 1)).build().job()  # nearly alike
