"""Cells of tables: the texts, numbers and labels that people write in them."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedbilevel.errors import InvalidInputError

Columns: TypeAlias = Mapping[str, np.ndarray]
# Says where a row is.
Where: TypeAlias = Callable[[int], str]
numbered: Where = "row {}".format
# Markers of missing numbers, in lower case.
MISSING = frozenset({"", "na", "n/a", "nan", "null"})
# Numbers as people write them, by their decimal mark: thousands may be apart.
_WRITTEN = {
    mark: re.compile(
        rf"[+-]?(\d+|[1-9]\d{{0,2}}(?P<apart>[{others}])\d{{3}}((?P=apart)\d{{3}})*)?"
        rf"([{mark}]\d*)?([eE][+-]?\d+)?",
        re.ASCII,
    )
    for mark, others in ((".", ",' \u2019\u00a0\u202f"), (",", ".' \u2019\u00a0\u202f"))
}
_LONGEST_GAP, _LONGEST_NUMBER = max(map(len, MISSING)), 400  # characters


def as_texts(values: np.ndarray) -> list[str]:
    """Return texts; what is missing is empty."""
    every = values.tolist() if values.dtype == object else values
    return list(map(as_text, every))


def as_text(value: Any) -> str:
    """Return a text; what is missing is empty."""
    return "" if value is None else str(value)


def is_gap(text: str) -> bool:
    """Say whether a text stands where a number is missing."""
    return len(text) <= _LONGEST_GAP and text.lower() in MISSING


def parse_number(text: str, decimal: str = ".") -> float:
    """Return the number that a text is, NaN if it is missing; else raise ValueError.

    Thousands may be apart by a comma, or a point where `decimal` is a comma, by a space
    or by an apostrophe.
    """
    number = _or_infinity(text, decimal)
    if math.isinf(number):
        raise ValueError(f"{text:.80} is no number")
    return number


def is_number(text: str, decimal: str = ".") -> bool:
    """Say whether a text is a finite number."""
    return math.isfinite(_or_infinity(text, decimal))


def parsed(values: np.ndarray, decimal: str = ".") -> np.ndarray:
    """Return the numbers of a column: NaN is missing, and infinity is no number."""
    values = np.asarray(values)
    if values.dtype.kind in "buif":
        return values.astype(float)
    if decimal == "." and values.dtype == object:
        try:  # most columns hold plain numbers and empty cells alone
            if max(map(len, values), default=0) <= _LONGEST_NUMBER:
                return np.where(values == "", "nan", values).astype(float)
        except (TypeError, ValueError):
            pass
    texts = as_texts(values)
    # Each different text is looked at once: a hostile one may be long, and repeat.
    known = {text: _or_infinity(text, decimal) for text in dict.fromkeys(texts)}
    return np.fromiter(map(known.__getitem__, texts), float, len(texts))


def _or_infinity(text: str, decimal: str) -> float:
    """Return the number that a text is; NaN if it is missing, infinity if none."""
    if decimal == "." or not ("." in text or "," in text):
        try:
            return float(text)
        except ValueError:
            pass
    text = text.strip()
    if is_gap(text):
        return math.nan
    found = len(text) <= _LONGEST_NUMBER and _WRITTEN[decimal].fullmatch(text)
    if not found:
        return math.inf
    apart = found["apart"]
    plain = text.replace(apart, "") if apart else text
    try:
        return float(plain.replace(",", ".") if decimal == "," else plain)
    except ValueError:  # a sign or a mark alone
        return math.inf


def as_numbers(name: str, values: np.ndarray, where: Where = numbered) -> np.ndarray:
    """Return the numbers of a column; those that are missing are NaN.

    `where(row)` says in errors where a row is.
    """
    numbers = parsed(values)
    for row in np.flatnonzero(np.isinf(numbers))[:1]:
        raise InvalidInputError(
            f"{where(int(row))}, column '{name}': '{values[row]!s:.80}' is not a "
            "finite number. Correct it."
        )
    return numbers


def as_targets(name: str, values: np.ndarray, where: Where = numbered) -> np.ndarray:
    """Return the numbers of a column of which none is missing."""
    numbers = as_numbers(name, values, where)
    for row in np.flatnonzero(np.isnan(numbers))[:1]:
        raise InvalidInputError(
            f"{where(int(row))}, column '{name}': the label is missing. Fill it in, or "
            "leave such rows out with --missing drop."
        )
    return numbers


def _plain(name: str, label: np.ndarray) -> np.ndarray:
    """Return labels as integers, truth values or text that is no number."""
    if label.ndim != 1:
        raise InvalidInputError(
            f"{name}: labels have shape {label.shape}. Give one class per sample."
        )
    if label.dtype.kind == "O":
        for row, value in enumerate(label):
            if not isinstance(value, str | int | np.integer):
                raise InvalidInputError(
                    f"{name}: the label of row {row} is {value!r}. Give text or a "
                    "whole number, or drop the row."
                )
    if label.dtype.kind in "OSU":
        label = label.astype(str)
        try:
            with np.errstate(over="ignore"):  # what that makes infinite is named below
                label = label.astype(float)
        except ValueError:
            return label
    if label.dtype.kind == "f":
        # Beyond this neighbors among the whole numbers would be the same class.
        whole = (label == np.floor(label)) & (np.abs(label.astype(float)) < 2**53)
        wrong = np.flatnonzero(~np.isfinite(label) | ~whole)
        if len(wrong):
            raise InvalidInputError(
                f"{name}: the label of row {wrong[0]} is {label[wrong[0]]}. Labels "
                "are classes: text, or whole numbers of at most 15 digits."
            )
        return label.astype(np.int64)
    if label.dtype.kind not in "biu":
        raise InvalidInputError(f"{name}: labels cannot be of type {label.dtype}.")
    return label


def coded_labels(
    name: str, labels: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return labels of several parts as numbers from zero, and their classes."""
    labels = [_plain(name, label) for label in labels]
    if sum(len(label) for label in labels) == 0:
        raise InvalidInputError(f"{name} has no samples.")
    values, codes = np.unique(np.concatenate(labels), return_inverse=True)
    classes = _with_sign(tuple(str(value) for value in values))
    ends = np.cumsum([len(label) for label in labels])[:-1]
    return np.split(codes.astype(np.int32), ends), classes


def as_classes(name: str, label: np.ndarray) -> list[str]:
    """Return the names of the classes of labels of any kind."""
    return [str(value) for value in _plain(name, np.asarray(label))]


def class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of classes in their order: numbers by size, else by the alphabet."""
    different = sorted(set(names))
    try:
        different.sort(key=int)
    except ValueError:
        pass
    return _with_sign(tuple(different))


def _with_sign(classes: tuple[str, ...]) -> tuple[str, ...]:
    return ("-1", "+1") if classes == ("-1", "1") else classes
