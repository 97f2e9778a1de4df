"""The tables of a page, to be copied, as CSV and as LaTeX: results, costs, settings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbilevel._text import csv_text
from fedbilevel.report.page.words import MEANINGS, amount, mean_and_margin, short
from fedbilevel.report.tables import cost_rows
from fedbilevel.result import Result
from fedbilevel.saved import Saved
from fedbilevel.standings import Standing, about_seeds, cost_said, margin, tuning_said

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
