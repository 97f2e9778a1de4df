"""Pictures by matplotlib and Pillow, which are needed only where one is drawn.

Curves of a metric against exchanges, bytes, samples, rounds and seconds; the classes of
every client; and measured exponents.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.errors import needed
from fedbilevel.report.tables import show
from fedbilevel.report.theory import scaling_names, scaling_title
from fedbilevel.result import Result
from fedbilevel.standings import (
    Results,
    about_seeds,
    margin,
    sample_bound,
    seconds_at,
    stacked,
)

_COLUMN = {"exchanges": "exchanges", "megabytes": "bytes", "samples": "samples"}
_LABELS = {"megabytes": "megabytes sent", "samples": "samples drawn"}
# Shares, between 0 and 1: what one more hundredth is worth does not depend on where.
_SHARES = ("accuracy", "auc", "share", "weight")
_DECADE, _FEW_DECADES = 10.0, 2.5
_MOST_NAMED, _MOST_NUMBERED = 20, 100  # classes in a legend, clients at an axis
_TALLEST = 24.0  # inches
_EXTRA = "fedbilevel[report]."


def axes_of(results: Sequence[Result]) -> tuple[str, ...]:
    """Return what all of these can be drawn against; rounds if nothing was counted.

    What none of them costs is left out: one machine exchanges nothing.
    """
    if not all(set(_COLUMN.values()) <= set(one.columns) for one in results):
        return "rounds", "seconds"
    paid = (
        axis
        for axis, column in _COLUMN.items()
        if any(np.any(one.columns[column] > 0) for one in results)
    )
    return *paid, "rounds", "seconds"


def along(result: Result, axis: str) -> np.ndarray:
    """Return the cost until each measurement, that of the start among them."""
    if axis == "seconds":
        return seconds_at(result, result.from_start["round"])
    column = result.from_start[_COLUMN.get(axis, "round")]
    return column / 1e6 if axis == "megabytes" else column


def mean_costs(many: Sequence[Result], axis: str) -> np.ndarray:
    """Return the mean cost until each measurement."""
    return stacked([along(result, axis) for result in many]).mean(axis=0)


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


def draw_curves(results: Results, metric: str, target: float) -> bytes:
    """Return a PNG of mean curves, with bands of their 95 % t intervals."""
    return _png(curves_figure(results, metric, target))


def curves_figure(results: Results, metric: str, target: float) -> Any:
    """Return the figure with one panel for each kind of cost.

    What costs nothing (pooled data send no bytes) is missing where that is the axis.
    """
    every = [result for many in results.values() for result in many]
    axes = axes_of(every)
    panel_rows = -(-len(axes) // 2)
    figure = _new_figure(13, 3.75 * panel_rows)
    panels = list(figure.subplots(panel_rows, 2, sharey=True).flat)
    for spare in panels[len(axes) :]:
        spare.remove()
    values = np.concatenate([result.from_start[metric] for result in every])
    named = {}  # every curve once, also one that only some of the panels have
    for panel, axis in zip(panels, axes, strict=False):
        ends = _draw_panel(panel, results, metric, axis)
        panel.axhline(target, color="gray", linewidth=0.8, linestyle="-.")
        label = _LABELS.get(axis, axis)
        if axis == "samples" and (bound := sample_bound(every)):
            label = f"{label}, {bound}"
        panel.set(xlabel=label, ylabel=metric)
        _set_scale(panel, "x", cost_scale(ends))
        _set_scale(panel, "y", value_scale(metric, values))
        panel.grid(alpha=0.3)
        handles, labels = panel.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    first = next(iter(results.values()))
    about = f"{first[0].task}: {metric}, {about_seeds(len(first))}"
    figure.suptitle(f"{about}; dash-dotted: {target:.4g}")
    figure.legend(
        named.values(), named.keys(), loc="outside right upper", frameon=False
    )
    return figure


def _draw_panel(panel: Any, results: Results, metric: str, axis: str) -> list[float]:
    """Draw the curves along an axis; return what each cost in the end."""
    paid = {name: mean_costs(many, axis) for name, many in results.items()}
    ends = [float(costs[-1]) for costs in paid.values() if costs[-1] > 0]
    for number, (name, many) in enumerate(results.items()):
        costs = paid[name]
        if not costs[-1] > 0:
            continue
        # The start costs nothing: it has no place on a logarithmic axis.
        shown = slice(int(costs[0] == 0 and cost_scale(ends) == "log"), None)
        values = stacked([result.from_start[metric] for result in many])[:, shown]
        color, style = f"C{number}", ("-", "--", ":")[number // 10 % 3]
        half, middle = margin(values), values.mean(axis=0)
        panel.plot(costs[shown], middle, style, color=color, label=name)
        if half is not None:
            band = (middle - half, middle + half)
            about = {"color": color, "alpha": 0.2, "linewidth": 0}
            panel.fill_between(costs[shown], *band, **about)
    return ends


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
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.6g}"
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")


def draw_label_counts(
    levels: Mapping[str, np.ndarray],
    class_names: Sequence[str],
    client_names: Sequence[str] = (),
) -> bytes:
    """Return a PNG with a panel for each level: a bar per client, stacked by class.

    Classes are colored along a scale where a legend would be too long.
    """
    clients, classes = next(iter(levels.values())).shape
    figure = _new_figure(10, min(1.2 + 0.16 * max(clients, 10), _TALLEST))
    import matplotlib
    from matplotlib.patches import Patch

    scale = "tab10" if classes <= 10 else "tab20" if classes <= 20 else "turbo"
    colors = matplotlib.colormaps[scale].resampled(classes)(range(classes))
    panels = figure.subplots(1, len(levels), sharey=True, squeeze=False)[0]
    for panel, (name, counts) in zip(panels, levels.items(), strict=True):
        _draw_bars(panel, counts, colors)
        panel.set_title(name)
    panels[0].set_ylabel("site" if client_names else "client")
    panels[0].set_ylim(clients - 0.4, -0.6)
    ticks = range(0, clients, 1 + (clients - 1) // _MOST_NUMBERED)
    names = [client_names[tick] for tick in ticks] if client_names else None
    panels[0].set_yticks(ticks, names)
    if classes <= _MOST_NAMED:
        handles = [Patch(color=color) for color in colors]
        figure.legend(handles, class_names, loc="outside right upper", frameon=False)
    else:
        figure.suptitle(f"{classes} classes")
    return _png(figure)


def _draw_bars(panel: Any, counts: np.ndarray, colors: np.ndarray) -> None:
    """Draw a bar for each client and class with rows."""
    from matplotlib.collections import PolyCollection

    client, number = np.nonzero(counts)
    right = np.cumsum(counts, axis=1)[client, number]
    left = right - counts[client, number]
    top, bottom = client - 0.4, client + 0.4
    across = np.stack([left, right, right, left], axis=1)
    down = np.stack([top, top, bottom, bottom], axis=1)
    # One collection of bars: thousands of single ones take seconds to draw.
    corners = list(np.stack([across, down], axis=2))
    panel.add_collection(PolyCollection(corners, facecolors=colors[number]))
    panel.set_xlim(0, 1.05 * max(counts.sum(axis=1).max(), 1))
    panel.tick_params(axis="y", labelsize=7)
    panel.set_xlabel("rows")
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)


def draw_scaling(summary: Mapping[str, Any]) -> bytes:
    """Return a PNG of the points, their fit, and the slope that is claimed."""
    figure = _new_figure(6.4, 4.8)
    panel = figure.subplots()
    at, value, low, high = (
        np.asarray([point[name] for point in summary["points"]], float)
        for name in (summary["axis"], "value", "low", "high")
    )
    floor = summary.get("floor", 0.0)
    if summary["axis"] == "target":
        at = at - floor
    else:
        value, low, high = value - floor, low - floor, high - floor
    bars = np.abs(np.stack([value - low, high - value]))
    panel.errorbar(at, value, bars, fmt="o", capsize=3, label="measured, 95 %")
    middle = np.exp(np.log(at).mean()), np.exp(np.log(value).mean())
    for slope, style, name in (
        (summary["exponent"], "-", "fitted"),
        (summary["claimed"], "--", "claimed"),
    ):
        if slope is not None:
            line = middle[1] * (at / middle[0]) ** slope
            panel.plot(at, line, style, label=f"{name}: {slope:.3g}")
    names = scaling_names(summary)
    panel.set(xscale="log", yscale="log", xlabel=names[0], ylabel=names[1])
    panel.set(title=scaling_title(summary))
    panel.set_xticks(at, [show(x) if x >= 1 else f"{x:.3g}" for x in at], minor=False)
    panel.set_yticks(value, [f"{v:.3g}" for v in value], minor=False)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return _png(figure)


def png_address(pixels: np.ndarray) -> str:
    """Return an image as an address that holds it; the same for the same pixels.

    Pixels are bytes, (height, width) or (height, width, 3).
    """
    library = needed("PIL.Image", "images are written by Pillow: install " + _EXTRA)
    file = io.BytesIO()
    library.fromarray(pixels).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches."""
    sentence = "pictures are drawn by matplotlib: install " + _EXTRA
    return needed("matplotlib.figure", sentence).Figure(
        figsize=(width, height), layout="constrained", dpi=110
    )


def _png(figure: Any) -> bytes:
    """Return the figure as the content of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
