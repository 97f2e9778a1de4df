"""A run on a table says how good its model is, site by site, and from which rows."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from typer.testing import CliRunner

from fedbilevel import datasets
from fedbilevel.cli.app import app
from fedbilevel.datasets import TableChoices
from fedbilevel.evaluation import is_linear_cheap
from fedbilevel.evaluation.linear import standardized
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.built import _asked, model_quality, site_rows
from fedbilevel.models import Model
from fedbilevel.problem import ClientData
from fedbilevel.result import Result
from fedbilevel.tasks import Task

NAMES = np.asarray(["North", "South", "East"])


def write_table(path: Path, *, numbers: bool = False) -> Path:
    """Write 300 rows at three sites, of 50, 30 and 20 percent."""
    draw = np.random.default_rng(0)
    features = draw.normal(size=(300, 3))
    score = 2 * features[:, 0] - 1
    ill = np.where(draw.random(300) < 1 / (1 + np.exp(-score)), "yes", "no")
    label = np.round(50 + 10 * score, 2) if numbers else ill
    site = NAMES[draw.choice(3, size=300, p=[0.5, 0.3, 0.2])]
    sex = draw.choice(["f", "m"], size=300)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "sex", "site", "ill"])
        for row in zip(*features.T, sex, site, label, strict=True):
            writer.writerow(row)
    return path


def cut(table: Path) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return the columns, and which rows are for the sites and which test."""
    with table.open() as file:
        header, *rows = csv.reader(file)
    every = dict(zip(header, map(np.asarray, zip(*rows, strict=True)), strict=True))
    columns = {n: c.astype(float) if n in "abc" else c for n, c in every.items()}
    order = np.random.default_rng(0).permutation(300)
    return columns, order[60:], order[:60]


def model_of(result: Result) -> Model:
    assert result.model is not None
    return result.model


def experiment(table: Path, task: str = "regularization", **options: str) -> Experiment:
    given = {"data": str(table), "label": "ill", "site": "site", **options}
    return Experiment(task, rounds=3, options=given)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, Result]:
    """Return a table, and the result of a run on it, which is kept beside."""
    folder = tmp_path_factory.mktemp("ran")
    table = write_table(folder / "people.csv")
    return table, experiment(table).run(folder / "run")


def test_a_run_judges_its_model_on_the_tested_rows(ran):
    table, result = ran
    found = result.quality
    ours = found["models"][0]["metrics"]
    np.testing.assert_allclose(ours["log_loss"][0], result.final["test_loss"], 1e-5)
    assert ours["accuracy"][0] == pytest.approx(result.final["test_accuracy"])
    assert found["rows"] == 60 == sum(one["rows"] for one in found["sites"])
    assert [one["name"] for one in found["sites"]] == ["East", "North", "South"]
    assert sum(one["held"] for one in found["sites"]) == 240
    assert result.events[-len(found["warnings"]) :] == found["warnings"]
    assert (table.parent / "run" / "quality.json").exists()
    # Site by site the rows are those that the column says.
    columns, _, tested = cut(table)
    chances = model_of(result).probabilities(columns)
    ill = (columns["ill"] == "yes").astype(int)
    for one in found["sites"]:
        rows = tested[columns["site"][tested] == one["name"]]
        expected = log_loss(ill[rows], chances[rows], labels=[0, 1])
        value = one["metrics"]["shared"]["log_loss"][0]
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_fedavg_is_a_regression_on_the_rows_of_all_sites(ran):
    table, result = ran
    columns, trained, tested = cut(table)
    features = model_of(result).features(columns)
    ill, scale = columns["ill"] == "yes", standardized(features[trained])
    theirs = LogisticRegression(tol=1e-10).fit(scale(features[trained]), ill[trained])
    chances = theirs.predict_proba(scale(features[tested]))
    (found,) = (one for one in result.quality["models"] if one["kind"] == "untuned")
    expected = log_loss(ill[tested], chances)
    np.testing.assert_allclose(found["metrics"]["log_loss"][0], expected, rtol=1e-5)


@pytest.mark.slow
def test_a_number_is_judged_in_its_own_units(tmp_path):
    table = write_table(tmp_path / "people.csv", numbers=True)
    result = experiment(table).run()
    shared, base, *_ = result.quality["models"]
    expected = result.final["test_root_mean_squared_error"]
    found = shared["metrics"]["root_mean_squared_error"][0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert 15 < base["metrics"]["root_mean_squared_error"][0] < 25
    assert "The mean of the training rows has" in result.quality["sentence"]


@pytest.mark.slow
def test_every_task_on_a_table_is_judged(tmp_path):
    table = write_table(tmp_path / "people.csv")
    for task, options in (("cleaning", {}), ("fairness", {"group": "sex"})):
        result = experiment(table, task, **options).run()
        assert result.quality["rows"] == 60
        alone = [one for one in result.quality["models"] if one["kind"] == "alone"]
        assert len(alone) == 3


def rows_of(task: Task) -> int:
    return sum(len(site_rows(task, k)[1]) for k in range(task.data.clients))


def test_rows_that_train_and_validate_count_once(tmp_path):
    task, *_ = experiment(write_table(tmp_path / "people.csv")).build_task()
    assert rows_of(task) == 240
    data = task.data
    sizes = np.asarray(data.lower_sizes)
    lower = [
        {name: np.asarray(one[k][: sizes[k]]) for name, one in data.lower.items()}
        for k in range(data.clients)
    ]
    both = replace(task, data=ClientData.from_clients(lower, lower))
    assert rows_of(both) == sizes.sum()


def test_rows_that_validate_do_not_test(ran):
    table, result = ran
    data = datasets.load(str(table), choices=TableChoices(label="ill"))
    marked = replace(data, validation=np.arange(300) % 3 == 0)
    task, *_ = Experiment("regularization", clients=2).build_task(marked)
    assert task.tested is None and model_quality(task, result.model) == {}
    task, *_ = experiment(table).build_task()
    assert model_quality(task, result.model)["rows"] == 60
    assert model_quality(task, None) == {}


@pytest.mark.slow
def test_images_have_the_base_rate_only(tmp_path):
    draw, label = np.random.default_rng(0), np.arange(60) % 3
    images = draw.integers(256, size=(60, 15, 15), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", features=images, label=label)
    options = {"data": str(tmp_path / "images.npz")}
    result = Experiment("representation", clients=2, rounds=1, options=options).run()
    found = result.quality
    assert [one["kind"] for one in found["models"]] == ["shared", "base_rate"]
    ours = found["models"][0]["metrics"]["log_loss"][0]
    np.testing.assert_allclose(ours, result.final["test_loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_site_alone_has_rows_on_the_scale_of_those_that_test():
    """The task keeps rows at length 1 and appends a constant."""
    made = Experiment("regularization", clients=3, rounds=1)
    found = _asked(made.build_task()[0], model_of(made.run()))
    assert found is not None
    asked, sites = found
    assert asked.features is not None
    rows = np.concatenate([one.features() for one in sites])
    assert rows.shape[1] == asked.features.shape[1] == 64  # pixels of digits
    np.testing.assert_allclose(rows.std(), asked.features.std(), rtol=0.05)


@pytest.mark.parametrize(
    ("columns", "classes", "cheap"), [(200, 20, True), (201, 2, False), (2, 21, False)]
)
def test_models_of_single_sites_are_fitted_where_that_is_cheap(columns, classes, cheap):
    assert is_linear_cheap(columns, classes) is cheap


@pytest.mark.slow
def test_many_seeds_are_not_judged():
    (result,) = Experiment("regularization", rounds=1).run_seeds(1)
    assert result.quality == {}


def test_the_first_line_says_how_good_it_is(tmp_path):
    table = write_table(tmp_path / "people.csv")
    words = f"run regularization --data {table} --label ill --site site --rounds 2"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    first = " ".join(done.stdout.split())
    assert first.startswith("Log loss 0.") and "60 held-out rows" in first
    assert "North alone" in first and "East" in first


def test_a_model_that_predicts_at_random_has_an_area_of_one_half(ran):
    # The labels of tested rows are theirs: shuffled ones are not predicted.
    table, result = ran
    task, *_ = experiment(table).build_task()
    assert task.tested is not None
    mixed = np.random.default_rng(1).permutation(task.tested.label)
    tested = replace(task.tested, label=mixed)
    found = model_quality(replace(task, tested=tested), result.model)
    low, high = found["models"][0]["metrics"]["auc"][1:]
    assert low < 0.5 < high


@pytest.mark.slow
def test_networks_that_shrink_images_are_judged_on_the_images(tmp_path):
    draw, label = np.random.default_rng(0), np.arange(60) % 2
    images = draw.integers(256, size=(60, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", features=images, label=label)
    options = {"data": str(tmp_path / "images.npz")}
    result = Experiment("architecture", clients=2, rounds=1, options=options).run()
    kinds = [one["kind"] for one in result.quality["models"]]
    assert kinds == ["shared", "base_rate"] and result.quality["rows"] == 12
