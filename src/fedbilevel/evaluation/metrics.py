"""Metrics of predictions on held-out rows, with bootstrap intervals.

A metric is computed for many weights of the rows at once: ones give its value, and how
often each resample drew a row gives the interval.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_RESAMPLES, _FEWEST = 1000, 200
_MOST_CELLS = 40_000_000  # rows times resamples times classes; beyond, fewer resamples
_AT_ONCE = 500_000  # cells of weights in memory
_SMALLEST = 1e-15  # a chance below it counts as this one
_LEVELS = (2.5, 97.5)  # of a 95 % interval, in percent
_BINS = 10
_LOSS = "mean loss"  # of rows, which is no metric of its own

Values = dict[str, np.ndarray]  # by metric, one for every column of weights
Metrics = dict[str, list[float] | None]  # value, low and high; None is undefined


@dataclass(frozen=True)
class Rows:
    """The labels of rows: codes of so many `classes`, or numbers where that is 0."""

    label: np.ndarray
    classes: int

    def __len__(self) -> int:
        return len(self.label)

    def some(self, places: np.ndarray) -> "Rows":
        """Return some of the rows."""
        return Rows(self.label[places], self.classes)

    @property
    def headline(self) -> str:
        """The metric that models are compared by; lower is better."""
        return "log_loss" if self.classes else "root_mean_squared_error"

    def losses(self, predicted: np.ndarray) -> np.ndarray:
        """Return the loss of each row; the headline is the mean, or its root."""
        if not self.classes:
            return (predicted - self.label) ** 2
        chances = predicted[np.arange(len(self)), self.label]
        return -np.log(np.maximum(chances, _SMALLEST))

    def columns(self, predicted: np.ndarray) -> np.ndarray:
        """Return values of each row whose means make the metrics, losses first."""
        losses = self.losses(predicted)
        if not self.classes:
            return np.stack([losses, np.abs(predicted - self.label)])
        member = np.eye(self.classes)[self.label]
        right = member * (np.argmax(predicted, axis=1) == self.label)[:, None]
        squares = ((predicted - member) ** 2).sum(axis=1)
        # Of two classes that of one: the usual definition.
        return np.stack([losses, squares / (1 + (self.classes == 2)), *right.T])

    @property
    def common(self) -> np.ndarray:
        """Inputs of the metrics other than predictions."""
        if self.classes:
            return np.eye(self.classes)[:, self.label]
        # Around the mean, so that single precision holds the spread.
        apart = self.label - self.label.mean()
        return np.stack([apart**2, apart])


class Judgment:
    """The metrics of what several models predict, each from the same resamples."""

    def __init__(self, rows: Rows, models: Sequence[np.ndarray]) -> None:
        # In one product: many small ones would wait for each other's threads.
        columns = np.stack([rows.columns(one) for one in models])
        flat = np.concatenate([rows.common, columns.reshape(-1, len(rows))])

        def values(weights: np.ndarray) -> list[Values]:
            means = flat.astype(weights.dtype) @ weights / len(rows)
            common, own = np.split(means, [len(rows.common)])
            return [
                _of_classes(common, found, _auc(rows, one, weights))
                if rows.classes
                else _of_numbers(common, found)
                for one, found in zip(models, np.split(own, len(models)), strict=True)
            ]

        self._whole = values(np.ones((len(rows), 1)))
        parts = [values(weights) for weights in _weights(rows)]
        self._some = [
            {name: np.concatenate([part[k][name] for part in parts]) for name in whole}
            for k, whole in enumerate(self._whole)
        ]

    def metrics(self, model: int) -> Metrics:
        """Return every metric of a model with its interval."""
        whole, some = self._whole[model], self._some[model]
        return {
            name: _with_interval(float(value[0]), some[name])
            for name, value in whole.items()
            if name != _LOSS
        }

    def difference(self, ours: int, theirs: int) -> list[float]:
        """Return how much larger our mean loss is, with the interval of paired rows."""
        value = float(self._whole[ours][_LOSS][0] - self._whole[theirs][_LOSS][0])
        some = self._some[ours][_LOSS] - self._some[theirs][_LOSS]
        low, high = np.percentile(some, _LEVELS)
        return [value, float(low), float(high)]


def calibration(rows: Rows, predicted: np.ndarray, shown: int | None) -> list[Any]:
    """Return tenths of the rows by what was predicted: that, and what was observed.

    `shown` is the class; without one the chances of all classes are taken together.
    """
    member = np.eye(rows.classes)[rows.label]
    chances, seen = (
        (one if shown is None else one[:, shown]).ravel() for one in (predicted, member)
    )
    order = np.argsort(chances, kind="stable")
    edges = np.unique(np.quantile(chances, np.arange(1, _BINS) / _BINS))
    cuts = np.searchsorted(chances[order], edges, side="right")
    return [
        {
            "predicted": float(chances[part].mean()),
            "observed": float(seen[part].mean()),
            "interval": _wilson(float(seen[part].mean()), len(part)),
            "rows": len(part),
        }
        for part in np.split(order, cuts)
        if len(part)
    ]


def _wilson(share: float, rows: int) -> list[float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    z = 1.959964
    middle = (share + z**2 / (2 * rows)) / (1 + z**2 / rows)
    wide = z * np.sqrt(share * (1 - share) / rows + z**2 / (4 * rows**2))
    wide = float(wide) / (1 + z**2 / rows)
    return [max(middle - wide, 0.0), min(middle + wide, 1.0)]


def _weights(rows: Rows) -> Iterator[np.ndarray]:
    """Return how often resamples drew each row, some resamples at a time."""
    count, draw = len(rows), np.random.default_rng(0)
    most = _MOST_CELLS // (count * max(rows.classes, 1))
    left = min(max(most, _FEWEST), _RESAMPLES)
    while left > 0:
        some = min(left, max(_AT_ONCE // count, 1))
        drawn = draw.integers(count, size=(count, some)) * some + np.arange(some)
        counts = np.bincount(drawn.ravel(), minlength=count * some)
        yield counts.reshape(count, some).astype(np.float32)
        left -= some


def _with_interval(value: float, resampled: np.ndarray) -> list[float] | None:
    """Return a value with its interval; None where the rows do not define it."""
    if not np.isfinite(value):
        return None
    low, high = np.nanpercentile(resampled, _LEVELS)
    return [value, float(low), float(high)]


def _of_classes(sizes: np.ndarray, means: np.ndarray, area: np.ndarray) -> Values:
    loss, squares, right = means[0], means[1], means[2:]
    recall = np.divide(right, sizes, out=np.zeros_like(right), where=sizes > 0)
    return {
        _LOSS: loss,
        "log_loss": loss,
        "auc": area,
        "balanced_accuracy": recall.sum(axis=0) / (sizes > 0).sum(axis=0),
        "accuracy": right.sum(axis=0),
        "brier_score": squares,
    }


def _of_numbers(common: np.ndarray, means: np.ndarray) -> Values:
    squared, size = means
    around = common[0] - common[1] ** 2
    with np.errstate(invalid="ignore", divide="ignore"):
        explained = np.where(around > 0, 1 - squared / around, np.nan)
    return {
        _LOSS: squared,
        "root_mean_squared_error": np.sqrt(squared),
        "mean_absolute_error": size,
        "r2": explained,
    }


def _auc(rows: Rows, predicted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the area under the curve; of several classes, their mean."""
    asked = range(1, 2) if rows.classes == 2 else range(rows.classes)
    every = [_area(predicted[:, c], rows.label == c, weights) for c in asked]
    known = np.isfinite(every)
    with np.errstate(invalid="ignore"):
        return np.where(known, every, 0).sum(axis=0) / known.sum(axis=0)


def _area(score: np.ndarray, positive: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the chance that a positive row scores higher; a tie counts half."""
    if np.ptp(score) == 0:
        both = positive.any() and not positive.all()
        return np.full(weights.shape[1], 0.5 if both else np.nan)
    values, place = np.unique(score[positive], return_inverse=True)
    # Negative rows between two of these scores are added up first: place 2j lies below
    # score j, and 2j + 1 has the same score.
    others = np.flatnonzero(~positive)
    left, right = (np.searchsorted(values, score[others], s) for s in ("left", "right"))
    bins = left + right
    order = np.argsort(bins, kind="stable")
    present, starts = np.unique(bins[order], return_index=True)
    below = np.zeros((2 * len(values) + 1, weights.shape[1]), weights.dtype)
    if len(present):
        below[present] = np.add.reduceat(weights[others[order]], starts)
    below = np.cumsum(below, axis=0)
    credit = ((below[::2][:-1] + below[1::2]) / 2)[place]
    own = weights[positive]
    pairs = own.sum(axis=0) * below[-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(pairs > 0, (own * credit).sum(axis=0) / pairs, np.nan)
