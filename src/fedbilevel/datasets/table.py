"""A table as it was read: named columns of text or numbers, and where each row is."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedbilevel.datasets.sums import MISSING, as_texts, parse_number
from fedbilevel.errors import InvalidInputError

_LONGEST_GAP = max(map(len, MISSING))


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, all of the same length.

    A column holds numbers, NaN where one is missing, or Python's texts, empty where one
    is missing; numbers may be written as text. Row i is `unit` number `places[i]` of
    `source`. `unreadable` has the columns that are neither, and what they are.
    """

    name: str
    source: str
    columns: Mapping[str, np.ndarray]
    places: np.ndarray
    unit: str = "row"
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def where(self, row: int) -> str:
        """Say where a row is."""
        return f"{self.source}, {self.unit} {self.places[row]}"

    def take(self, rows: np.ndarray) -> "Table":
        """Return some of the rows."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return replace(self, columns=columns, places=self.places[rows])

    def is_numeric(self, name: str) -> bool:
        """Say whether a column is one of numbers: most of its values are, or all miss.

        A single word in it is then a mistake, and is refused where it is read.
        """
        values = self.columns[name]
        if values.dtype.kind in "buif":
            return True
        # Each different text is looked at once: a hostile one may be long, and repeat.
        there = Counter(as_texts(values))
        for gap in [text for text in there if _is_gap(text)]:
            del there[gap]
        numbers = sum(count for text, count in there.items() if _is_number(text))
        return 2 * numbers > there.total() or not there

    def is_missing(self, name: str) -> np.ndarray:
        """Mark the rows that have no value in a column."""
        values = self.columns[name]
        if values.dtype.kind in "buif":
            return np.isnan(values.astype(float))
        numeric = self.is_numeric(name)
        gaps = [not text or (numeric and _is_gap(text)) for text in as_texts(values)]
        return np.asarray(gaps, bool)


def _is_gap(text: str) -> bool:
    return len(text) <= _LONGEST_GAP and text.lower() in MISSING


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(parse_number(text))
    except ValueError:
        return False


def column_of(values: Sequence[Any]) -> np.ndarray | str:
    """Make a column of Python's values of any kind, or say which kind it cannot be."""
    if all(_is_missing(one) or isinstance(one, int | float) for one in values):
        try:
            return np.asarray(
                [math.nan if _is_missing(v) else float(v) for v in values]
            )
        except OverflowError:
            return "numbers of more than 300 digits"
    texts, stripped = np.empty(len(values), object), {}
    for row, value in enumerate(values):
        if _is_missing(value):
            texts[row] = ""
        elif isinstance(value, str):
            # Equal texts stay one object, however often they are there.
            texts[row] = stripped.setdefault(value, value.strip())
        elif isinstance(value, int | float):
            texts[row] = repr(value)
        elif hasattr(value, "isoformat"):  # a date or a time
            texts[row] = value.isoformat()
        else:
            return f"values of type {type(value).__name__}"
    return texts


def _is_missing(value: Any) -> bool:
    nan = isinstance(value, float) and math.isnan(value)
    return value is None or nan or type(value).__name__ in ("NAType", "NaTType")


def check_names(source: str, names: Sequence[str]) -> None:
    """Raise unless columns have different names that are not numbers."""
    if all(_is_number(name) for name in names):
        raise InvalidInputError(
            f"{source}, line 1: expected the names of the columns. Add a header row."
        )
    seen = set()
    for name in names:
        if name in seen:
            raise InvalidInputError(
                f"{source}, line 1: two columns are named '{name}'. Rename one."
            )
        seen.add(name)
