"""Pictures of a task's result: strengths, rows, operations, groups and sites."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from fedbilevel.report.drawing import png_address
from fedbilevel.report.page.sections import Grid, amount, short
from fedbilevel.result import Result
from fedbilevel.saved import Saved

MOST_BARS = 30
_ALIKE = 1e-3  # of the largest strength: two that differ by less look the same
_SHOWN_ROWS = 12
_PART = re.compile(r"(.*accuracy)_(group|site|client)_(.+)")


@dataclass(frozen=True)
class Picture:
    """A part of a page: a heading, a sentence, tables, bars to draw, and images.

    An image is its address, which holds the image itself, and its caption.
    """

    heading: str
    text: str
    grids: Sequence[Grid] = ()
    bars: Mapping[str, Any] | None = None
    images: Sequence[tuple[str, str]] = ()


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


def pictures_of(saved: Saved, best: str) -> list[Picture]:
    """Return the pictures that a result has; `best` is the algorithm to show."""
    result = saved.results[best][0]
    whose = ""
    if len(saved.every) > 1:
        whose = f" Shown is {best}, seed {result.config.get('seed', 0)}."
    made = [
        _strengths(result, saved.features, whose),
        _source_weights(result, whose),
        _operations(saved),
        *_accuracies(saved),
        _suspicious(saved),
    ]
    return [one for one in made if one is not None]


def _strengths(result: Result, features: Sequence[str], whose: str) -> Picture | None:
    """Return the strengths of `regularization`: exp(x), with x in [-9, 0].

    Of a table, those of columns: exp(common + own).
    """
    x, own = (result.point.get(name) for name in ("x", "x.own"))
    if result.task != "regularization":
        return None
    if own is not None and own.ndim == 1 and own.size:
        strengths = np.exp(own.astype(float) + float(result.point["x.common"]))
        # Of a text column there is a feature for each value.
        columns = list(dict.fromkeys(short(one.partition("=")[0]) for one in features))
        names = _named(columns, len(strengths), "column")
    elif x is not None and x.ndim == 1 and x.size > 1:
        # The last is that of the intercept, which is no feature to find useless.
        *found, last = np.exp(np.clip(x.astype(float), -9.0, 0.0))
        strengths = np.asarray(found)
        names = _named([*map(short, features)], len(found), "feature")
        whose = f" The intercept has the strength {amount(last)}.{whose}"
    else:
        return None
    order = np.argsort(-strengths, kind="stable")
    shown, cut = order, ""
    if len(order) > MOST_BARS:
        half = MOST_BARS // 2
        shown = np.concatenate([order[:half], order[-half:]])
        cut = f" Of {len(order)} the {half} largest and the {half} smallest are drawn."
    labels, values = [names[k] for k in shown], strengths[shown]
    rows = [(names[k], amount(strengths[k])) for k in order]
    about = (
        "A large strength holds a feature's weights near zero: the validation rows "
        "found it of little use. A small one lets it speak."
    )
    if np.ptp(strengths) <= _ALIKE * strengths.max():
        about = (
            "All strengths stayed alike: others would have lowered the validation loss "
            "by next to nothing, as is usual for many rows."
        )
    return Picture(
        "Strength of every feature",
        f"{about}{cut}{whose}",
        [Grid("Strengths, the largest first", ("feature", "strength"), rows)],
        bars("strengths", labels, {"strength": list(values)}, "strength"),
    )


def _named(known: list[str], count: int, kind: str) -> list[str]:
    """Return the names that the run recorded, or numbers."""
    return known if len(known) == count else [f"{kind} {k}" for k in range(count)]


def _source_weights(result: Result, whose: str) -> Picture | None:
    """Return the weights of sources of `reweighting`, which its metrics have."""
    prefix = "weight_"
    found = {
        name.removeprefix(prefix): float(value)
        for name, value in result.final.items()
        if name.startswith(prefix) and is_number(value)
    }
    if result.task != "reweighting" or not found:
        return None
    order = sorted(found, key=lambda name: (-found[name], name))
    shown = order[:MOST_BARS]
    cut = f" Of {len(order)} the largest are drawn." if len(order) > len(shown) else ""
    rows = [(short(name), amount(found[name])) for name in order]
    return Picture(
        "Weight of every source",
        "The texts of a source with a weight near 0 do not help a model to write as "
        "the trusted texts do. The weights sum to one, and are in weights.csv."
        f"{cut}{whose}",
        [Grid("Weights, the largest first", ("source", "weight"), rows)],
        bars(
            "source-weights",
            [short(name) for name in shown],
            {"weight": [found[name] for name in shown]},
            "weight",
        ),
    )


def _operations(saved: Saved) -> Picture | None:
    """Return which operation an architecture has on each edge."""
    rows = []
    for name, many in saved.results.items():
        for result in many:
            chosen = result.final.get("operations")
            if isinstance(chosen, list):
                accuracy = amount(result.final.get("retrained_accuracy"))
                seed = str(result.config.get("seed", 0))
                rows.append((name, seed, " \u2192 ".join(map(str, chosen)), accuracy))
    if not rows:
        return None
    headings = ("algorithm", "seed", "operations", "retrained accuracy")
    return Picture(
        "Chosen operations",
        "From the input to the output, the operation with the largest weight on each "
        "edge. The accuracy is that of a network with these alone, trained anew.",
        [Grid("Operations", headings, rows)],
    )


def _accuracies(saved: Saved) -> list[Picture]:
    """Return the accuracy of every group and site, where a result has it."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, many in saved.results.items():
        for metric, value in (pair for one in many for pair in one.final.items()):
            match = _PART.fullmatch(metric)
            if match and is_number(value):
                parts = found.setdefault(match[2], {})
                whole = parts.setdefault(f"{match[2]} {match[3]}", {})
                whole.setdefault(name, []).append(float(value))
    return [
        _accuracy(kind, found[kind], list(saved.results))
        for kind in ("group", "site", "client")
        if kind in found
    ]


def _accuracy(
    kind: str, found: Mapping[str, Mapping[str, list[float]]], names: Sequence[str]
) -> Picture:
    labels = [short(label) for label in found]
    means = {
        name: [float(np.mean(one.get(name, [math.nan]))) for one in found.values()]
        for name in names
    }
    heading = f"Accuracy of every {kind}"
    rows = [
        (label, *map(amount, values))
        for label, *values in zip(labels, *means.values(), strict=True)
    ]
    return Picture(
        heading,
        "Mean over the random seeds, on rows that no site trains with.",
        [Grid(heading, (kind, *names), rows)],
        bars(f"accuracy-{kind}", labels, means, "accuracy"),
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Say whether this is a number, which a flag is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _suspicious(saved: Saved) -> Picture | None:
    """Return the dirtiest and the cleanest rows, as `suspicious.csv` has them."""
    rows = saved.suspicious
    if not rows:
        return None
    headings = tuple(short(name) for name in rows[0])

    def grid(caption: str, some: Sequence[Mapping[str, str]]) -> Grid:
        cells = [tuple(_cell(*held) for held in one.items()) for one in some]
        return Grid(caption, headings, cells)

    grids = [grid("Dirtiest rows", rows[:_SHOWN_ROWS])]
    if len(rows) > _SHOWN_ROWS:
        clean = rows[max(_SHOWN_ROWS, len(rows) - _SHOWN_ROWS) :][::-1]
        grids.append(grid("Cleanest rows", clean))
    shown = ""
    if saved.pictures:
        shown = f" Shown are the first {len(saved.pictures)}, each with its label."
    return Picture(
        "Dirtiest and cleanest rows",
        f"A small weight says that a row's label disagrees with the validation rows: "
        f"look at these first. All {len(rows):,} are in suspicious.csv.{shown}",
        grids,
        images=[(png_address(pixels), _caption(row)) for row, pixels in saved.pictures],
    )


def _caption(row: Mapping[str, str]) -> str:
    """Say which image this is: what it is labeled, where it is, and its weight."""
    file, number = row.get("file", ""), row.get("row", "")
    where = file.rpartition("/")[2] if "." in file else f"row {number}"
    weight = _cell("weight", row["weight"])
    return f"{short(row.get('label', ''))}? {short(where)}, weight {weight}"


def _cell(name: str, text: str) -> str:
    return f"{float(text):.3g}" if name == "weight" else short(text)
