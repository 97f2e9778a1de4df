"""Errors in the cells of a table: all of them at once, with remedies."""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from fedbilevel._table_choices import ignoring
from fedbilevel.datasets.cells import as_texts
from fedbilevel.datasets.tables import Table
from fedbilevel.errors import InvalidInputError

_MOST_VALUES = 50  # of a column of text
_LONGEST_VALUE = 200  # characters
_FEWEST_TO_COUNT = 20  # rows from which 1, 2, 3, ... is no measurement
_FEWEST_TO_SUSPECT = 50  # rows in which whole numbers that all differ may be ids
_FEWEST_TO_REPEAT = 10  # rows of which some must have the same text
_MOST_TOLD = 20  # columns of which it is said what is wrong
_DATES = {
    "year first": re.compile(r"\d{4}[-./](\d{1,2})[-./](\d{1,2})(?!\d)"),
    "": re.compile(r"(\d{1,2})[-./](\d{1,2})[-./](\d{4}|\d{2})(?!\d)"),
}


def useless(table: Table, name: str) -> str:
    """Say why a column is nothing to learn from; nothing if it is."""
    if name in table.unreadable:
        return f"holds {table.unreadable[name]}, neither numbers nor text"
    if not table.is_numeric(name):
        return _about_texts(as_texts(table.columns[name]))
    numbers = table.numbers(name)
    with np.errstate(invalid="ignore"):  # of two words in a column of numbers
        steps = np.abs(np.diff(numbers))
    counts = len(numbers) >= _FEWEST_TO_COUNT and np.all(steps == 1)
    rises = counts and len(np.unique(numbers)) == len(numbers)
    return "counts the rows, so it looks like an id" if rises else ""


def is_like_id(numbers: np.ndarray) -> bool:
    """Say whether numbers may name rows: whole, and another one in every row."""
    enough = len(numbers) >= _FEWEST_TO_SUSPECT and np.isfinite(numbers).all()
    whole = enough and np.all(numbers == np.floor(numbers))
    return bool(whole and len(np.unique(numbers)) == len(numbers))


def _about_texts(texts: list[str]) -> str:
    """Say why texts are no categories; nothing if they are."""
    there = [text for text in texts if text]
    different = set(there)
    if dates := _about_dates(there):
        return dates
    if len(different) == len(there) >= _FEWEST_TO_REPEAT:
        return "has another text in every row, so it looks like an id or a name"
    if len(different) > _MOST_VALUES:
        return (
            f"has {len(different)} different texts in {len(texts)} rows, where at most "
            f"{_MOST_VALUES} become features of 0 and 1"
        )
    if max(map(len, different), default=0) > _LONGEST_VALUE:
        return f"holds texts of more than {_LONGEST_VALUE} characters"
    return ""


def _about_dates(there: list[str]) -> str:
    """Say that texts are dates, and in which order they have day, month and year."""
    for order, kind in _DATES.items():
        found = [match for match in map(kind.match, there) if match]
        if 2 * len(found) <= len(there):
            continue
        first, second = (max(int(one[place]) for one in found) for place in (1, 2))
        if not order and first <= 12 < second:
            order = "month first"
        # With points they are German, and Americans have none.
        elif not order and (first > 12 or "." in there[0]):
            order = "day first"
        told = order or "day or month first"
        return f"holds dates, such as '{there[0]:.40}' ({told})"
    return ""


def check_columns(table: Table, names: Iterable[str], who: str) -> None:
    """Raise if a table lacks columns, naming all of them and their users."""
    lacking = [f"'{name}'" for name in names if name not in table.columns]
    if lacking:
        raise InvalidInputError(
            f"{table.source}: there is no column {', '.join(lacking[:20])}, which "
            f"{who} needs. There are {', '.join(list(table.columns)[:50])}."
        )


def check_cells(
    table: Table,
    unused: Mapping[str, str],
    numbers: Iterable[str],
    needed: Mapping[str, str],
    *,
    fitted: bool = False,
) -> None:
    """Raise one error for all that is wrong in a table, if anything is.

    `unused` are columns to leave out, and why; `numbers` are those that hold numbers;
    `needed` says of columns what may not be missing in them. Where columns are `fitted`
    already, none can be left out.
    """
    words = {name: np.isinf(table.numbers(name)) for name in numbers}
    gaps = {name: table.is_missing(name) for name in needed}
    wrong = {name: rows for name, rows in words.items() if rows.any()}
    lacking = {name: rows for name, rows in gaps.items() if rows.any()}
    told = [f"column '{name}' {why}" for name, why in unused.items()]
    for name, rows in wrong.items():
        text = str(table.columns[name][int(np.argmax(rows))])
        told.append(_first(table, name, rows, f"{text!r:.80} is not a finite number"))
    for name, rows in lacking.items():
        told.append(_first(table, name, rows, f"the {needed[name]} is missing"))
    if not told:
        return
    out = [*unused, *(() if fitted else wrong)]
    them, cures = "it" if len(out) == 1 else "them", []
    if wrong:
        cures.append("Correct what is no number.")
    if out:
        made = ", or make " + them + " numbers or a few words" if unused else ""
        cures.append(f"Leave {them} out with {ignoring(out)}{made}.")
    if lacking:
        mean = any(needed[name] == "number" for name in lacking)
        filled = "give --missing mean to put the mean in its place, or "
        cures.append(
            f"Fill in what is missing, or {filled if mean else ''}--missing drop to "
            "leave such rows out."
        )
    more = [f"and {len(told) - _MOST_TOLD} more"] if told[_MOST_TOLD:] else []
    listed = "; ".join([*told[:_MOST_TOLD], *more])
    raise InvalidInputError(f"{table.source}: {listed}. {' '.join(cures)}")


def _first(table: Table, name: str, rows: np.ndarray, what: str) -> str:
    """Say what is wrong in the first of some rows, and in how many more."""
    count = int(rows.sum()) - 1
    more = f" (and in {count} more)" if count else ""
    place = table.places[int(np.argmax(rows))]
    return f"{table.unit} {place}, column '{name}': {what}{more}"
