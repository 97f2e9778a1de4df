"""Tables for a terminal: results, costs, rankings, trials, and rows by client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from fedbilevel.evaluation.assessment import figure, title, with_interval
from fedbilevel.result import Result
from fedbilevel.standings import Standing, about_seeds, sample_bound

_MOST_TRIALS = 9  # of an algorithm in a table; a file has all of them
_MOST_SITES = 20
_KINDS = ("shared", "alone")  # of models that predict the rows of a site
_MOST_CLASSES, _MOST_COLUMNS = 8, 12  # named as columns, by sites and by clients


def table_of(
    title: str | None,
    headings: Iterable[str],
    rows: Iterable[Iterable[str]] = (),
    texts: Sequence[int] = (0,),
    whole: slice = slice(0),
    **how: Any,
) -> Table:
    """Return a table of numbers, but for columns in `texts`; no `whole` one wraps."""
    table = Table(title=title, title_justify="left", caption_justify="left", **how)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place in texts else "right")
    for column in table.columns[whole]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*row)
    return table


def result_table(results: Mapping[str, Result]) -> Table:
    """Return the final metrics of one or more runs, a column each."""
    every = results.values()
    names = dict.fromkeys(name for one in every for name in one.final)
    rows = ((name, *(show(one.final.get(name)) for one in every)) for name in names)
    return table_of("Result", ("metric", *results), rows)


def quality_tables(quality: Mapping[str, Any]) -> list[Table]:
    """Return how good models are on tested rows, and on those of every site."""
    main, models = quality["metric"], quality["models"]
    names = [n for n in models[0]["metrics"] if n not in (main, "accuracy")]
    rows = [
        (
            escape(one["name"]),
            measured(one["metrics"][main]),
            *(measured(one["metrics"][name], bare=True) for name in names),
        )
        for one in models[:_MOST_SITES]
    ]
    # A line for each word: figures are never cut, and names of models may wrap.
    titles = [title(main), *(title(name).replace(" ", "\n") for name in names)]
    headings = ("model", *titles)
    made = [table_of("Tested rows of all sites", headings, rows, whole=slice(1, None))]
    if quality["sites"]:
        held = [
            (
                escape(one["name"]),
                show(one["rows"]),
                *(measured(one["metrics"].get(kind, {}).get(main)) for kind in _KINDS),
            )
            for one in quality["sites"][:_MOST_SITES]
        ]
        about = f"On the tested rows of every site: {title(main)}"
        headings = ("site", "rows", "shared model", "site alone")
        made.append(table_of(about, headings, held))
    return made


def measured(metric: Sequence[float] | None, *, bare: bool = False) -> str:
    """Return a metric with its interval, or alone; a dash where it is undefined."""
    if metric is None:
        return show(None)
    return figure(metric[0]) if bare else with_interval(metric)


def cost_table(results: Mapping[str, Result]) -> Table:
    """Return what the runs cost: communication, oracle calls, samples, time."""
    every = list(results.values())
    rows = (
        (label, *(show(value(one)) for one in every))
        for label, value in cost_rows(every)
    )
    return table_of("Cost", ("", *results), rows)


def cost_rows(results: Sequence[Result]) -> list[tuple[str, Callable[[Result], Any]]]:
    """Return what a run may have cost: in words, and how to read it from a result."""
    samples = ", ".join(filter(None, ["samples, in all", sample_bound(results)]))
    rows: list[tuple[str, Callable[[Result], Any]]] = [
        ("rounds", lambda r: r.counts["rounds"]),
        ("exchanges", lambda r: r.counts["exchanges"]),
        ("floats up, a client and round", _per_client("floats_up")),
        ("floats down, a client and round", _per_client("floats_down")),
        ("megabytes up, in all", lambda r: r.counts["bytes_up"] / 1e6),
        ("megabytes down, in all", lambda r: r.counts["bytes_down"] / 1e6),
        (samples, lambda r: sum(r.counts["samples"].values())),
        (
            "Hessian products, in all",
            lambda r: r.counts["calls"].get("hessian_product", 0),
        ),
        ("seconds to compile", lambda r: r.seconds["compile"]),
        ("seconds to run", lambda r: r.seconds["run"]),
    ]
    if any("epsilon" in result.counts for result in results):
        rows.append(("epsilon", lambda r: r.counts.get("epsilon")))
        rows.append(("at delta", lambda r: r.counts.get("delta")))
    return rows


def _per_client(kind: str) -> Callable[[Result], Any]:
    return lambda result: result.counts["per_client_and_round"][kind]


def ranking_table(
    standings: Sequence[Standing],
    metric: str,
    target: float,
    when: str = "after the last round",
) -> Table:
    """Return a ranking for a terminal, best first; `when` its values are."""
    rows = (
        (
            one.algorithm,
            f"{one.mean:.4g}{_give_or_take(one.margin)}",
            show(one.exchanges),
            _short(None if one.bytes is None else one.bytes / 1e6),
            f"{one.bound} {show(one.samples)}".strip(),
            _short(one.seconds),
        )
        for one in standings
    )
    return table_of(
        f"{metric} {when}, {about_seeds(standings[0].seeds)}; "
        f"and the cost from which on it stays at {target:.4g} or below",
        ("algorithm", metric, "exchanges", "MB", "samples", "seconds"),
        rows,
        whole=slice(None),
        # With bars between the columns they would not fit into 80 characters.
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def _give_or_take(margin: float | None) -> str:
    """Return a margin with one digit, 20 as 20."""
    return "" if margin is None else f" +- {float(f'{margin:.1g}'):g}"


def _short(value: float | None) -> str:
    if value is None:
        return show(value)
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


def trials_table(
    trials: Mapping[str, Sequence[tuple[Mapping[str, str], float, int]]], metric: str
) -> Table:
    """Return the options tried for each algorithm, and what came of them.

    First is the best of those that ran longest.
    """
    headings = ("algorithm", "options", "rounds", metric)
    table = table_of(f"{metric} of what was tried", headings, texts=(0, 1))
    for name, many in trials.items():
        ordered = sorted(
            many, key=lambda one: (not np.isfinite(one[1]), -one[2], one[1])
        )
        for place, (options, end, rounds) in enumerate(ordered[:_MOST_TRIALS]):
            shown = " ".join(f"{key}={value}" for key, value in options.items())
            value = f"{end:.4g}" if np.isfinite(end) else "diverged"
            table.add_row("" if place else name, shown, str(rounds), value)
        if ordered[_MOST_TRIALS:]:
            worse = f"{len(ordered) - _MOST_TRIALS} more, which ended earlier or worse"
            table.add_row("", worse, "", "")
        table.add_section()
    return table


def holdings_table(summary: Mapping[str, Any]) -> Table:
    """Return the rows for training and validation, and the classes, of each site."""
    sites = summary["sites"]
    classes = list(sites[0]["classes"])
    few = len(classes) <= _MOST_CLASSES
    named = map(escape, classes) if few else ["classes"]
    who = "site" if summary["site_column"] else "client"
    table = table_of(None, (who, "training", "validation", *named))
    for site in sites[:_MOST_SITES]:
        counts = [site["classes"][name] for name in classes]
        held = counts if few else [sum(count > 0 for count in counts)]
        cells = (site["training"], site["validation"], *held)
        table.add_row(escape(site["name"]), *map(show, cells))
    if len(sites) > _MOST_SITES:
        table.caption = f"and {len(sites) - _MOST_SITES} more"
        table.caption_justify = "center"
    return table


def holdings_notes(summary: Mapping[str, Any]) -> list[str]:
    """Say what was encoded, left out, filled, dropped or changed, a line for each."""
    predicted = f", label '{summary['label']}'" if "label" in summary else ""
    size = f"{summary['rows']} rows and {summary['tested']} for testing{predicted}"
    lines = [f"{summary['source']}: {size}."] if summary["own"] else []
    if summary.get("read_as"):
        lines.append(f"Read as: {summary['read_as']}.")
    if "layout" in summary:
        lines.append(f"Images were understood as {summary['layout']}.")
    encoded = summary.get("encoded", {})
    numbers = [name for name in summary.get("learned", ()) if name not in encoded]
    if numbers:
        lines.append(f"Numbers: {', '.join(numbers)}.")
    lines += [
        f"Another whole number in every row: '{name}'. It is learned from. If it names "
        f"rows, leave it out with {option}."
        for name, option in summary.get("like_ids", {}).items()
    ]
    for name, values in encoded.items():
        lines.append(f"Text '{name}' became 0 and 1 for each of {', '.join(values)}.")
    for name, why in summary.get("left_out", {}).items():
        lines.append(f"Not learned from: '{name}' ({why}).")
    filled = [f"{n} of '{name}'" for name, n in summary.get("filled", {}).items()]
    if filled:
        lines.append(f"Filled in, missing values: {', '.join(filled)}.")
    if summary.get("dropped_rows"):
        lines.append(f"Dropped: {summary['dropped_rows']} rows with missing values.")
    return [*lines, *(f"{one[0].upper()}{one[1:]}." for one in summary["remarks"])]


def label_counts_table(
    counts: np.ndarray,
    class_names: Sequence[str],
    title: str = "Rows by class",
    client_names: Sequence[str] = (),
) -> Table:
    """Return the rows per client and class, with totals; clients may have names.

    Where the classes are too many for a terminal, it says how many a client holds.
    """
    names = client_names or [str(client) for client in range(len(counts))]
    everyone = counts.sum(axis=0)
    if len(class_names) > _MOST_COLUMNS:
        headings = ["classes held", "rows of the largest"]
        cells = np.stack([(counts > 0).sum(axis=1), counts.max(axis=1)], axis=1)
        last = [(everyone > 0).sum(), everyone.max()]
    else:
        headings = [escape(name) for name in class_names]
        cells, last = counts, everyone
    table = table_of(title, ("site" if client_names else "client", *headings, "rows"))
    for name, row, size in zip(names, cells, counts.sum(axis=1), strict=True):
        table.add_row(escape(name), *(show(int(cell)) for cell in (*row, size)))
    table.add_section()
    table.add_row("all", *(show(int(cell)) for cell in (*last, counts.sum())))
    return table


def show(value: Any) -> str:
    """Return a number in few digits, as text."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.6g}"
