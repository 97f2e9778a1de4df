"""Tables of results for a terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from fedbilevel.result import Result

__all__ = ["cost_rows", "cost_table", "result_table", "show"]


def result_table(results: Mapping[str, Result]) -> Table:
    """Return the final metrics of one or more runs, a column each."""
    table = Table(title="Result", title_justify="left")
    table.add_column("metric")
    for name in results:
        table.add_column(name, justify="right")
    names = list(dict.fromkeys(n for r in results.values() for n in r.final))
    for name in names:
        table.add_row(name, *(show(r.final.get(name)) for r in results.values()))
    return table


def cost_table(results: Mapping[str, Result]) -> Table:
    """Return what the runs cost: communication, oracle calls, samples, time."""
    table = Table(title="Cost", title_justify="left")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for label, value in cost_rows(list(results.values())):
        table.add_row(label, *(show(value(result)) for result in results.values()))
    return table


def cost_rows(results: Sequence[Result]) -> list[tuple[str, Callable[[Result], Any]]]:
    """Return what a run may have cost: in words, and how to read it from a result."""
    rows: list[tuple[str, Callable[[Result], Any]]] = [
        ("rounds", lambda r: r.counts["rounds"]),
        ("exchanges", lambda r: r.counts["exchanges"]),
        ("floats up, a client and round", _per_client("floats_up")),
        ("floats down, a client and round", _per_client("floats_down")),
        ("megabytes up, in all", lambda r: r.counts["bytes_up"] / 1e6),
        ("megabytes down, in all", lambda r: r.counts["bytes_down"] / 1e6),
        ("samples, in all", lambda r: sum(r.counts["samples"].values())),
        ("Hessian products, in all", _calls("hessian_product")),
        ("seconds to compile", lambda r: r.seconds["compile"]),
        ("seconds to run", lambda r: r.seconds["run"]),
    ]
    if any("epsilon" in result.counts for result in results):
        rows.append(("epsilon", lambda r: r.counts.get("epsilon")))
        rows.append(("at delta", lambda r: r.counts.get("delta")))
    return rows


def _per_client(kind: str):
    return lambda result: result.counts["per_client_and_round"][kind]


def _calls(kind: str):
    return lambda result: result.counts["calls"].get(kind, 0)


def show(value: Any) -> str:
    """Write a number the short way."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.6g}"
