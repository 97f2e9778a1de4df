"""The words of a page, and its tables, to be copied, as CSV and as LaTeX."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbilevel._text import csv_text
from fedbilevel.report.tables import cost_rows, show
from fedbilevel.result import Result
from fedbilevel.saved import Saved
from fedbilevel.standings import (
    Standing,
    about_seeds,
    cost_said,
    default_target,
    margin,
    ranking,
    tuning_said,
)

MEANINGS = {
    "upper_loss": "loss on the validation rows, which tuning lowers",
    "lower_gradient_norm": "slope of the training loss: 0 where training is finished",
    "z_norm": "size of z, which solves the linear system of the hypergradient",
    "test_loss": "mean loss on held-out rows",
    "test_accuracy": "share of the tested rows whose class was found",
    "test_error": "share of the tested rows whose class was not found",
    "test_root_mean_squared_error": "typical error on tested rows",
    "test_explained_variance": "R2 on tested rows: 1 is perfect, 0 is the mean",
    "exchanges": "how often the sites sent something",
    "bytes": "sent by all sites and to them",
    "samples": "rows that were read, repetitions included",
}
_LONGEST = 200  # characters of a setting
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "\u00b1": r"$\pm$",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    }
)
_LATEX_TABLE = r"""\begin{table}
\caption{%s}
\begin{tabular}{%s}
\toprule
%s\midrule
%s\bottomrule
\end{tabular}
\end{table}
"""


@dataclass(frozen=True)
class Grid:
    """A table: what it is of, its headings, its rows; the first column names a row."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_csv(self, separator: str = ",") -> str:
        """Return the table for programs, or for a spreadsheet to paste."""
        return csv_text([self.headings, *self.rows], separator=separator)

    def as_latex(self) -> str:
        """Return the table for a paper; it needs the package booktabs."""
        columns = "l" + "r" * (len(self.headings) - 1)
        head, *lines = (
            " & ".join(cell.translate(_LATEX) for cell in row) + " \\\\\n"
            for row in (self.headings, *self.rows)
        )
        caption = self.caption.translate(_LATEX)
        return _LATEX_TABLE % (caption, columns, head, "".join(lines))


def ranking_grid(
    saved: Saved, standings: Sequence[Standing], target: float | None
) -> Grid:
    """Return the ranking of a comparison, best first."""
    tuned = {
        name: tuning_said(many[0].config.get("tuning"))
        for name, many in saved.results.items()
    }
    rows = [
        (
            one.algorithm,
            mean_and_margin(one),
            amount(one.exchanges),
            amount(None if one.bytes is None else one.bytes / 1e6),
            f"{one.bound} {amount(one.samples)}".strip(),
            amount(one.seconds),
            *([tuned[one.algorithm] or "-"] if any(tuned.values()) else ()),
        )
        for one in standings
    ]
    headings = ["algorithm", saved.headline, "exchanges", "MB", "samples", "seconds"]
    headings += ["tuned in"] if any(tuned.values()) else []
    when = cost_said(saved.results, saved.equal) or "after the last round"
    caption = (
        f"{saved.headline} {when}, {about_seeds(standings[0].seeds)}, "
        f"and the cost from which on it stays at {amount(target)} or below"
    )
    return Grid(caption, headings, rows)


def final_grid(saved: Saved) -> Grid:
    """Return every metric after the last round; of several seeds the mean."""
    names = dict.fromkeys(n for one in saved.every for n in one.final)
    rows = [
        (name, *(_final(many, name) for many in saved.results.values()))
        for name in names
        if name != "operations"
    ]
    return Grid("After the last round", ("metric", *saved.results), rows)


def meanings_grid(saved: Saved) -> Grid | None:
    """Return what the names of metrics mean, as far as they are known."""
    names = dict.fromkeys(n for one in saved.every for n in one.columns)
    rows = [(name, MEANINGS[name]) for name in names if name in MEANINGS]
    return Grid("Metrics", ("metric", "meaning"), rows) if rows else None


def _final(many: Sequence[Result], name: str) -> str:
    values = [one.final.get(name) for one in many]
    if all(isinstance(value, int | float) for value in values):
        numbers = np.asarray(values, float)
        text = amount(numbers.mean())
        half = None if name == "round" else margin(numbers)
        if half is not None:
            text += f" \u00b1 {half:.2g}"
        return text
    return _text(values[0])


def cost_grid(saved: Saved) -> Grid:
    """Return what the runs cost; of several seeds the mean."""
    rows = [
        (label, *(_mean(many, value) for many in saved.results.values()))
        for label, value in cost_rows(saved.every)
    ]
    return Grid("Costs of a run", ("", *saved.results), rows)


def _mean(many: Sequence[Result], value: Callable[[Result], Any]) -> str:
    try:
        found = [value(result) for result in many]
        return amount(None if None in found else float(np.mean(found)))
    except (KeyError, TypeError, ValueError, AttributeError):
        return amount(None)  # not counted yet, or by another version


def configuration(saved: Saved) -> list[Grid]:
    """Return the settings of every algorithm, and the versions."""
    columns = {
        name: dict(_flat(many[0].config)) for name, many in saved.results.items()
    }
    names = dict.fromkeys(name for one in columns.values() for name in one)
    rows = [
        (name, *(one.get(name, "-") for one in columns.values()))
        for name in names
        if not (name == "seed" and len(saved.every) > len(columns))
    ]
    versions = [(name, _text(v)) for name, v in saved.every[0].versions.items()]
    grids = [Grid("Settings", ("setting", *columns), rows)]
    if versions:
        grids.append(Grid("Versions", ("of", "version"), versions))
    return grids


def _flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Return settings as names and texts; the data have a section of their own."""
    for name, value in settings.items():
        if isinstance(value, dict):
            if above or name != "data":
                yield from _flat(value, f"{above}{name}.")
        elif value is not None:
            yield f"{above}{name}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, list):
        text = ", ".join(map(_text, value))
    else:
        text = str(value)
    return short(text, _LONGEST)


def meaning(name: str) -> str:
    """Return what a metric is, to follow its name in a sentence."""
    return f", the {MEANINGS[name]}," if name in MEANINGS else ","


def title_of(saved: Saved) -> str:
    """Return what the page is about, in a line."""
    task, config = saved.every[0].task, saved.every[0].config
    if not saved.compared:
        about = config.get("data")
        label = about.get("label") if isinstance(about, dict) else None
        if isinstance(label, str) and saved.every[0].quality:
            sites = config.get("clients")
            whose = f": a model of {sites} sites" if isinstance(sites, int) else ""
            return f"Predicting {label}{whose}"
        return f"{next(iter(saved.results))} on {task}"
    count = len(saved.results)
    return f"{count} algorithm{'s' * (count > 1)} compared on {task}"


def standings_of(saved: Saved) -> tuple[list[Standing], float | None]:
    """Return the ranking and the target that its costs are about."""
    if not saved.compared:
        return [], saved.target
    target = saved.target
    if target is None:
        target = default_target(saved.results, saved.headline)
    return ranking(saved.results, saved.headline, target, saved.equal), target


def lowest(values: np.ndarray) -> int | None:
    """Return where values are lowest, unless that is at their end or nowhere."""
    if not np.isfinite(values).any():
        return None
    best = int(np.nanargmin(values))
    return best if values[best] < values[-1] else None


def still(saved: Saved) -> list[str]:
    """Return results without traffic; uncounted traffic is not none."""
    sent = {
        name: [one.columns.get("bytes", np.ones(1))[-1] for one in many]
        for name, many in saved.results.items()
    }
    return [name for name, many in sent.items() if not max(many)]


def mean_and_margin(one: Standing) -> str:
    """Return a mean with half of its interval, where there are seeds enough for one."""
    if one.margin is None:
        return amount(one.mean)
    return f"{amount(one.mean)} \u00b1 {one.margin:.2g}"


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence has them: a, b and c."""
    *rest, last = names
    return " and ".join(filter(None, [", ".join(rest), last]))


def amount(value: Any) -> str:
    """Write a number with four digits, whole numbers with their thousands."""
    if value is None or isinstance(value, str):
        return show(value)
    number = float(value)
    if not np.isfinite(number):
        return str(number)
    if number.is_integer() or abs(number) >= 10_000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def short(text: str, most: int = 60) -> str:
    """Cut what comes from a file down to what a cell can hold."""
    return text if len(text) <= most else text[: most - 1] + "\u2026"
