"""Curves of a metric against exchanges, bytes, samples and seconds, as a picture."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedbilevel.report._picture import as_png, new_figure
from fedbilevel.report.comparison import seconds, stacked
from fedbilevel.result import Result

__all__ = ["draw_curves"]

_AXES = ("exchanges", "megabytes sent", "samples drawn", "seconds")


def draw_curves(
    results: Mapping[str, Sequence[Result]], metric: str, target: float
) -> bytes:
    """Return a PNG of mean curves with bands from the 10th to the 90th percentile.

    What costs nothing (pooled data send no bytes) is missing where that is the axis.
    """
    figure = new_figure(13, 7.5)
    panels = list(figure.subplots(2, 2, sharey=True).flat)
    smallest = min(np.min(r.columns[metric]) for many in results.values() for r in many)
    for panel, axis in zip(panels, _AXES, strict=True):
        for number, (name, many) in enumerate(results.items()):
            values = stacked([result.columns[metric] for result in many])
            costs = stacked([_along(result, axis) for result in many]).mean(axis=0)
            color = f"C{number}"
            style = ("-", "--", ":")[number // 10 % 3]
            panel.plot(costs, values.mean(axis=0), style, color=color, label=name)
            low, high = np.quantile(values, (0.1, 0.9), axis=0)
            panel.fill_between(costs, low, high, color=color, alpha=0.2, linewidth=0)
        panel.axhline(target, color="gray", linewidth=0.8, linestyle="-.")
        panel.set_xlabel(axis)
        panel.set_ylabel(metric)
        panel.set_xscale("log")
        if smallest > 0:
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return as_png(figure)


def _along(result: Result, axis: str) -> np.ndarray:
    columns = result.columns
    return {
        "exchanges": columns["exchanges"],
        "megabytes sent": columns["bytes"] / 1e6,
        "samples drawn": columns["samples"],
        "seconds": seconds(result),
    }[axis]
