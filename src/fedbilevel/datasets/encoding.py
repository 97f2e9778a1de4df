"""From a table to a data set: which column is what, and which cannot be used."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbilevel._table_choices import TableChoices
from fedbilevel.datasets._base import Dataset
from fedbilevel.datasets.labels import as_classes
from fedbilevel.datasets.preparation import CategoryColumn, NumericColumn, Preparation
from fedbilevel.datasets.sums import Sums, as_texts
from fedbilevel.datasets.tables import Table
from fedbilevel.errors import InvalidInputError, unknown_name

_MOST_VALUES = 50  # of a column of text
_LONGEST_VALUE = 200  # characters
_FEWEST_TO_COUNT = 20  # rows from which 1, 2, 3, ... is no measurement
_FEWEST_TO_REPEAT = 10  # rows of which some must have the same text
# Columns of these names say where a row belongs and are no measurement.
_PLACES = ("site", "hospital", "client", "group")
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}")


class _Roles(NamedTuple):
    """The names of the columns, by what they are; `aside` says why some are unused."""

    label: str
    features: tuple[str, ...]
    aside: Mapping[str, str]


def sums_of_table(table: Table, choices: TableChoices, minimum: int = 1) -> Sums:
    """Return what a site reports of its table so that all can be prepared alike.

    Nothing of fewer than `minimum` rows is reported.
    """
    roles = _roles(table, choices)
    kept, _ = _dropped(table, roles, choices)
    return _sums(kept, roles, choices, minimum)


def encode_table(table: Table, choices: TableChoices) -> Dataset:
    """Make a data set of a table: numbers and one-hot texts, not yet scaled.

    `columns` has all columns as they were, so that each can say who holds what. What
    was encoded, left out, filled or dropped is in `notes`.
    """
    given = read_preparation(choices.preparation) if choices.preparation else None
    roles = _prepared_roles(table, choices, given) if given else _roles(table, choices)
    kept, dropped = _dropped(table, roles, choices)
    preparation = given or Preparation.fit(
        _sums(kept, roles, choices), gaps=choices.missing == "mean"
    )
    read = {
        one.name: kept.numbers(one.name)
        for one in preparation.columns
        if isinstance(one, NumericColumn)
    }
    features = preparation.encode({**kept.columns, **read}, kept.where)
    label = preparation.label.encode(kept.columns[roles.label], kept.where)
    texts = [one for one in preparation.columns if isinstance(one, CategoryColumn)]
    filled = {name: int(kept.is_missing(name).sum()) for name in roles.features}
    notes = {
        "label": roles.label,
        "numbers": [n for n in roles.features if n not in {one.name for one in texts}],
        "encoded": {one.name: list(one.values) for one in texts},
        "left_out": dict(roles.aside),
        "filled": {name: count for name, count in filled.items() if count},
        "dropped_rows": dropped,
        "table_rows": len(label),
    }
    return Dataset(
        table.name,
        features,
        label,
        preparation.label.classes,
        {name: _as_groups(values) for name, values in kept.columns.items()},
        preparation=preparation,
        places=kept.places,
        source=table.source,
        unit=table.unit,
        notes=notes,
    )


def read_preparation(path: str) -> Preparation:
    """Read a preparation from its file."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except ValueError:
        raise InvalidInputError(f"{path} is no text, so no preparation.") from None
    try:
        return Preparation.from_json(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def _roles(table: Table, choices: TableChoices) -> _Roles:
    names = [*table.columns, *table.unreadable]
    default = "label" if "label" in table.columns else list(table.columns)[-1]
    label = choices.label or default
    _check_chosen(table, choices, names, label)
    aside = {name: "ignored" for name in choices.ignored}
    used = {"site": choices.site, "group": choices.group_column}
    aside |= {name: f"says the {role}" for role, name in used.items() if name}
    for name in names:
        if name.lower() in _PLACES and name not in (label, *aside):
            aside[name] = f"its name says a place; --site {name} makes clients of it"
    features = [name for name in names if name not in (label, *aside)]
    found = {name: _trouble(table, name) for name in features}
    wrong = {name: why for name, why in found.items() if why}
    if wrong:
        listed = "; ".join(f"column '{name}' {why}" for name, why in wrong.items())
        them = "it" if len(wrong) == 1 else "them"
        raise InvalidInputError(
            f"{table.source}: {listed}. Leave {them} out with --ignore "
            f"{','.join(wrong)}, or make {them} numbers or a few words."
        )
    if not features:
        raise InvalidInputError(
            f"{table.source}: no column besides the label '{label}' holds numbers or "
            "text to learn from."
        )
    return _Roles(label, tuple(features), aside)


def _check_chosen(
    table: Table, choices: TableChoices, names: list[str], label: str
) -> None:
    chosen = (label, choices.site, choices.group_column, *choices.ignored)
    for name in chosen:
        if name and name not in names:
            raise unknown_name(f"column of {table.source}", name, names)
    for name in chosen[:3]:
        if name in table.unreadable:
            raise InvalidInputError(
                f"{table.source}: column '{name}' holds {table.unreadable[name]}. "
                "Choose a column of numbers or text."
            )
    for role, name in (("site", choices.site), ("group", choices.group_column)):
        if name == label:
            raise InvalidInputError(
                f"{table.source}: column '{label}' cannot be the label and the {role}. "
                "Choose the label with --label COLUMN."
            )
    if label in choices.ignored:
        raise InvalidInputError(
            f"{table.source}: column '{label}' is to be ignored and is the label. "
            "Choose the label with --label COLUMN."
        )


def _prepared_roles(
    table: Table, choices: TableChoices, preparation: Preparation
) -> _Roles:
    label = preparation.label.name
    if choices.label not in ("", label):
        raise InvalidInputError(
            f"label={choices.label}, but {choices.preparation} was made for the label "
            f"'{label}'. Leave --label out, or prepare again."
        )
    features = tuple(one.name for one in preparation.columns)
    for name in (label, *features):
        if name not in table.columns:
            raise unknown_name(f"column of {table.source}", name, table.columns)
    others = set(table.columns) - {label, *features}
    aside = {name: "not in the preparation" for name in sorted(others)}
    return _Roles(label, features, aside)


def _trouble(table: Table, name: str) -> str:
    """Say why a column is nothing to learn from; nothing if it is."""
    if name in table.unreadable:
        return f"holds {table.unreadable[name]}, neither numbers nor text"
    if not table.is_numeric(name):
        return _about_texts(as_texts(table.columns[name]))
    numbers = table.numbers(name)
    counts = len(numbers) >= _FEWEST_TO_COUNT and np.all(np.abs(np.diff(numbers)) == 1)
    rises = counts and len(np.unique(numbers)) == len(numbers)
    return "counts the rows, so it looks like an id" if rises else ""


def _about_texts(texts: list[str]) -> str:
    """Say why texts are no categories; nothing if they are."""
    there = [text for text in texts if text]
    different = set(there)
    if 2 * sum(_DATE.match(text) is not None for text in there) > len(there):
        return f"holds dates, such as '{there[0]:.40}'"
    if len(different) == len(there) >= _FEWEST_TO_REPEAT:
        return "has another text in every row, so it looks like an id or a name"
    if len(different) > _MOST_VALUES:
        return (
            f"has {len(different)} different texts in {len(texts)} rows; at most "
            f"{_MOST_VALUES} become features of 0 and 1"
        )
    if max(map(len, different), default=0) > _LONGEST_VALUE:
        return f"holds texts of more than {_LONGEST_VALUE} characters"
    return ""


def _dropped(table: Table, roles: _Roles, choices: TableChoices) -> tuple[Table, int]:
    """Return the table without rows that are to be dropped, and their number."""
    needed = [*filter(None, (roles.label, choices.site, choices.group_column))]
    if choices.missing == "drop":
        every = {*needed, *roles.features}
        gaps = np.any([table.is_missing(name) for name in every], axis=0)
        if gaps.all():
            raise InvalidInputError(
                f"{table.source}: every row misses a value, so --missing drop leaves "
                "none. Use --missing mean, or --ignore the emptiest columns."
            )
        return table.take(np.flatnonzero(~gaps)), int(gaps.sum())
    for name in needed:
        for row in np.flatnonzero(table.is_missing(name))[:1]:
            what = "label" if name == roles.label else "value"
            raise InvalidInputError(
                f"{table.where(row)}, column '{name}': the {what} is missing. Fill it "
                "in, or leave such rows out with --missing drop."
            )
    return table, 0


def _sums(table: Table, roles: _Roles, choices: TableChoices, minimum: int = 1) -> Sums:
    columns = {name: table.columns[name] for name in roles.features}
    for name in filter(table.is_numeric, roles.features):
        columns[name] = table.numbers(name)
    label = table.columns[roles.label]
    if choices.predict == "number" and not table.is_numeric(roles.label):
        raise InvalidInputError(
            f"{table.source}: the label '{roles.label}' holds text, so it is no number "
            "to predict. Choose another with --label COLUMN."
        )
    is_target = choices.predict == "number" or (
        choices.predict == "auto" and _has_fractions(table, roles.label)
    )
    if not is_target:
        as_classes(f"{table.source}, column '{roles.label}'", label)  # or why not
    how = {"is_target": is_target, "minimum": minimum}
    return Sums.of(columns, roles.label, label, **how)


def _has_fractions(table: Table, name: str) -> bool:
    if not table.is_numeric(name):
        return False
    try:
        numbers = table.numbers(name)
    except InvalidInputError:
        return False  # most are numbers, some are words: classes
    return bool(np.any(numbers != np.floor(numbers)))


def _as_groups(values: np.ndarray) -> np.ndarray:
    """Return what says who holds what; as whole numbers, 10 comes after 9."""
    if values.dtype.kind in "buif":
        numbers = values.astype(float)
        whole = (np.abs(numbers) < 2**53) & (numbers == np.floor(numbers))
        return values.astype(np.int64) if whole.all() else values
    try:
        return np.asarray([int(text) for text in values])
    except (ValueError, OverflowError):
        return values
