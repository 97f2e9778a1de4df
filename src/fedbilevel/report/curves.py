"""Curves of a metric against exchanges, bytes, samples and seconds, as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.report._picture import as_png, new_figure
from fedbilevel.report.axes import along, axes_of, cost_scale, value_scale
from fedbilevel.report.comparison import stacked
from fedbilevel.result import Result

__all__ = ["curves_figure", "draw_curves"]

_LABELS = {"megabytes": "megabytes sent", "samples": "samples drawn"}
_FEW_DECADES = 2.5


def draw_curves(
    results: Mapping[str, Sequence[Result]], metric: str, target: float
) -> bytes:
    """Return a PNG of mean curves with bands from the 10th to the 90th percentile."""
    return as_png(curves_figure(results, metric, target))


def curves_figure(
    results: Mapping[str, Sequence[Result]], metric: str, target: float
) -> Any:
    """Return the figure with one panel for each kind of cost.

    What costs nothing (pooled data send no bytes) is missing where that is the axis.
    """
    every = [result for many in results.values() for result in many]
    axes = axes_of(every)
    panel_rows = -(-len(axes) // 2)
    figure = new_figure(13, 3.75 * panel_rows)
    panels = list(figure.subplots(panel_rows, 2, sharey=True).flat)
    for spare in panels[len(axes) :]:
        spare.remove()
    panels = panels[: len(axes)]
    values = np.concatenate([result.columns[metric] for result in every])
    for panel, axis in zip(panels, axes, strict=True):
        ends = _draw_panel(panel, results, metric, axis)
        panel.axhline(target, color="gray", linewidth=0.8, linestyle="-.")
        panel.set(xlabel=_LABELS.get(axis, axis), ylabel=metric)
        _set_scale(panel, "x", cost_scale(ends))
        _set_scale(panel, "y", value_scale(metric, values))
        panel.grid(alpha=0.3)
    figure.suptitle(_title(results, metric, target))
    _add_legend(figure, panels)
    return figure


def _draw_panel(
    panel: Any, results: Mapping[str, Sequence[Result]], metric: str, axis: str
) -> list[float]:
    """Draw the curves along an axis; return what each cost in the end."""
    ends = []
    for number, (name, many) in enumerate(results.items()):
        costs = stacked([along(result, axis) for result in many]).mean(axis=0)
        if not costs[-1] > 0:
            continue
        values = stacked([result.columns[metric] for result in many])
        color = f"C{number}"
        style = ("-", "--", ":")[number // 10 % 3]
        panel.plot(costs, values.mean(axis=0), style, color=color, label=name)
        low, high = np.quantile(values, (0.1, 0.9), axis=0)
        panel.fill_between(costs, low, high, color=color, alpha=0.2, linewidth=0)
        ends.append(float(costs[-1]))
    return ends


def _add_legend(figure: Any, panels: Sequence[Any]) -> None:
    """Name every curve once, also one that only some of the panels have."""
    named = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), named.keys(), loc="outside right upper", frameon=False
    )


def _title(results: Mapping[str, Sequence[Result]], metric: str, target: float) -> str:
    first = next(iter(results.values()))
    band = ""
    if len(first) > 1:
        band = f", mean of {len(first)} seeds, band of the middle 80 %"
    return f"{first[0].task}: {metric}{band}; dash-dotted: {target:.4g}"


def _set_scale(panel: Any, axis: str, scale: str) -> None:
    """Set a scale with ticks that can be read: 0.6, not 6 times a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    one = panel.xaxis if axis == "x" else panel.yaxis
    panel.set(**{f"{axis}scale": scale})
    if scale == "log":
        low, high = one.get_view_interval()
        few = low > 0 and np.log10(high / low) < _FEW_DECADES
        one.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        one.set_minor_formatter(NullFormatter())
    one.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _tick(value: float) -> str:
    plain = value == 0 or 1e-4 <= abs(value) < 1e6
    if plain:
        return f"{value:,.6g}"
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")
