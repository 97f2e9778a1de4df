r"""How often labels are wrong, and the chance that a given label is right.

A model says p_j(a), the probability of class j for a row a. Of rows of class j a share
T_jl is given the label l. Then a row with label l is right with probability

    T_ll p_l(a)^b / sum_j T_jl p_j(a)^b,

and that is what makes a row suspicious. A low p_l alone does not: it is low for every
row of a rare class, also at sites where no label is wrong. T has one rate for all rows,
or one for every site, for every pair of classes, or for both. Each is fitted by
expectation and maximization (Dawid and Skene 1979; Patrini et al. 2017, arXiv
1609.03683) to probabilities of rows that the model did not see; the Bayesian
information criterion chooses. The power b corrects probabilities that are too cautious,
as those of a strongly penalized model are: they explain wrong labels away.
"""

from typing import NamedTuple

import numpy as np

# Before a row is seen: every tenth label is wrong, whatever its class. The rate of a
# site is worth so many rows, those of a class so many.
_RATE, _ROWS_OF_SITE, _ROWS_OF_CLASS = 0.1, 20.0, 10.0
_LARGEST_RATE = 0.5  # most labels are right
_ITERATIONS = 50
_POWERS = (0.2, 10.0)
_LEAST = 1e-6


class LabelNoise(NamedTuple):
    """Facts about wrong labels.

    `right` has for every row the chance that its label is right. `rates` are the shares
    T by place, class and given label, with one place for each site, or one for all.
    `losses` has for every row -log sum_j T_jl p_j, and its part of the criterion's
    price of the rates.
    """

    right: np.ndarray
    rates: np.ndarray
    kind: str
    losses: np.ndarray


def label_noise(
    probabilities: np.ndarray,
    label: np.ndarray,
    sites: np.ndarray,
    *,
    corrected: bool = True,
) -> LabelNoise:
    """Estimate how often labels are wrong, of probabilities by row and class.

    `sites` has a number for each row. Without `corrected` the probabilities are taken
    as they are, b = 1: so compared, a model pays for what it is too sure of.
    """
    logs = np.log(np.maximum(probabilities, _LEAST))
    _, place = np.unique(sites, return_inverse=True)
    everywhere = np.zeros_like(place)
    fits = [
        _fitted(logs, label, where, name + kind, by_class, corrected)
        for where, name in ((everywhere, ""), (place, "for each site, "))
        for by_class, kind in ((False, "one rate"), (True, "a rate by class"))
    ]
    return min(fits, key=lambda one: one.losses.mean())


def _fitted(
    logs: np.ndarray,
    label: np.ndarray,
    place: np.ndarray,
    kind: str,
    by_class: bool,
    corrected: bool,
) -> LabelNoise:
    rows, classes = logs.shape
    places = int(place.max()) + 1
    rates, power = np.stack([_even(_RATE, classes)] * places), 1.0
    for _ in range(_ITERATIONS):
        p = _powered(logs, power)
        share = p * rates[place, :, label]
        share /= share.sum(axis=1, keepdims=True)
        counts = np.zeros_like(rates)
        np.add.at(counts.swapaxes(1, 2), (place, label), share)
        rates = _rates(counts, by_class)
        if corrected:
            power = _next_power(power, logs, p, share)
    joint = _powered(logs, power) * rates[place, :, label]
    total = joint.sum(axis=1)
    free = places * (classes * (classes - 1) if by_class else 1)
    losses = free * np.log(rows) / (2 * rows) - np.log(total)
    right = joint[np.arange(rows), label] / total
    return LabelNoise(right, rates, kind, losses)


def _even(rate: float, classes: int) -> np.ndarray:
    """Return the shares of labels where any other class is as likely as another."""
    other = rate / (classes - 1)
    return np.full((classes, classes), other) + (1 - rate - other) * np.eye(classes)


def _rates(counts: np.ndarray, by_class: bool) -> np.ndarray:
    """Return the shares that rows, counted by place, class and label, speak for."""
    rows = counts.sum(axis=(1, 2))
    wrong = rows - np.trace(counts, axis1=1, axis2=2)
    rate = (wrong + _RATE * _ROWS_OF_SITE) / (rows + _ROWS_OF_SITE)
    even = [_even(one, counts.shape[1]) for one in np.minimum(rate, _LARGEST_RATE)]
    if not by_class:
        return np.stack(even)
    shares = counts + _ROWS_OF_CLASS * np.stack(even)
    return shares / shares.sum(axis=2, keepdims=True)


def _powered(logs: np.ndarray, power: float) -> np.ndarray:
    p = np.exp(power * (logs - logs.max(axis=1, keepdims=True)))
    return p / p.sum(axis=1, keepdims=True)


def _next_power(
    power: float, logs: np.ndarray, p: np.ndarray, share: np.ndarray
) -> float:
    """Take a step of Newton's method; 1 is worth as many rows as a site's rate."""
    mean = np.sum(p * logs, axis=1)
    slope = np.sum(share * logs) - np.sum(mean) - _ROWS_OF_SITE / 2 * (power - 1)
    bend = np.sum(p * logs**2) - np.sum(mean**2) + _ROWS_OF_SITE / 2
    return float(np.clip(power + slope / bend, *_POWERS))
