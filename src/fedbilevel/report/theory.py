"""Tables and a picture of what the theory says of a run, and of what was measured.

Reads the summaries of `check-theory`, `plan`, `speedup` and `complexity` as plain data.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from fedbilevel.report._picture import as_png, new_figure
from fedbilevel.report.tables import show

__all__ = [
    "conditions_table",
    "draw_scaling",
    "estimates_table",
    "plan_table",
    "scaling_table",
    "terms_table",
]

_AXES = {"clients": "K", "iterations": "T", "target": "epsilon"}


def estimates_table(estimates: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the measured constants with their ranges."""
    table = Table(title="Constants of the problem", title_justify="left")
    for heading in ("constant", "value", "range"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for name, one in estimates.items():
        span = f"{one['low']:.4g} to {one['high']:.4g}"
        table.add_row(name, f"{one['value']:.4g}", span)
    return table


def conditions_table(summary: Mapping[str, Any]) -> Table:
    """Return every inequality of the theorem with both sides."""
    table = Table(
        title=f"Theorem {summary['theorem']} for {summary['algorithm']}",
        title_justify="left",
    )
    for heading in ("condition", "left", "right", "right/left", "holds"):
        table.add_column(heading)
    table.add_column("what would make it hold")
    for one in summary["conditions"]:
        numbers = (f"{one[side]:.4g}" for side in ("left", "right", "slack"))
        table.add_row(
            one["name"], *numbers, "yes" if one["holds"] else "no", one["advice"]
        )
    return table


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Return a plan: what to run, what it costs, what it promises."""
    title = f"Plan for {plan['algorithm']}, {plan['preset']}, theorem {plan['theorem']}"
    table = Table("", title, show_header=True)
    rows = {
        "clients, K": "clients",
        "iterations, T": "iterations",
        "local steps, p": "local_steps",
        "rounds": "rounds",
        "eta": "eta",
        "alpha": "alpha",
        "beta": "beta",
        "rho1": "rho1",
        "rho2": "rho2",
        "theta": "theta",
        "Q": "q",
        "first batch, B": "first_batch",
        "floats up, a client": "floats_up",
        "bytes up, a client": "bytes_up",
        "samples, a client": "samples_per_client",
        "promised mean of the metric": "promise",
        "largest term of the bound": "dominating",
    }
    for label, name in rows.items():
        value = plan[name]
        if value != "":
            table.add_row(label, value if isinstance(value, str) else show(value))
    return table


def terms_table(terms: Mapping[str, float]) -> Table:
    """Return the bound term by term, the largest first."""
    table = Table(title="Bound, term by term", title_justify="left")
    for heading in ("term", "value", "share"):
        table.add_column(heading, justify="left" if heading == "term" else "right")
    total = sum(terms.values())
    for name in sorted(terms, key=lambda term: -terms[term]):
        table.add_row(name, f"{terms[name]:.4g}", f"{terms[name] / total:.1%}")
    return table


def scaling_table(summary: Mapping[str, Any]) -> Table:
    """Return the measured points; `told` says the exponents below it."""
    table = Table(title=_title(summary), title_justify="left", caption=_told(summary))
    table.caption_justify = "left"
    counts = ("clients", "iterations", "local_steps", "rounds")
    targets = ("target",) if "target" in summary["points"][0] else ()
    for heading in (*_headings(counts), *targets, "eta", "Q", summary["value"]):
        table.add_column(heading, justify="right")
    table.add_column("95 % interval", justify="right")
    # What the theorems bound: the squared gradient with its term in y.
    told = "criterion" in summary["points"][0]
    if told:
        table.add_column("criterion", justify="right")
    for point in summary["points"]:
        numbers = (show(point[name]) for name in (*counts, *targets))
        eta = point["eta"]
        short = eta if eta.startswith("decay") else f"{float(eta):.4g}"
        span = f"{point['low']:.4g} to {point['high']:.4g}"
        found = f"{point['value']:.4g}"
        more = [f"{point['criterion']:.4g}"] if told else []
        table.add_row(*numbers, short, show(point["q"]), found, span, *more)
    return table


def _headings(names: tuple[str, ...]) -> list[str]:
    letters = {"clients": "K", "iterations": "T planned", "local_steps": "p"}
    return [letters.get(name, name) for name in names]


def _title(summary: Mapping[str, Any]) -> str:
    axis = _AXES[summary["axis"]]
    what = summary["value"]
    return f"{summary['algorithm']} on {summary['task']}: {what} against {axis}"


def _exponent(fit: Mapping[str, Any]) -> str:
    span = f"{fit['exponent']:.3f} [{fit['low']:.3f}, {fit['high']:.3f}]"
    claimed = fit["claimed"]
    return span if claimed is None else f"{span}, claimed {claimed:.3g}"


def _told(summary: Mapping[str, Any]) -> str:
    axis = _AXES[summary["axis"]]
    told = f"{summary['value']} ~ {axis}^{_exponent(summary)}"
    if "rounds" in summary:
        told += f"\nrounds ~ {axis}^{_exponent(summary['rounds'])}"
    return told


def draw_scaling(summary: Mapping[str, Any]) -> bytes:
    """Return a PNG of the points, their fit, and the slope that is claimed."""
    figure = new_figure(6.4, 4.8)
    panel = figure.subplots()
    points = summary["points"]
    at = np.asarray([point[summary["axis"]] for point in points], float)
    value, low, high = (
        np.asarray([point[name] for point in points])
        for name in ("value", "low", "high")
    )
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
    panel.set(xscale="log", yscale="log", xlabel=_AXES[summary["axis"]])
    panel.set(ylabel=summary["value"], title=_title(summary))
    panel.set_xticks(at, [show(x) if x >= 1 else f"{x:.3g}" for x in at], minor=False)
    panel.set_yticks(value, [f"{v:.3g}" for v in value], minor=False)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return as_png(figure)
