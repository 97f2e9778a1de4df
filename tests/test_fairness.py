"""The task fairness: losses, shares of the groups, and what tuning does to the gap."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import datasets
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.problem import Oracle
from fedbilevel.studies.single import run_job
from fedbilevel.tasks import fairness


def make(*sizes: Any, **options: Any) -> Any:
    """Return the task; its metrics are known to be more than a function."""
    return fairness.make(*sizes, **options)


def rows_for_testing(task):
    """Return features and labels of the tested rows by group, without the padding."""
    held = (task.metrics.features, task.metrics.label)
    return [np.asarray(rows)[:, : task.metrics.size] for rows in held]


def losses(y, features, label):
    score = features @ y
    return np.log1p(np.exp(-np.where(label == 1, score, -score)))


def test_the_losses_are_those_of_the_formula():
    task = make(3, strength=4.0)
    x, y = np.asarray([0.3, -1.1]), np.linspace(-2.0, 3.0, 9)
    oracle = Oracle(task.problem, task.data, 1, None, None)
    panel = {name: np.asarray(rows)[1, 0] for name, rows in task.data.upper.items()}
    people = 250 * 3 // 5 // 3  # of a group in each of three panels: a fifth of them
    assert np.all(panel["size"] == people)
    panel = {name: panel[name][:, :people] for name in ("features", "label")}
    zero, one = losses(y, panel["features"], panel["label"]).mean(axis=1)
    f = (zero + one) / 2 + 4 * (zero - one) ** 2
    found = oracle.upper_loss(jnp.asarray(x), jnp.asarray(y), oracle.all_upper())
    np.testing.assert_allclose(found, f)
    size = int(task.data.lower_sizes[1])
    rows = {name: np.asarray(all)[1, :size] for name, all in task.data.lower.items()}
    weight = 2 * np.exp(x) / np.exp(x).sum()
    each = weight[rows["group"]] * losses(y, rows["features"], rows["label"])
    g = each.mean() + 0.005 * y @ y
    found = oracle.lower_loss(jnp.asarray(x), jnp.asarray(y), oracle.all_lower())
    np.testing.assert_allclose(found, g)


def shares(task):
    sizes = np.asarray(task.data.lower_sizes)
    group = np.asarray(task.data.lower["group"])
    return [group[k, :size].mean() for k, size in enumerate(sizes)]


@pytest.mark.parametrize("data", ["synthetic", "breast_cancer"])
def test_the_minority_is_spread_as_told(data):
    alike = make(3, data=data, minority=0.25)
    np.testing.assert_allclose(shares(alike), 0.25, atol=0.02)
    apart = make(3, data=data, minority=0.25, spread=0.8)
    np.testing.assert_allclose(shares(apart), [0.05, 0.25, 0.45], atol=0.02)
    alone = make(1, data=data, minority=0.25, spread=0.8)
    np.testing.assert_allclose(shares(alone), 0.25, atol=0.02)
    # No row is in two places.
    people = int(apart.data.upper["size"][0, 0, 0])
    rows = np.concatenate(
        [
            np.asarray(apart.data.lower["features"])[k, :size]
            for k, size in enumerate(apart.data.lower_sizes)
        ]
        + [
            np.asarray(features).reshape(-1, features.shape[-1])
            for features in (
                apart.data.upper["features"][..., :people, :],
                rows_for_testing(apart)[0],
            )
        ]
    )
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_groups_have_the_rules_that_are_documented():
    task = make(8)
    features, label = rows_for_testing(task)
    for group, angle in enumerate(np.deg2rad([0, 75])):
        score = features[group, :, :2] @ [np.cos(angle), np.sin(angle)]
        assert np.mean((score > 0) == label[group]) > 0.87


def test_the_metrics_are_those_of_the_groups():
    task = make(2)
    y = np.linspace(-1.0, 1.0, 9)
    found = task.metrics(jnp.zeros(2), jnp.asarray(y))
    features, label = rows_for_testing(task)
    mean = losses(y, features, label).mean(axis=1)
    right = ((features @ y > 0) == (label == 1)).mean(axis=1)
    np.testing.assert_allclose(found["worst_group_loss"], mean.max())
    np.testing.assert_allclose(found["loss_gap"], abs(mean[0] - mean[1]))
    np.testing.assert_allclose(found["accuracy_group_1"], right[1])
    np.testing.assert_allclose(found["accuracy_gap"], abs(right[0] - right[1]))
    # A model that says nothing treats everybody the same.
    assert task.metrics(jnp.zeros(2), jnp.zeros(9))["loss_gap"] == 0


@pytest.mark.slow
def test_tuned_weights_close_most_of_the_gap():
    tuned = Experiment("fairness", rounds=60).run().final
    plain = Experiment("fairness", "fedavg", rounds=60).run().final
    assert tuned["worst_group_loss"] < plain["worst_group_loss"] - 0.05
    assert tuned["accuracy_gap"] < 0.5 * plain["accuracy_gap"]
    assert plain["accuracy_gap"] > 0.2
    assert tuned["weight_group_1"] > 1.3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data": "breast-cancer"}, "Did you mean 'breast_cancer'"),
        ({"strength": -1.0}, "strength=-1.0: it must not be negative"),
        ({"minority": 0.0}, "minority=0.0: the share of group 1"),
        ({"spread": 1.5}, "spread=1.5: choose between 0"),
        ({"clients": 60, "data": "breast_cancer"}, "enough for panels of 56"),
    ],
)
def test_options_that_cannot_be(options, told):
    with pytest.raises(InvalidInputError, match=told):
        make(**options)


def own_table(rows=400, seed=0):
    """Return two groups at a large and a small site, with a class of a quarter."""
    draw = np.random.default_rng(seed)
    label = (draw.random(rows) < 0.25).astype(int)
    group = np.where(draw.random(rows) < 0.3, "few", "many")
    features = draw.normal(size=(rows, 12)) + 1.5 * np.outer(label, np.eye(12)[0])
    site = np.where(np.arange(rows) < 340, "large", "small")
    return datasets.from_arrays(features, label, site=site, group=group)


def own_task(**options):
    return make(data=own_table(), partition="column:site", group="group", **options)


def test_all_validation_rows_of_own_tables_judge():
    task = own_task()
    sizes, sites = task.data.upper["size"][:, 0], task.origin.summary["sites"]
    assert [int(one.sum()) for one in sizes] == [one["validation"] for one in sites]
    assert int(sizes[0].sum()) > 4 * int(sizes[1].sum())
    (told,) = [one for one in task.origin.summary["remarks"] if "judge" in one]
    assert "fewer than 30 rows of a group judge the gap at" in told and "small" in told


def rows_of(features):
    """Return rows as a set, without those of padding."""
    every = np.asarray(features).reshape(-1, features.shape[-1])
    return {row.tobytes() for row in every if row.any()}


@pytest.mark.parametrize("data", ["synthetic", "breast_cancer", "own"])
def test_nobody_judges_what_he_trained_on(data):
    """Panels, training rows and tested rows have none in common."""
    task = own_task() if data == "own" else make(3, data=data)
    upper, lower = task.data.upper["features"], task.data.lower["features"]
    tested = np.concatenate(rows_for_testing(task)[0])
    panels, training = rows_of(upper), rows_of(lower)
    assert panels and training and not panels & training
    assert not rows_of(tested) & (panels | training)


def test_a_gap_by_chance_is_subtracted():
    """The mean over many panels is the squared gap of whole groups."""
    draw = np.random.default_rng(0)
    y = np.asarray([1.0, -0.5])
    features = draw.normal(size=(2, 8000, 2)) + np.asarray([0, 0.4])[:, None, None]
    label = (draw.random((2, 8000)) < 0.4).astype(int)
    means = losses(y, features, label).mean(axis=1)
    true = means.mean() + (means[0] - means[1]) ** 2
    panels = {
        "features": features.reshape(2, 2000, 4, 2).swapaxes(0, 1),
        "label": label.reshape(2, 2000, 4).swapaxes(0, 1),
        "size": np.full((2000, 2), 4, np.int32),
        "strength": np.ones(2000),
    }
    rows = {name: jnp.asarray(one) for name, one in panels.items()}
    found = fairness._Upper(unbiased=True)(jnp.zeros(2), jnp.asarray(y), rows)
    biased = fairness._Upper()(jnp.zeros(2), jnp.asarray(y), rows)
    assert abs(float(found) - true) < 0.02 < 0.1 < float(biased) - true


def test_the_intercept_of_own_tables_is_free():
    task = own_task()
    y = jnp.zeros(13).at[-1].set(2.0)
    oracle = Oracle(task.problem, task.data, 0, None, None)
    at = jnp.zeros(2), y
    size = int(task.data.lower_sizes[0])
    rows = {name: np.asarray(all)[0, :size] for name, all in task.data.lower.items()}
    plain = losses(np.asarray(y), rows["features"], rows["label"]).mean()
    np.testing.assert_allclose(oracle.lower_loss(*at, oracle.all_lower()), plain)


@pytest.mark.slow
def test_no_class_is_given_up_on_a_table_of_many_columns():
    experiment = Experiment(
        "fairness", options={"partition": "column:site", "group": "group"}
    )
    task, values, _ = experiment.build_task(own_table(1200))
    made = experiment.bind(task, values)
    result = run_job(made.job(0), made.rounds, config={})
    features, label = (
        rows.reshape(-1, *rows.shape[2:]) for rows in rows_for_testing(task)
    )
    guess = features @ np.asarray(result.y) > 0
    assert 0.05 < guess.mean() < 0.4
    assert guess[label == 1].mean() > 0.2
