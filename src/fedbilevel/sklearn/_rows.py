"""The site of every row of a table, and the rows for validation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.utils import check_consistent_length, column_or_1d

from fedbilevel.errors import InvalidInputError


def as_column(name: str, values: Any, rows: int) -> np.ndarray:
    """Return one text for every row; what is missing is refused."""
    column = column_or_1d(values)
    check_consistent_length(range(rows), column)
    for row, value in enumerate(column):
        if value is None or value != value:
            raise InvalidInputError(f"{name}: that of row {row} is missing.")
    return np.asarray([str(value) for value in column])


def dealt(
    sites: Any, clients: int | None, rows: int, draw: np.random.Generator
) -> np.ndarray:
    """Return the site of every row, drawn at random if none is given."""
    if sites is not None:
        column = as_column("sites", sites, rows)
        found = len(np.unique(column))
        if clients not in (None, found):
            raise InvalidInputError(
                f"clients={clients}, but `sites` names {found}. Leave clients out."
            )
        return column
    count = 1 if clients is None else clients
    if count < 1:
        raise InvalidInputError(f"clients={clients}: there must be at least one.")
    numbers = draw.permutation(rows) % count
    return np.asarray([f"site {number}" for number in numbers])


def _by_site(
    sites: np.ndarray, likeness: Sequence[np.ndarray], draw: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the rows of each site, those that are alike next to each other."""
    order = np.lexsort((draw.random(len(sites)), *likeness))
    return {str(name): order[sites[order] == name] for name in np.unique(sites)}


def judges(
    sites: np.ndarray,
    likeness: Sequence[np.ndarray],
    share: float,
    draw: np.random.Generator,
) -> np.ndarray:
    """Mark a share of the rows of every site, and of those that are alike."""
    if not 0 < share < 1:
        raise InvalidInputError(
            f"validation={share}: give the share of the rows that judge, above 0 and "
            "below 1."
        )
    marks = np.zeros(len(sites), bool)
    for name, rows in _by_site(sites, likeness, draw).items():
        if len(rows) < 2:
            raise InvalidInputError(
                f"site '{name}' has 1 sample, and needs one to train on and one that "
                "judges. Leave it out, or ask for fewer clients."
            )
        count = min(max(round(share * len(rows)), 1), len(rows) - 1)
        # Evenly spaced, so that each class gives its share.
        spaced = (np.arange(count) + 0.5) * len(rows) / count
        marks[rows[spaced.astype(int)]] = True
    return marks


def folds(
    sites: np.ndarray,
    likeness: Sequence[np.ndarray],
    count: int,
    draw: np.random.Generator,
) -> np.ndarray:
    """Return in which of so many parts each row judges; all sites are in each part."""
    if count < 2:
        raise InvalidInputError(f"folds={count}: there must be at least two.")
    numbers = np.zeros(len(sites), int)
    for name, rows in _by_site(sites, likeness, draw).items():
        if len(rows) < count:
            raise InvalidInputError(
                f"site '{name}' has {len(rows)} sample(s), fewer than the {count} "
                "folds. Leave it out, or ask for fewer folds or clients."
            )
        numbers[rows] = np.arange(len(rows)) % count
    return numbers
