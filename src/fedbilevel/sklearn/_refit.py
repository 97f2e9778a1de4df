"""Logistic regression on rows weighted by the chance that their labels are right.

The minimized sum is over the rows of all sites, so that the size of a site does not
decide; the intercept is free. It is compared with the same on all rows alike.
"""

from typing import NamedTuple

import numpy as np
from sklearn.linear_model import LogisticRegression

from fedbilevel.models import Dense
from fedbilevel.models.model import softmax
from fedbilevel.tasks._noise import LabelNoise, label_noise

_INVERSE_STRENGTHS = (0.01, 0.1, 1.0, 10.0)
# After one time the rates fit the cleaned model; a second time changes little.
_TIMES = 2
_ABSENT = -30.0  # the score of a class without a row
_LEAST = 1e-12
_GAIN = 0.01
_GIVEN_UP = 0.1  # of the rows of a class, fewer are predicted to be


class Rows(NamedTuple):
    """Scaled features with their labels, the fold, the site and the trust of each."""

    features: np.ndarray
    label: np.ndarray
    part: np.ndarray
    site: np.ndarray
    trusted: np.ndarray

    def noise(self, p: np.ndarray) -> LabelNoise:
        """Return how often labels are wrong, and which, if these are probabilities."""
        doubted = ~self.trusted
        found = label_noise(p[doubted], self.label[doubted], self.site[doubted])
        right = np.ones(len(self.label))
        right[doubted] = found.right
        return found._replace(right=right)

    def losses(self, p: np.ndarray) -> np.ndarray:
        """Judge probabilities by trusted labels, or by all that may be wrong."""
        if not self.trusted.any():
            return label_noise(p, self.label, self.site, corrected=False).losses
        where = np.flatnonzero(self.trusted)
        return -np.log(np.maximum(p[where, self.label[where]], _LEAST))


class Judged(NamedTuple):
    """Predictions for each fold by a model of the other rows, at the best strength.

    `losses` are those of the given labels, as far as neither the model nor wrong labels
    explain them. `layer` is fitted to all rows.
    """

    p: np.ndarray
    losses: np.ndarray
    layer: Dense

    @property
    def classes(self) -> int:
        """The number of classes that are predicted for any row."""
        return len(np.unique(np.argmax(self.p, axis=1)))


class Refitted(NamedTuple):
    """The better model of two, what each costs, and which labels it doubts.

    A row is of the class whose probability is the largest part of its `bounds`.
    """

    noise: LabelNoise
    layer: Dense
    is_cleaned: bool
    costs: dict[str, float]
    bounds: np.ndarray


def refitted(rows: Rows, p: np.ndarray) -> Refitted:
    """Fit again to weighted rows, from probabilities of a run for rows in doubt."""
    plain = _judged(rows, np.ones(len(rows.label)))
    if not rows.trusted.any() and rows.losses(p).mean() > plain.losses.mean():
        p = plain.p  # the run gave a class up, or has not come far
    cleaned = plain
    for _ in range(_TIMES):
        cleaned = _judged(rows, rows.noise(p).right)
        p = cleaned.p
    gained = plain.losses - cleaned.losses
    # By more than a standard error, and than weights gain that saw the same labels.
    least = max(gained.std() / len(gained) ** 0.5, _GAIN * plain.losses.mean())
    is_better = bool(gained.mean() > least) and cleaned.classes >= plain.classes
    kept = cleaned if is_better else plain
    both = {"cleaned": cleaned, "uncleaned": plain}
    costs = {name: float(one.losses.mean()) for name, one in both.items()}
    noise = rows.noise(kept.p)
    bounds = _bounds(kept.p, rows.label, noise.right)
    return Refitted(noise, kept.layer, is_better, costs, bounds)


def _bounds(p: np.ndarray, label: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return what probabilities are compared with: 1, unless a class is given up.

    The likeliest class of every row may be the same, where another is rare and like it.
    Then every class is predicted about as often as right labels have it.
    """
    classes = p.shape[1]
    share = np.bincount(label, right, classes) / right.sum()
    guessed = np.bincount(np.argmax(p, axis=1), minlength=classes) / len(p)
    if np.all(guessed >= _GIVEN_UP * share):
        return np.ones(classes)
    quantiles = [np.quantile(p[:, j], 1 - share[j]) for j in range(classes)]
    return np.maximum(quantiles, _LEAST)


def _judged(rows: Rows, weights: np.ndarray) -> Judged:
    """Predict each fold by the others, with the strength that costs the least."""
    tried = []
    for inverse in _INVERSE_STRENGTHS:
        p = np.zeros((len(rows.label), int(rows.label.max()) + 1))
        for number in np.unique(rows.part):
            inside = rows.part == number
            layer = _regression(rows, weights, inverse, ~inside)
            p[inside] = softmax(layer(rows.features[inside]))
        tried.append((rows.losses(p), inverse, p))
    losses, inverse, p = min(tried, key=lambda one: one[0].mean())
    every = np.ones(len(rows.label), bool)
    return Judged(p, losses, _regression(rows, weights, inverse, every))


def _regression(
    rows: Rows, weights: np.ndarray, inverse_strength: float, chosen: np.ndarray
) -> Dense:
    """Fit to the chosen rows; a class without one is never predicted."""
    label, classes = rows.label[chosen], int(rows.label.max()) + 1
    W, b = np.zeros((classes, rows.features.shape[1])), np.full(classes, _ABSENT)
    present = np.unique(label)
    if len(present) == 1:
        b[present] = 0
        return Dense(W, b)
    made = LogisticRegression(C=inverse_strength, max_iter=1000, tol=1e-3)
    made.fit(rows.features[chosen], label, sample_weight=weights[chosen])
    two = len(present) == 2
    W[present] = np.vstack([0 * made.coef_, made.coef_]) if two else made.coef_
    b[present] = np.append(0, made.intercept_) if two else made.intercept_
    return Dense(W, b)
