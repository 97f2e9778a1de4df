"""The estimators: what they find, and that they keep scikit-learn's contract."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from sklearn import base
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, log_loss
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

from fedbilevel import datasets
from fedbilevel.datasets.preparation import ClassLabel
from fedbilevel.errors import InvalidInputError
from fedbilevel.sklearn import (
    FederatedClassifier,
    FederatedCleaner,
    FederatedRegularizer,
    FederatedReweighter,
    FederatedRidge,
    _rows,
)
from fedbilevel.sklearn._base import _place
from fedbilevel.tasks import cleaning
from fedbilevel.tasks._labeled import MeanLoss, improbabilities

EVERY = (
    FederatedRegularizer,
    FederatedRidge,
    FederatedClassifier,
    FederatedCleaner,
    FederatedReweighter,
)
SMALL: dict[str, Any] = {"rounds": 20, "local_steps": 5, "batch": 16, "random_state": 0}


def clone(made: Any) -> Any:
    return base.clone(made)


def blobs(rows: int = 90, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two clouds, as words, and three sites that hold a third of each."""
    draw = np.random.default_rng(seed)
    side = np.arange(rows) % 2
    X = draw.normal(size=(rows, 3)) + 3 * np.outer(side, [1, -1, 0])
    sites = np.asarray(["north", "east", "south"])[np.arange(rows) // 2 % 3]
    return X, np.asarray(["ill", "well"])[side], sites


def planted(X: Any, y: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Give a fifth of the rows the other of two labels; return labels and marks."""
    draw = np.random.default_rng(seed)
    wrong = np.zeros(len(y), bool)
    wrong[draw.permutation(len(y))[: round(0.2 * len(y))]] = True
    first, second = np.unique(y)
    return np.where(wrong, np.where(y == first, second, first), y), wrong


def share_found(cleaner: FederatedCleaner, wrong: np.ndarray) -> float:
    """Return the share of the wrong rows among the first quarter of the suspicious."""
    first = cleaner.suspicious_[: round(0.25 * len(wrong))]
    return wrong[first].sum() / wrong.sum()


@pytest.mark.slow
def test_wrong_labels_are_found_though_judges_err_too():
    X, y, sites = blobs(120)
    given, wrong = planted(X, y, 1)
    cleaner = FederatedCleaner(rounds=60, random_state=0)
    found = cleaner.fit(X, given, sites)
    assert share_found(found, wrong) >= 0.9
    # Every row has the chance that its label is right.
    assert found.weights_.shape == (120,) and len(found.results_) == 4
    assert sorted(found.suspicious_) == list(range(120))
    assert np.all(np.diff(found.weights_[found.suspicious_]) >= 0)
    assert np.mean(found.predict(X) == y) > 0.95
    assert list(found.sites_) == ["east", "north", "south"]
    assert found.cleaned_ and found.costs_["cleaned"] < found.costs_["uncleaned"]
    np.testing.assert_array_equal(found.weights_, found.noise_.right)
    # What is kept with the result predicts the same.
    saved = found.result_.model
    assert saved is not None
    np.testing.assert_allclose(found.predict_proba(X), saved.probabilities(X))


@pytest.mark.slow
def test_a_rare_class_keeps_its_rows_and_its_predictions():
    draw = np.random.default_rng(0)
    rare = draw.random(900) < 0.08
    X = draw.normal(size=(900, 4)) + 3.2 * np.outer(rare, [1, 0, 0, 0])
    wrong = draw.random(900) < 0.06
    found = FederatedCleaner(random_state=0, rounds=60)
    found.fit(X, rare ^ wrong, np.arange(900) % 3)
    assert np.mean(found.predict(X)[rare]) > 0.6
    assert average_precision_score(wrong, -found.weights_) > 0.9
    # Rows of the rare class that are right weigh more than wrong ones of any.
    assert np.median(found.weights_[rare & ~wrong]) > 0.6
    assert np.median(found.weights_[wrong]) < 0.2


@pytest.mark.slow
def test_where_no_label_is_wrong_the_uncleaned_model_is_kept_and_that_is_said():
    X, y, sites = blobs(240, seed=3)
    X = X - 2.3 * np.outer(y == "well", [1, -1, 0])  # classes overlap
    with pytest.warns(UserWarning, match="The latter is kept"):
        found = FederatedCleaner(rounds=20, random_state=0).fit(X, y, sites)
    assert not found.cleaned_
    assert len(np.unique(found.predict(X))) == 2


@pytest.mark.slow
def test_trusted_rows_judge_and_are_not_suspicious():
    X, y, sites = blobs(120)
    given, wrong = planted(X, y, 2)
    trusted = ~wrong & (np.arange(120) % 5 == 0)
    cleaner = FederatedCleaner(rounds=60, random_state=0)
    found = cleaner.fit(X, given, sites, trusted=trusted)
    assert share_found(found, wrong) >= 0.8 and len(found.results_) == 1
    assert np.all(found.weights_[trusted] == 1)
    with pytest.raises(InvalidInputError, match="Give True or False for each"):
        cleaner.fit(X, given, sites, trusted=np.flatnonzero(trusted))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 5))],
)
def test_nine_of_ten_wrong_labels_of_a_table_are_in_the_first_quarter(seed):
    X, y = map(np.asarray, load_breast_cancer(return_X_y=True))
    given, wrong = planted(X, y, seed)
    sites = np.random.default_rng(seed).integers(0, 3, len(y))
    found = FederatedCleaner(random_state=seed).fit(X, given, sites)
    assert share_found(found, wrong) >= 0.9


@pytest.mark.slow
def test_wrong_labels_do_not_mislead_the_judge():
    """By the formula of symmetric losses, with all labels of every row averaged."""
    draw = np.random.default_rng(0)
    scores, label = draw.normal(size=(5, 4)), draw.integers(0, 4, 5)
    judge = MeanLoss(lambda x, y, features: features, improbabilities)
    rows = {"features": jnp.asarray(scores), "label": jnp.asarray(label)}
    odds = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    right = np.mean(1 - odds[np.arange(5), label])
    np.testing.assert_allclose(judge(None, None, rows), right, rtol=1e-12)
    others = [{**rows, "label": jnp.asarray((label + k) % 4)} for k in (1, 2, 3)]
    wrong = np.mean([judge(None, None, one) for one in others])
    share = 0.3
    mixed = (1 - share) * right + share * wrong
    np.testing.assert_allclose(mixed, (1 - share * 4 / 3) * right + share, rtol=1e-12)


@pytest.mark.slow
def test_strengths_tell_noise_from_signal():
    draw = np.random.default_rng(0)
    X = draw.normal(size=(60, 8))
    target = 10 + 4 * X[:, 0] + 0.5 * draw.normal(size=60)
    sites = np.arange(60) % 2
    found = FederatedRidge(random_state=0, rounds=100).fit(X, target, sites)
    assert found.score(X, target) > 0.9
    assert found.strengths_.shape == (8,)
    assert np.argmin(found.strengths_) == 0
    # Predictions by hand, from the run's own numbers.
    scaled = (X - X.mean(axis=0)) / X.std(axis=0) / np.sqrt(8)
    W = np.asarray(found.result_.y)[-1, 0]
    told = target.mean() + target.std() * (scaled @ W[:-1] + W[-1])
    np.testing.assert_allclose(found.predict(X), told, rtol=1e-6)
    x = found.result_.x
    np.testing.assert_allclose(
        found.strengths_, np.exp(x["common"] + x["own"]), rtol=1e-6
    )


@pytest.mark.slow
def test_rare_classes_are_not_given_up():
    draw = np.random.default_rng(0)
    rare = np.arange(200) % 20 == 0
    X = draw.normal(size=(200, 2)) + 1.2 * np.outer(rare, [1, 1])
    sites = np.arange(200) // 20 % 2
    tuned = FederatedReweighter(random_state=0).fit(X, rare, sites)
    plain = LogisticRegression().fit(X, rare)
    recall = [np.mean(one.predict(X)[rare]) for one in (plain, tuned)]
    assert recall[0] < 0.4 and recall[1] > recall[0] + 0.3
    assert tuned.scales_.shape == tuned.shifts_.shape == (2,)
    assert list(tuned.classes_) == [False, True]


@pytest.mark.slow
def test_groups_get_weights_and_the_smaller_one_more():
    draw = np.random.default_rng(0)
    minority = np.arange(200) % 5 == 0
    X = draw.normal(size=(200, 2))
    label = np.where(minority, X[:, 1], X[:, 0]) > 0
    groups = np.where(minority, "few", "many")
    found = FederatedReweighter(random_state=0)
    found.fit(X, label, np.arange(200) // 5 % 2, groups=groups)
    assert list(found.groups_) == ["few", "many"]
    assert found.group_weights_[0] > 1.1
    np.testing.assert_allclose(found.group_weights_.sum(), 2)
    right = found.predict(X) == label
    assert right[minority].mean() > 0.6 and right[~minority].mean() > 0.6


@pytest.mark.slow
def test_hidden_layers_see_what_a_line_cannot():
    draw = np.random.default_rng(0)
    X = draw.normal(size=(160, 2))
    label = X[:, 0] * X[:, 1] > 0
    network = FederatedClassifier(random_state=0, clients=2).fit(X, label)
    assert network.score(X, label) > 0.85


def test_an_estimator_is_used_like_any_other():
    X, y, sites = blobs()
    made = FederatedRegularizer(**SMALL)
    scores = cross_val_score(made, X, y, cv=3, params={"sites": sites})
    assert scores.min() > 0.9


@pytest.mark.slow
def test_columns_of_a_frame_keep_their_names():
    X, y, sites = blobs()
    made = FederatedRegularizer(**SMALL)
    frame = pandas.DataFrame(X, columns=["age", "pulse", "noise"])
    fitted = clone(made).fit(frame, y, pandas.Series(sites))
    assert list(fitted.feature_names_in_) == ["age", "pulse", "noise"]
    assert fitted.result_.model.preparation.feature_names == ("age", "pulse", "noise")
    again = clone(made).fit(X, y, sites)
    # A frame keeps columns together, not rows: its sums round otherwise.
    plain, framed = again.predict_proba(X), fitted.predict_proba(frame)
    np.testing.assert_allclose(plain, framed, rtol=1e-12)


def test_judges_are_a_share_of_every_site_and_class():
    def rows_of(sites, label):
        draw = np.random.default_rng(0)
        kind = ClassLabel("label", ())
        return _rows.Table(np.zeros((3, 1)), kind, label, {"site": sites}, draw)

    sites = np.repeat(["a", "b"], [40, 8])
    label = np.concatenate([np.repeat([0, 1], [30, 10]), np.repeat([0, 1], [4, 4])])
    table = rows_of(sites, label)
    marks = table.judges(0.25)
    counts = [np.sum(marks & (sites == s) & (label == c)) for s in "ab" for c in (0, 1)]
    assert sum(counts[:2]) == 10 and sum(counts[2:]) == 2
    assert counts[0] in (7, 8) and counts[2:] == [1, 1]
    part = table.folds(sites, 4)
    for number in range(4):
        inside = [np.sum((part == number) & (sites == s)) for s in "ab"]
        assert inside == [10, 2]
    with pytest.raises(InvalidInputError, match="'lone' has 1 sample"):
        rows_of(np.asarray(["a", "a", "lone"]), np.zeros(3)).judges(0.5)


def test_marked_rows_judge_and_all_others_train():
    X, y, sites = blobs(30)
    marks = np.arange(30) % 5 == 3
    data = replace(datasets.from_arrays(X, y, site=sites), validation=marks)
    task = cleaning.make(data=data, partition="column:site")
    assert task.origin is not None
    trained = np.concatenate(task.origin.places)
    assert sorted(trained) == list(np.flatnonzero(~marks))
    for site, places in zip(task.names, task.origin.places, strict=True):
        assert set(sites[places]) == {site}
    np.testing.assert_array_equal(
        task.data.upper_sizes, [np.sum(marks & (sites == one)) for one in task.names]
    )
    with pytest.raises(InvalidInputError, match="'validation' has shape"):
        replace(data, validation=marks[1:])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"clients": 2}, "clients=2, but `sites` names 3"),
        ({"options": {"train": 0.5}}, "options: 'train' is decided by what `fit`"),
        ({"options": {"upper_stp": 1}}, "unknown option 'upper_stp'"),
        ({"algorithm": "sgd"}, "unknown algorithm 'sgd'"),
        ({"folds": 1}, "folds=1: choose from 2 to the"),
    ],
)
def test_mistakes_are_told(options, told):
    X, y, sites = blobs()
    with pytest.raises(InvalidInputError, match=re.escape(told)):
        FederatedRegularizer(**{**SMALL, **options}).fit(X, y, sites)


def test_labels_of_one_class_are_told():
    X, y, sites = blobs()
    with pytest.raises(InvalidInputError, match="all labels are of one class, 'b'"):
        FederatedRegularizer(**SMALL).fit(X, np.full(len(y), "b"), sites)


def test_a_number_that_does_not_vary_has_a_spread_of_one():
    label, numbers = FederatedRidge()._label(np.full(4, 2.5))
    assert (label.center, label.spread) == (2.5, 1.0) and not numbers.any()


@pytest.mark.parametrize(("clients", "sizes"), [(None, [7]), (3, [3, 2, 2])])
def test_rows_without_sites_are_dealt_to_as_many_as_are_asked_for(clients, sizes):
    dealt = _rows.dealt(None, clients, 7, np.random.default_rng(0))
    names, counts = np.unique(dealt, return_counts=True)
    assert names[0] == "site 0" and counts.tolist() == sizes


def test_a_site_that_nothing_was_fitted_to_has_no_place():
    names = np.asarray(["north", "south"])
    assert [_place(names, one) for one in ("south", "west", "north")] == [1, -1, 0]


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_missing_sites_are_told(missing):
    X, y, sites = blobs()
    holes: Any = np.asarray([missing, *sites[1:]], object)
    with pytest.raises(InvalidInputError, match="sites: that of row 0 is missing"):
        FederatedRegularizer(**SMALL).fit(X, y, holes)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        FederatedRegularizer(**SMALL).fit(X, y, sites[1:])


@pytest.mark.slow
def test_the_guide_works_as_it_stands(capsys):
    guide = Path(__file__).parent.parent / "docs" / "scikit-learn.md"
    (code,) = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    exec(code, {})
    found, accuracy = map(float, capsys.readouterr().out.split())
    assert found >= 0.9 and accuracy > 0.9


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_contract_of_scikit_learn_is_kept():
    # The others differ from this one by their task, and compile for minutes. Skipped is
    # what scikit-learn itself cannot check here, such as other arrays.
    check_estimator(FederatedRegularizer(random_state=0), on_skip=None)


@pytest.mark.slow
def test_an_estimator_says_how_good_it_is():
    draw = np.random.default_rng(0)
    X = draw.normal(size=(400, 3))
    y = np.where(X[:, 0] + draw.normal(size=400) > 0, "yes", "no")
    sites = draw.choice(["a", "b"], size=400)
    training = X[:300], y[:300], sites[:300]
    made = FederatedRegularizer(rounds=3, random_state=0).fit(*training)
    found = made.quality(X[300:], y[300:], sites[300:], training=training)
    shared = found["models"][0]["metrics"]
    expected = log_loss(y[300:], made.predict_proba(X[300:]))
    np.testing.assert_allclose(shared["log_loss"][0], expected)
    kinds = [one["kind"] for one in found["models"]]
    assert kinds == ["shared", "base_rate", "alone", "alone", "untuned"]
    assert [one["name"] for one in found["sites"]] == ["a", "b"]
    assert "on 100 held-out rows" in found["sentence"]
    pooled = made.quality(X[300:], y[300:], training=training[:2])
    assert [one["kind"] for one in pooled["models"]] == [
        *("shared", "base_rate", "untuned")
    ]
    with pytest.raises(InvalidInputError, match="'maybe' is none of those"):
        made.quality(X[:1], ["maybe"], training=training)
