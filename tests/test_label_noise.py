"""Rates of wrong labels, and the chance that a label is right, by closed forms."""

import numpy as np
import pytest

from fedbilevel.sklearn import _refit
from fedbilevel.tasks._noise import label_noise


def drawn(rates, sites, seed=0, rare=0.3, sharp=3.0):
    """Draw true probabilities, true labels and given ones: rates[site][true]."""
    draw = np.random.default_rng(seed)
    score = sharp * draw.normal(size=len(sites)) + np.log(rare / (1 - rare))
    p = 1 / (1 + np.exp(-score))
    true = (draw.random(len(sites)) < p).astype(int)
    wrong = draw.random(len(sites)) < np.asarray(rates)[sites, true]
    return np.stack([1 - p, p], axis=1), np.where(wrong, 1 - true, true), wrong


def chance(p, given, rates, sites):
    """Return P(label is right) by Bayes, with the true rates."""
    stay = 1 - np.asarray(rates)[sites, given]
    come = np.asarray(rates)[sites, 1 - given]
    rows = np.arange(len(given))
    right, other = stay * p[rows, given], come * p[rows, 1 - given]
    return right / (right + other)


@pytest.mark.parametrize(
    ("rates", "kind"),
    [
        ([[0.2, 0.2]] * 3, "one rate"),
        ([[0.02, 0.3]] * 3, "a rate by class"),
        ([[0.01, 0.01], [0.3, 0.3], [0.01, 0.01]], "for each site, one rate"),
        ([[0, 0.3], [0.3, 0], [0, 0]], "for each site, a rate by class"),
    ],
)
def test_rates_are_those_that_labels_were_drawn_by(rates, kind):
    sites = np.arange(6000) % 3
    p, given, _ = drawn(rates, sites)
    found = label_noise(p, given, sites)
    assert found.kind == kind
    places = range(3) if "site" in kind else [0]
    for place in places:
        wrong = 1 - np.diag(found.rates[place])
        np.testing.assert_allclose(wrong, rates[place], atol=0.05)
    exact = chance(p, given, rates, sites)
    assert np.abs(found.right - exact).mean() < 0.02


def test_a_rare_class_is_not_suspicious_for_being_rare():
    # Nothing is wrong, and the class is never the likelier one for most of its rows.
    sites = np.zeros(4000, int)
    p, given, _ = drawn([[0, 0]], sites, rare=0.05, sharp=1.0)
    assert np.mean(p[given == 1, 1] > 0.5) < 0.1
    found = label_noise(p, given, sites)
    assert found.right[given == 1].mean() > 0.9


def test_cautious_probabilities_do_not_hide_wrong_labels():
    sites = np.zeros(4000, int)
    p, given, _ = drawn([[0.2, 0.2]], sites)
    flat = p**0.4 / (p**0.4).sum(axis=1, keepdims=True)
    for corrected, low, high in ((True, 0.17, 0.23), (False, 0, 0.12)):
        found = label_noise(flat, given, sites, corrected=corrected)
        assert low < 1 - found.right.mean() < high


def table(wrong_share, seed=0, rows=600, rare=0.3):
    draw = np.random.default_rng(seed)
    true = (draw.random(rows) < rare).astype(int)
    features = draw.normal(size=(rows, 4)) + 2 * np.outer(true, [1, -1, 0, 0])
    wrong = draw.random(rows) < wrong_share
    part, site = np.arange(rows) % 4, np.arange(rows) // 4 % 3
    given = np.where(wrong, 1 - true, true)
    return _refit.Rows(features, given, part, site, np.zeros(rows, bool)), true, wrong


def test_the_cleaned_model_is_kept_where_labels_are_wrong_and_the_other_where_not():
    rows, true, wrong = table(0.2)
    base = np.full((len(true), 2), 0.5)
    found = _refit.refitted(rows, base)
    assert found.is_cleaned and found.costs["cleaned"] < found.costs["uncleaned"]
    assert (
        found.noise.right[wrong].mean() < 0.3 < 0.9 < found.noise.right[~wrong].mean()
    )
    sure = found.layer(rows.features)
    assert np.mean(np.argmax(sure, axis=1) == true) > 0.93
    sound, _, _ = table(0.0)
    plain = _refit.refitted(sound, base)
    assert not plain.is_cleaned


@pytest.mark.slow
def test_a_run_that_gave_a_class_up_does_not_decide():
    rows, true, _ = table(0.06, rare=0.08, rows=1500)
    collapsed = np.tile([0.999, 0.001], (len(true), 1))
    found = _refit.refitted(rows, collapsed)
    assert np.all(found.bounds == 1)
    guess = np.argmax(found.layer(rows.features), axis=1)
    assert np.mean(guess[true == 1]) > 0.4


def test_trusted_labels_are_right_and_judge():
    rows, true, wrong = table(0.3)
    marks = ~wrong & (np.arange(len(true)) % 3 == 0)
    found = _refit.refitted(rows._replace(trusted=marks), np.full((len(true), 2), 0.5))
    assert np.all(found.noise.right[marks] == 1)
    assert found.is_cleaned


@pytest.mark.slow
def test_a_class_of_one_row_is_never_predicted_from_folds_without_it():
    rows, _, _ = table(0.1)
    label = np.where(np.arange(len(rows.label)) == 7, 2, rows.label)
    found = _refit.refitted(rows._replace(label=label), np.full((len(label), 3), 1 / 3))
    assert found.layer.weight.shape == (3, 4)
    assert np.all(np.isfinite(found.noise.right))


def test_a_class_that_is_never_the_likeliest_is_predicted_as_often_as_it_occurs():
    draw = np.random.default_rng(0)
    rare = 0.02 + 0.1 * draw.random(2000)
    label = (draw.random(2000) < rare).astype(int)
    p = np.stack([1 - rare, rare], axis=1)
    bounds = _refit._bounds(p, label, np.ones(2000))
    guess = np.argmax(p / bounds, axis=1)
    assert abs(guess.mean() - label.mean()) < 0.002
    assert np.all(rare[guess == 1].min() >= rare[guess == 0].max())
    # Three classes, of which the rare one is given up.
    three = np.stack([0.55 - rare / 2, 0.45 - rare / 2, rare], axis=1)
    codes = np.where(label == 1, 2, np.arange(2000) % 2)
    guess = np.argmax(three / _refit._bounds(three, codes, np.ones(2000)), axis=1)
    assert len(np.unique(guess)) == 3
