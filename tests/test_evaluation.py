"""Metrics are scikit-learn's, intervals cover, and baselines are what one would fit."""

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sklearn import datasets, linear_model, metrics

from fedbilevel.evaluation import Judged, Rows, Site, linear, quality
from fedbilevel.evaluation.assessment import figure, with_interval
from fedbilevel.evaluation.linear import (
    base_rate,
    fit_classes,
    fit_numbers,
    standardized,
)
from fedbilevel.evaluation.metrics import Judgment, calibration
from fedbilevel.report import quality_tables


def known(found: dict[str, Any]) -> dict[str, Any]:
    """Return metrics of which none is missing."""
    assert None not in found.values()
    return found


def predictions(rows: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return labels, and chances that have many ties."""
    draw = np.random.default_rng(classes)
    label = draw.integers(classes, size=rows)
    scores = np.round(draw.normal(size=(rows, classes)), 1) + np.eye(classes)[label]
    return label, np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_of_classes_are_those_of_scikit_learn(classes):
    label, chances = predictions(500, classes)
    found = Judgment(Rows(label, classes), [chances]).metrics(0)
    guess, member = chances.argmax(axis=1), np.eye(classes)[label]
    shown = chances[:, 1] if classes == 2 else chances
    squares = ((chances - member) ** 2).sum(axis=1).mean()
    expected = {
        "log_loss": metrics.log_loss(label, chances),
        "auc": metrics.roc_auc_score(label, shown, multi_class="ovr"),
        "balanced_accuracy": metrics.balanced_accuracy_score(label, guess),
        "accuracy": metrics.accuracy_score(label, guess),
        "brier_score": squares / 2 if classes == 2 else squares,
    }
    assert found.keys() == expected.keys()
    for name, (value, low, high) in known(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-12)
        assert low < value < high


def test_metrics_of_numbers_are_those_of_scikit_learn():
    draw = np.random.default_rng(0)
    label = 5000 + draw.normal(size=300)
    predicted = label + 0.5 * draw.normal(size=300)
    found = Judgment(Rows(label, 0), [predicted]).metrics(0)
    expected = {
        "root_mean_squared_error": metrics.root_mean_squared_error(label, predicted),
        "mean_absolute_error": metrics.mean_absolute_error(label, predicted),
        "r2": metrics.r2_score(label, predicted),
    }
    assert found.keys() == expected.keys()
    for name, (value, low, high) in known(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9)
        assert low < value < high


def test_an_interval_is_that_of_the_central_limit():
    label, chances = predictions(2000, 2)
    rows = Rows(label, 2)
    value, low, high = known(Judgment(rows, [chances]).metrics(0))["log_loss"]
    wide = 1.96 * rows.losses(chances).std() / 2000**0.5
    np.testing.assert_allclose([value - low, high - value], wide, rtol=0.15)


def test_a_paired_difference_is_surer_than_two_intervals():
    label, chances = predictions(400, 2)
    better = 0.9 * chances + 0.1 * np.eye(2)[label]
    judged = Judgment(Rows(label, 2), [chances, better])
    value, low, high = judged.difference(0, 1)
    ours, theirs = (known(judged.metrics(k))["log_loss"] for k in (0, 1))
    np.testing.assert_allclose(value, ours[0] - theirs[0])
    assert 0 < low < value < high
    assert ours[1] < theirs[2]  # which alone would say nothing


def test_an_area_needs_rows_of_both_classes():
    chances = np.asarray([[0.4, 0.6], [0.7, 0.3]])
    assert Judgment(Rows(np.zeros(2, int), 2), [chances]).metrics(0)["auc"] is None
    same = np.full((2, 2), 0.5)
    judged = Judgment(Rows(np.asarray([0, 1]), 2), [same])
    assert known(judged.metrics(0))["auc"][0] == 0.5


def test_a_calibration_curve_counts_every_row_once():
    draw = np.random.default_rng(0)
    chance = draw.random(20_000)
    label = (draw.random(20_000) < chance).astype(int)
    bins = calibration(Rows(label, 2), np.stack([1 - chance, chance], 1), 1)
    assert [one["rows"] for one in bins] == [2000] * 10
    for one in bins:
        low, high = one["interval"]
        assert low < one["observed"] < high
        assert abs(one["observed"] - one["predicted"]) < 0.04
    few = calibration(Rows(np.asarray([0, 1, 1]), 2), np.full((3, 2), 0.5), 1)
    assert [(one["rows"], one["observed"]) for one in few] == [(3, 2 / 3)]


@pytest.mark.parametrize("load", [datasets.load_breast_cancer, datasets.load_wine])
def test_classes_are_fitted_as_by_scikit_learn(load):
    features, label = load(return_X_y=True)
    made = fit_classes(features, label, label.max() + 1, 0.5)
    theirs = linear_model.LogisticRegression(C=0.5, tol=1e-10, max_iter=10_000)
    scaled = standardized(features)(features)
    expected = theirs.fit(scaled, label).predict_proba(scaled)
    np.testing.assert_allclose(made(features), expected, atol=1e-5)


def test_numbers_are_fitted_as_by_scikit_learn():
    table: Any = datasets.load_diabetes(return_X_y=True)
    features, label = table
    scaled = standardized(features)(features)
    expected = linear_model.Ridge(3.0).fit(scaled, label).predict(scaled)
    np.testing.assert_allclose(fit_numbers(features, label, 3.0)(features), expected)


def test_a_fit_that_begins_near_enough_takes_no_step():
    draw = np.random.default_rng(0)
    rows, codes = draw.normal(size=(50, 2)), draw.integers(0, 2, 50)
    loss = linear._Objective(rows, codes, 2, 0.1)
    near = linear._newton(loss) + 1e-5
    found = linear._newton(loss, near, tolerance=1e-3)
    assert (found == near).all()


def test_the_strength_is_chosen_on_other_rows():
    draw = np.random.default_rng(0)
    features, test = draw.normal(size=(120, 60)), draw.normal(size=(2000, 60))
    label, asked = ((one[:, 0] > 0).astype(int) for one in (features, test))
    noisy = np.where(draw.random(120) < 0.2, 1 - label, label)
    losses = [
        metrics.log_loss(asked, fit_classes(features, noisy, 2, inverse)(test))
        for inverse in (None, 1e4)
    ]
    assert losses[0] < 0.7 * losses[1]
    number = features[:, 0] + draw.normal(size=120)
    errors = [
        np.mean((fit_numbers(features, number, alpha)(test) - test[:, 0]) ** 2)
        for alpha in (None, 1e-3)
    ]
    assert errors[0] < 0.7 * errors[1]


def test_a_class_that_a_site_never_saw_has_a_chance():
    draw = np.random.default_rng(0)
    features, label = draw.normal(size=(40, 3)), draw.integers(2, size=40)
    found = fit_classes(features, label, 3)(features)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    np.testing.assert_allclose(found[:, 2], base_rate(label, 3)[2])


def table(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(rows, 4))
    chance = 1 / (1 + np.exp(-2 * features[:, 0] + 1))
    return features, (draw.random(rows) < chance).astype(int)


def site(name: str, rows: int, seed: int) -> Site:
    features, label = table(rows, seed)
    return Site(name, label, lambda: features)


SITES = [site("South", 40, 1), site("North", 400, 2), site("Islet", 6, 3)]


def asked(predicted: np.ndarray | None = None, **changes) -> Judged:
    features, label = table(300, 9)
    if predicted is None:
        chance = 1 / (1 + np.exp(-2 * features[:, 0] + 1))
        predicted = np.stack([1 - chance, chance], axis=1)
    made = Judged(Rows(label, 2), predicted, ("no", "yes"), features, None, (200, 100))
    return replace(made, **changes)


def test_a_good_model_is_held_against_what_else_there_is():
    found = quality(asked(), SITES)
    names = [one["name"] for one in found["models"]]
    alone = ["North alone", "South alone", "Islet alone"]
    assert names == ["shared model", "base rate", *alone, "all sites, untuned (FedAvg)"]
    losses = [one["metrics"]["log_loss"][0] for one in found["models"]]
    assert losses[0] < losses[2] < losses[3] and losses[5] < losses[1]
    assert found["models"][4]["note"] == "its own base rate, for it has 6 rows only"
    assert found["sites"] == [] and found["warnings"] == []
    said = found["sentence"]
    ours, base, north = (figure(losses[k], losses[0]) for k in (0, 1, 2))
    assert said.startswith(f"Log loss {ours} (") and "on 300 held-out rows" in said
    assert f"The base rate has {base}; North alone, the largest site, {north}" in said
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_every_site_is_judged_on_its_own_rows():
    belongs = np.arange(300) % 3
    given = asked(site=belongs)
    found = quality(given, SITES)["sites"]
    assert [(one["name"], one["rows"]) for one in found] == [
        ("South", 100),
        ("North", 100),
        ("Islet", 100),
    ]
    places = belongs == 1
    expected = metrics.log_loss(given.rows.label[places], given.predicted[places])
    np.testing.assert_allclose(found[1]["metrics"]["shared"]["log_loss"][0], expected)
    assert all(one["difference"][0] < 0 for one in found)


def test_a_site_that_is_worse_off_is_named():
    given = asked(site=np.arange(300) % 3)
    wrong = np.where((given.site == 1)[:, None], 0.5, given.predicted)
    found = quality(replace(given, predicted=wrong), SITES)["warnings"]
    assert found[-1] == "worse off with the shared model than alone: North"


def test_one_class_for_every_row_is_reported():
    chance = 0.4 * asked().predicted[:, 1]
    found = quality(asked(np.stack([1 - chance, chance], 1)), SITES)["warnings"]
    assert found[0].startswith("the model predicts 'no' for every row, and its prob")
    assert "an AUC of 0.8" in found[0]
    same = quality(asked(np.tile([0.7, 0.3], (300, 1))), SITES)["warnings"]
    assert "do not rank rows better than chance" in same[0]
    worse = "worse than that of North alone, the largest site, by more than chance"
    assert any(worse in one for one in same)


def test_a_model_worse_than_an_untuned_one_is_reported():
    told = "its log loss is worse than that of all sites, untuned (FedAvg), by more"
    flat = 0.5 + 0.2 * (asked().predicted - 0.5)
    assert any(told in one for one in quality(asked(flat), SITES)["warnings"])
    assert not any("untuned" in one for one in quality(asked(), SITES)["warnings"])


def test_figures_are_whole_on_a_narrow_terminal():
    long = [replace(SITES[0], name="The hospital of the southern islands"), *SITES[1:]]
    found = quality(asked(site=np.arange(300) % 3), long)
    console = Console(width=80, record=True, file=io.StringIO())
    for table in quality_tables(found):
        console.print(table)
    text = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for one in found["models"]:
        for name in ("auc", "balanced_accuracy", "brier_score"):
            assert f" {figure(one['metrics'][name][0])} " in text


def test_a_model_worse_than_the_base_rate_is_reported():
    upside_down = asked().predicted[:, ::-1]
    found = quality(asked(upside_down), SITES)["warnings"]
    assert "the model is worse than the base rate: do not use it" in found


def test_few_validation_rows_are_reported():
    few = quality(asked(validation=(20, 10)), SITES)["warnings"]
    assert few == ["few rows validate, 30 in all: what was tuned is uncertain"]
    (rare,) = quality(asked(validation=(500, 29)), SITES)["warnings"]
    assert rare.startswith("few rows of the class 'yes' validate, 29 in all")
    assert quality(asked(validation=(500, 30)), SITES)["warnings"] == []


def test_without_features_there_is_the_base_rate_only():
    found = quality(asked(features=None), SITES)
    assert [one["kind"] for one in found["models"]] == ["shared", "base_rate"]
    assert "alone" not in found["sentence"]


def test_numbers_are_held_against_their_mean():
    features, _ = table(200)
    label = 100 + 10 * features[:, 0] + np.random.default_rng(1).normal(size=200)
    sites = [Site("one", label[100:], lambda: features[100:])]
    rows = Rows(label[:100], 0)
    given = Judged(rows, label[:100] + 1, (), features[:100], None, (60,))
    found = quality(given, sites)
    assert [one["kind"] for one in found["models"]] == [
        "shared",
        "base_rate",
        "untuned",
    ]
    assert found["sentence"].startswith("Root mean squared error 1.00 (1.00 to 1.00)")
    assert "The mean of the training rows has 9." in found["sentence"]
    assert found["calibration"] is None
    told = "root mean squared error is worse than that of all sites, untuned (FedAvg)"
    assert found["warnings"] == [f"its {told}, by more than chance explains"]


def test_figures_have_the_digits_of_the_first():
    assert with_interval((0.191, 0.18, 0.203)) == "0.191 (0.180 to 0.203)"
    assert with_interval((53.21, 49.0, 57.123)) == "53.2 (49.0 to 57.1)"
    assert with_interval((12345.6, 9000.0, 15000.0)) == "12,346 (9,000 to 15,000)"
    assert figure(0.0) == "0.000"
