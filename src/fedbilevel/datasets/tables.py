"""CSV tables with a header row."""

import csv
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbilevel.datasets._base import Dataset, Part, assemble, open_text, reading
from fedbilevel.errors import InvalidInputError

__all__ = ["load_csv"]

# Numbers in these columns say where a sample belongs and are no measurement.
_GROUPS = {"site", "hospital", "client", "group"}


def load_csv(path: Path) -> Dataset:
    """Load a table: the label is the column `label`, or else the last one.

    A column in which most values are numbers is a feature and must hold numbers only.
    Text, and columns named site, hospital, client or group, become columns.
    """
    with reading(path, "CSV"), open_text(path) as file:
        header, lines, rows = _read(path, csv.reader(file))
    texts = dict(zip(header, zip(*rows, strict=True), strict=True))
    chosen = "label" if "label" in texts else header[-1]
    label = texts.pop(chosen)
    if "" in label:
        raise InvalidInputError(
            f"{path}, line {lines[label.index('')]}, column '{chosen}': the label is "
            "missing. Fill it in or drop the row."
        )
    features, columns = [], {}
    for name, values in texts.items():
        if name.lower() in _GROUPS or not _mostly_numbers(values):
            columns[name] = _group(values)
        else:
            features.append(_feature(path, name, lines, values))
    if not features:
        raise InvalidInputError(
            f"{path}: no column besides the label '{chosen}' holds numbers. Features "
            "must be numbers."
        )
    part = Part(np.stack(features, axis=1), np.asarray(label), columns)
    return assemble(path.name.removesuffix(".gz").removesuffix(".csv"), part)


def _read(path: Path, reader) -> tuple[list[str], list[int], list[list[str]]]:
    header = [name.strip() for name in next(reader, [])]
    if all(_number(name) is not None for name in header):
        raise InvalidInputError(
            f"{path}, line 1: expected the names of the columns. Add a header row."
        )
    for name, count in Counter(header).items():
        if count > 1:
            raise InvalidInputError(
                f"{path}, line 1: two columns are named '{name}'. Rename one."
            )
    lines, rows = [], []
    for row in reader:
        if any("\0" in text for text in row):
            raise InvalidInputError(
                f"{path}, line {reader.line_num}: it holds a byte 0, so it is no text. "
                "Save the table again, as UTF-8."
            )
        if row:
            lines.append(reader.line_num)
            rows.append([text.strip() for text in row])
        if row and len(row) != len(header):
            raise InvalidInputError(
                f"{path}, line {reader.line_num}: {len(row)} values, but the header "
                f"names {len(header)} columns. Check quotes and commas."
            )
    if not rows:
        raise InvalidInputError(f"{path} has a header but no rows.")
    return header, lines, rows


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _mostly_numbers(values: Sequence[str]) -> bool:
    found = sum(_number(text) is not None for text in values)
    return 2 * found > len(values)


def _feature(
    path: Path, name: str, lines: Sequence[int], values: Sequence[str]
) -> np.ndarray:
    numbers = []
    for line, text in zip(lines, values, strict=True):
        number = _number(text)
        if number is None:
            raise InvalidInputError(
                f"{path}, line {line}, column '{name}': '{text}' is not a finite "
                "number. Correct it, or drop the row or the column."
            )
        numbers.append(number)
    return np.asarray(numbers)


def _group(values: Sequence[str]) -> np.ndarray:
    # As whole numbers, group 10 comes after group 9.
    try:
        return np.asarray([int(text) for text in values])
    except (ValueError, OverflowError):
        return np.asarray(values)
