"""From a table to a data set: which column is what, and which cannot be used."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbilevel._table_choices import TableChoices, ignoring
from fedbilevel.datasets import troubles
from fedbilevel.datasets._base import Dataset
from fedbilevel.datasets.cells import as_classes
from fedbilevel.datasets.preparation import CategoryColumn, Preparation
from fedbilevel.datasets.sums import Sums
from fedbilevel.datasets.tables import Table
from fedbilevel.errors import InvalidInputError, unknown_name

_MOST_CLASSES = 30  # whole numbers beyond which they may be a measurement
# Columns of these names say where a row belongs and are no measurement.
_PLACES = ("site", "hospital", "client", "group")


class _Roles(NamedTuple):
    """The names of the columns, by what they are; `aside` says why some are unused."""

    label: str
    features: tuple[str, ...]
    aside: dict[str, str]


def sums_of_table(table: Table, choices: TableChoices, minimum: int) -> Sums:
    """Return what a site reports of its table so that all can be prepared alike.

    Nothing of fewer than `minimum` rows is reported.
    """
    roles = _roles(table, choices)
    return _sums(_kept(table, roles, choices), roles, choices, minimum)


def encode_table(table: Table, choices: TableChoices) -> Dataset:
    """Make a data set of a table: numbers and one-hot texts, not yet scaled.

    `columns` has all columns as they were, so that each can assign rows to sites.
    `notes` says which were encoded, left out, filled or dropped.
    """
    given = read_preparation(choices.preparation) if choices.preparation else None
    used = given.names if given else set(table.columns) - {*choices.ignored}
    table = table.understood(choices, used)
    roles = _prepared_roles(table, choices, given) if given else _roles(table, choices)
    kept = _kept(table, roles, choices)
    made = given
    if made is None:
        sums = _sums(kept, roles, choices, minimum=1)  # which stay here
        try:
            made = Preparation.fit(sums, gaps=choices.missing == "mean")
        except InvalidInputError as error:
            raise InvalidInputError(f"{table.source}: {error}") from None
    read = read_columns(kept, made)
    features = made.encode(read, kept.where)
    return Dataset(
        table.name,
        features,
        made.label.encode(read[roles.label], kept.where),
        made.label.classes,
        {name: _as_groups(values) for name, values in kept.columns.items()},
        preparation=made,
        places=kept.places,
        source=table.source,
        unit=table.unit,
        notes=_notes(table, kept, roles, made),
    )


def _notes(
    table: Table, kept: Table, roles: _Roles, preparation: Preparation
) -> dict[str, Any]:
    """Say what was done to the columns."""
    learned = [one.name for one in preparation.columns]
    texts = [one for one in preparation.columns if isinstance(one, CategoryColumn)]
    encoded = {one.name: list(one.values) for one in texts}
    numbers = {name: kept.numbers(name) for name in learned if name not in encoded}
    gaps = {name: int(np.isnan(one).sum()) for name, one in numbers.items()}
    ids = [name for name, one in numbers.items() if troubles.is_like_id(one)]
    alike = [name for name in roles.features if name not in learned]
    return {
        "label": roles.label,
        "read_as": kept.reading(),
        "learned": learned,
        "encoded": encoded,
        "left_out": roles.aside | dict.fromkeys(alike, "the same in every row"),
        "filled": {name: count for name, count in gaps.items() if count},
        "dropped_rows": len(table.places) - len(kept.places),
        "table_rows": len(kept.places),
        **({"like_ids": {name: ignoring([name]) for name in ids}} if ids else {}),
    }


def read_columns(table: Table, preparation: Preparation) -> dict[str, np.ndarray]:
    """Return the columns of a table, as numbers where the preparation has numbers."""
    numbers = [name for name in preparation.numbers if name in table.columns]
    return {**table.columns, **{name: table.numbers(name) for name in numbers}}


def read_preparation(path: str) -> Preparation:
    """Read a preparation from its file."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        return Preparation.from_json(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None
    except ValueError:
        raise InvalidInputError(f"{path} is no text, so no preparation.") from None


def _roles(table: Table, choices: TableChoices) -> _Roles:
    names = [*table.columns, *table.unreadable]
    default = "label" if "label" in table.columns else list(table.columns)[-1]
    label = choices.label or default
    _check_chosen(table, choices, label)
    aside = {name: "ignored" for name in choices.ignored}
    used = {"site": choices.site, "group": choices.group_column}
    aside |= {name: f"says the {role}" for role, name in used.items() if name}
    for name in names:
        if name.lower() in _PLACES and name not in (label, *aside):
            aside[name] = f"its name says a place; --site {name} makes clients of it"
    features = [name for name in names if name not in (label, *aside)]
    unused = {n: why for n in features if (why := troubles.useless(table, n))}
    numbers = [n for n in features if n not in unused and table.is_numeric(n)]
    refused = [n for n in numbers if not table.is_missing(n).all()]
    refused = refused if choices.missing == "refuse" else []
    troubles.check_cells(table, unused, numbers, _needed(label, choices, refused))
    if not features:
        raise InvalidInputError(
            f"{table.source}: no column besides the label '{label}' holds numbers or "
            "text to learn from."
        )
    return _Roles(label, tuple(features), aside)


def _needed(
    label: str, choices: TableChoices, numbers: Iterable[str]
) -> dict[str, str]:
    """Return the columns of which no value may be missing, and what is in them."""
    if choices.missing == "drop":
        return {}
    where = {name: "value" for name in (choices.site, choices.group_column) if name}
    return {label: "label", **where, **dict.fromkeys(numbers, "number")}


def _check_chosen(table: Table, choices: TableChoices, label: str) -> None:
    names = [*table.columns, *table.unreadable]
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
    others = dict.fromkeys(choices.ignored, "is to be ignored and is the label")
    others[choices.group_column] = "cannot be the label and the group"
    others[choices.site] = "cannot be the label and the site"
    if label in others:
        raise InvalidInputError(
            f"{table.source}: column '{label}' {others[label]}. Choose the label with "
            "--label COLUMN."
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
    troubles.check_columns(table, preparation.names, choices.preparation)
    unfilled = [n for n, fill in preparation.numbers.items() if fill is None]
    needed = _needed(label, choices, [n for n in unfilled if n != label])
    troubles.check_cells(table, {}, preparation.numbers, needed, fitted=True)
    others = set(table.columns) - {label, *features}
    aside = {name: "not in the preparation" for name in sorted(others)}
    return _Roles(label, features, aside)


def _kept(table: Table, roles: _Roles, choices: TableChoices) -> Table:
    """Return the table without rows that are to be dropped."""
    if choices.missing != "drop":
        return table
    needed = filter(None, (roles.label, choices.site, choices.group_column))
    marked = [table.is_missing(name) for name in {*needed, *roles.features}]
    # A column that is empty in every row is left out by itself.
    gaps = np.any([one for one in marked if not one.all()] or marked, axis=0)
    if gaps.all():
        raise InvalidInputError(
            f"{table.source}: every row misses a value, so --missing drop leaves none. "
            "Use --missing mean, or --ignore the emptiest columns."
        )
    return table.take(np.flatnonzero(~gaps))


def _sums(table: Table, roles: _Roles, choices: TableChoices, minimum: int) -> Sums:
    columns = {name: table.columns[name] for name in roles.features}
    for name in filter(table.is_numeric, roles.features):
        columns[name] = table.numbers(name)
    is_target, label = _is_target(table, roles.label, choices), roles.label
    held = table.numbers(label) if is_target else table.columns[label]
    if not is_target:
        as_classes(f"{table.source}, column '{label}'", held)  # or why not
    return Sums.of(columns, label, held, is_target=is_target, minimum=minimum)


def _is_target(table: Table, name: str, choices: TableChoices) -> bool:
    """Say whether a label is a number to be predicted; raise if that is unclear."""
    numbers = table.numbers(name)
    numeric = table.is_numeric(name) and not np.isinf(numbers).any()
    if choices.label_kind == "number" and not numeric:
        raise InvalidInputError(
            f"{table.source}: the label '{name}' holds text, so it is no number to "
            "predict. Choose another with --label COLUMN."
        )
    # Where most are numbers and some are words, they are classes.
    if choices.label_kind != "auto" or not numeric:
        return choices.label_kind == "number"
    different = np.unique(numbers)
    if np.any(numbers != np.floor(numbers)):
        return True
    if len(different) > _MOST_CLASSES:
        raise InvalidInputError(
            f"{table.source}: the label '{name}' has {len(different)} different whole "
            f"numbers, from {different[0]:g} to {different[-1]:g}. Say --label-kind "
            "number if they measure something, or --label-kind classes if they name "
            "classes."
        )
    return False


def _as_groups(values: np.ndarray) -> np.ndarray:
    """Return the site of every row; as whole numbers, 10 comes after 9."""
    if values.dtype.kind in "buif":
        numbers = values.astype(float)
        whole = (np.abs(numbers) < 2**53) & (numbers == np.floor(numbers))
        return values.astype(np.int64) if whole.all() else values
    try:
        return np.asarray([int(text) for text in values])
    except (ValueError, OverflowError):
        return values
