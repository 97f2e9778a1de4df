"""Measured results of methods on tasks, as shipped in `field.json`.

It is a list of rows, one for each setting (a task, or a task and a word after a dash)
and method: `metric` and its `mean` over seeds, `early` after a tenth of the rounds,
`exchanges`, `megabytes`, `samples`, `seconds`, and `diverged`, the share of trials that
did; or `failed`, with the reason. A row with a `note` cannot be compared, for the
reason that it gives. `benchmarks/field.py` writes it. A lower mean is better.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

Row = Mapping[str, Any]
MANY = 2.5  # two exchanges a round, and one now and then, are not many


class Place(NamedTuple):
    """Where a method came among those that are compared: the first has rank 1."""

    rank: int
    among: int
    row: Row


def shipped() -> list[Row]:
    """Return the rows that come with the package."""
    place = resources.files("fedbilevel.experiments") / "field.json"
    return json.loads(place.read_text("utf-8"))


def settings_of(rows: Sequence[Row], task: str) -> list[str]:
    """Return the settings of a task that were measured, the plain one first."""
    every = {row["setting"] for row in rows}
    own = [one for one in every if one == task or one.startswith(f"{task}-")]
    return sorted(own, key=lambda one: (len(one), one))


def places(
    rows: Sequence[Row], setting: str, names: Collection[str], column: str
) -> dict[str, Place]:
    """Return the places of some methods in one setting, by one column.

    Early on exchanges count: a method with over `MANY` times as many in a round as the
    most frugal one comes after all others.
    """
    found = [
        row
        for row in rows
        if row["setting"] == setting
        and row["method"] in names
        and "note" not in row
        and math.isfinite(row.get(column, math.nan))
    ]
    fewest = min((row["exchanges"] for row in found), default=0)

    def order(row: Row) -> tuple:
        many = column == "early" and row["exchanges"] > MANY * fewest
        return many, row[column], row["method"]

    found.sort(key=order)
    return {
        row["method"]: Place(rank, len(found), row) for rank, row in enumerate(found, 1)
    }
