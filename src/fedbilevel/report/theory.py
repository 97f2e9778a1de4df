"""Tables of what the theory says of a run, and of what was measured.

Reads the summaries of `check-theory`, `plan`, `speedup` and `complexity` as plain data.
"""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedbilevel.report.tables import show, table_of

AXES = {"clients": "K", "iterations": "T", "target": "epsilon"}
_COUNTS = {
    "clients": "K",
    "iterations": "T planned",
    "local_steps": "p",
    "rounds": "rounds",
}
_PLAN = {
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


def estimates_table(estimates: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the measured constants with their ranges."""
    rows = (
        (name, f"{one['value']:.4g}", f"{one['low']:.4g} to {one['high']:.4g}")
        for name, one in estimates.items()
    )
    headings = ("constant", "value", "range")
    return table_of("Constants of the problem", headings, rows, texts=(0, 2))


def conditions_table(summary: Mapping[str, Any]) -> Table:
    """Return every inequality of the theorem with both sides."""
    rows = (
        (
            one["name"],
            *(f"{one[side]:.4g}" for side in ("left", "right", "slack")),
            "yes" if one["holds"] else "no",
            one["advice"],
        )
        for one in summary["conditions"]
    )
    title = f"Theorem {summary['theorem']} for {summary['algorithm']}"
    sides = ("left", "right", "right/left")
    headings = ("condition", *sides, "holds", "what would make it hold")
    return table_of(title, headings, rows, texts=range(len(headings)))


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Return a plan: what to run, what it costs, what it promises."""
    title = f"Plan for {plan['algorithm']}, {plan['preset']}, theorem {plan['theorem']}"
    rows = ((label, show(plan[name])) for label, name in _PLAN.items())
    return table_of(None, ("", title), (row for row in rows if row[1]), texts=(0, 1))


def terms_table(terms: Mapping[str, float]) -> Table:
    """Return the bound term by term, the largest first."""
    total = sum(terms.values())
    rows = (
        (name, f"{terms[name]:.4g}", f"{terms[name] / total:.1%}")
        for name in sorted(terms, key=lambda term: -terms[term])
    )
    return table_of("Bound, term by term", ("term", "value", "share"), rows)


def scaling_table(summary: Mapping[str, Any]) -> Table:
    """Return the measured points, with the exponents below them."""
    points = summary["points"]
    counts = [*_COUNTS, *(["target"] if "target" in points[0] else [])]
    # The quantity that the theorems bound: the squared gradient with its term in y.
    more = ["criterion"] if "criterion" in points[0] else []
    names = (_COUNTS.get(name, name) for name in counts)
    headings = (*names, "eta", "Q", summary["value"], "95 % interval", *more)
    rows = (
        (
            *(show(point[name]) for name in counts),
            _eta(point["eta"]),
            show(point["q"]),
            f"{point['value']:.4g}",
            f"{point['low']:.4g} to {point['high']:.4g}",
            *(f"{point[name]:.4g}" for name in more),
        )
        for point in points
    )
    axis, value = scaling_names(summary)
    fitted = f"{value} ~ {axis}^{_exponent(summary)}"
    if "rounds" in summary:
        fitted += f"\nrounds ~ {axis}^{_exponent(summary['rounds'])}"
    return table_of(scaling_title(summary), headings, rows, texts=(), caption=fitted)


def scaling_names(summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return what an exponent is in and of, less the floor where a metric has one."""
    names, floor = [AXES[summary["axis"]], summary["value"]], summary.get("floor")
    if floor:
        names[summary["axis"] != "target"] += f" - {floor:.4g}"
    return names[0], names[1]


def scaling_title(summary: Mapping[str, Any]) -> str:
    """Return the method, the task, the value, and its axis."""
    about = f"{summary['algorithm']} on {summary['task']}"
    return f"{about}: {summary['value']} against {AXES[summary['axis']]}"


def _eta(text: str) -> str:
    return text if text.startswith("decay") else f"{float(text):.4g}"


def _exponent(fit: Mapping[str, Any]) -> str:
    span = f"{fit['exponent']:.3f} [{fit['low']:.3f}, {fit['high']:.3f}]"
    claimed = fit["claimed"]
    return span if claimed is None else f"{span}, claimed {claimed:.3g}"
