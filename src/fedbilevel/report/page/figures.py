"""The numbers that a page draws, as JSON that equals the saved columns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.report.drawing import axes_of, cost_scale, mean_costs, value_scale
from fedbilevel.saved import Saved
from fedbilevel.standings import FEWEST, sample_bound, t_quantile

_COSTS = {"round", "exchanges", "bytes", "samples"}
# Of all columns and seeds together: with ten characters each, two megabytes.
_MOST_NUMBERS = 200_000
_UNWRITABLE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def curves_of(saved: Saved, target: float | None) -> dict[str, Any]:
    """Return what the curves of a page are drawn from."""
    every = saved.every
    axes = axes_of(every)
    numbers = sum(column.size for one in every for column in one.columns.values())
    step = math.ceil(numbers / _MOST_NUMBERS)
    shared = [n for n in every[0].columns if all(n in one.columns for one in every)]
    metrics = sorted(set(shared) - _COSTS)
    return {
        "headline": saved.headline,
        "target": target,
        "bound": sample_bound(every),
        "step": step,
        "axes": {
            axis: cost_scale([mean_costs(m, axis)[-1] for m in saved.results.values()])
            for axis in axes
        },
        "metrics": {
            name: value_scale(name, np.concatenate([o.from_start[name] for o in every]))
            for name in metrics
        },
        # Times the deviation of seeds: half of an interval.
        "intervals": {
            name: t_quantile(len(many) - 1) / len(many) ** 0.5
            for name, many in saved.results.items()
            if len(many) >= FEWEST
        },
        "runs": [
            {
                "name": name,
                "seed": result.config.get("seed"),
                "seconds": float(result.seconds["run"]),
                "columns": {n: thinned(c, step) for n, c in result.from_start.items()},
            }
            for name, many in saved.results.items()
            for result in many
        ],
    }


def thinned(column: np.ndarray, step: int) -> list[Any]:
    """Return one of every `step` numbers, the last among them.

    They have as many digits as distinguish them in their precision. What JSON cannot
    write is text that JavaScript reads as a number.
    """
    some = column[::-1][::step][::-1]
    if some.dtype.kind != "f":
        return [int(value) for value in some]
    return [_UNWRITABLE.get(text) or float(text) for text in map(str, some)]


def bars(
    identity: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    axis: str,
    *,
    stacked_up: bool = False,
) -> dict[str, Any]:
    """Return a picture of horizontal bars: for each label one of every series."""
    return {
        "id": identity,
        "labels": list(labels),
        "series": {name: [float(v) for v in many] for name, many in series.items()},
        "axis": axis,
        "stacked": stacked_up,
    }
