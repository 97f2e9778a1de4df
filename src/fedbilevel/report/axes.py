"""What curves are drawn against, and whether an axis is linear or logarithmic."""

import math
from collections.abc import Sequence

import numpy as np

from fedbilevel.report.comparison import seconds
from fedbilevel.result import Result

__all__ = ["along", "axes_of", "cost_scale", "value_scale"]

_AXES = ("exchanges", "megabytes", "samples", "seconds")
_COLUMN = {"exchanges": "exchanges", "megabytes": "bytes", "samples": "samples"}
# Shares, between 0 and 1: what one more hundredth is worth does not depend on where.
_SHARES = ("accuracy", "auc", "share", "weight")
_DECADE = 10.0


def axes_of(results: Sequence[Result]) -> tuple[str, ...]:
    """Return what all of these can be drawn against; rounds if nothing was counted.

    What none of them costs is left out: one machine exchanges nothing.
    """
    if not all(set(_COLUMN.values()) <= set(one.columns) for one in results):
        return "rounds", "seconds"
    free = {
        axis
        for axis, column in _COLUMN.items()
        if not any(np.any(one.columns[column] > 0) for one in results)
    }
    return tuple(axis for axis in _AXES if axis not in free)


def along(result: Result, axis: str) -> np.ndarray:
    """Return the cost until each measurement."""
    if axis == "seconds":
        return seconds(result)
    if axis == "rounds":
        return result.columns["round"]
    column = result.columns[_COLUMN[axis]]
    return column / 1e6 if axis == "megabytes" else column


def value_scale(metric: str, values: np.ndarray) -> str:
    """Return "log" for positive values over more than a decade, else "linear".

    Accuracies and other shares are linear, however far they go.
    """
    if any(word in metric for word in _SHARES):
        return "linear"
    finite = values[np.isfinite(values)]
    if not finite.size or finite.min() <= 0:
        return "linear"
    return "log" if finite.max() > _DECADE * finite.min() else "linear"


def cost_scale(ends: Sequence[float]) -> str:
    """Return "log" where some cost more than ten times what others do.

    `ends` is what each has cost in the end; what costs nothing is not drawn.
    """
    drawn = [end for end in ends if end > 0 and math.isfinite(end)]
    return "log" if drawn and max(drawn) > _DECADE * min(drawn) else "linear"
