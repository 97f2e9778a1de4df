"""The rows of one call of `fit`: at which sites they are, and which of them judge."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils import check_consistent_length, column_or_1d

from fedbilevel.datasets import Dataset, Preparation
from fedbilevel.datasets.preparation import ClassLabel, TargetLabel
from fedbilevel.errors import InvalidInputError

LARGEST_SEED = 2**31 - 1


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


@dataclass
class Table:
    """The rows of one call of `fit`, checked; `columns` has their sites.

    Whatever is random in this call is drawn by `draw`.
    """

    X: np.ndarray
    label: ClassLabel | TargetLabel
    y: np.ndarray
    columns: dict[str, np.ndarray]
    draw: np.random.Generator

    def seed(self) -> int:
        """Draw the seed of a run."""
        return int(self.draw.integers(LARGEST_SEED))

    def dataset(self, names: Sequence[str], validation: np.ndarray | None) -> Dataset:
        """Return the rows as a task takes them, some of them marked as judges.

        Where none is, they take turns, and no row is put aside for testing.
        """
        spread = self.X.std(axis=0)
        spread = np.where(spread > 0, spread, 1)
        scaled = Preparation.of_arrays(self.X.mean(axis=0), spread, (), names)
        made = Dataset(
            "X",
            self.X,
            self.y,
            self.label.classes,
            self.columns,
            preparation=replace(scaled, label=self.label),
            validation=validation,
        )
        return replace(made, test=made if validation is None else None)

    def _by_site(self, sites: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows of each site, those that are alike next to each other."""
        group = [self.columns["group"]] if "group" in self.columns else []
        order = np.lexsort((self.draw.random(len(sites)), self.y, *group))
        return {str(name): order[sites[order] == name] for name in np.unique(sites)}

    def judges(self, share: float) -> np.ndarray:
        """Mark a share of the rows of every site, and of every class and group."""
        if not 0 < share < 1:
            raise InvalidInputError(
                f"validation={share}: give the share of the rows that judge, above 0 "
                "and below 1."
            )
        marks = np.zeros(len(self.y), bool)
        for name, rows in self._by_site(self.columns["site"]).items():
            if len(rows) < 2:
                raise InvalidInputError(
                    f"site '{name}' has 1 sample, and needs one to train on and one "
                    "that judges. Leave it out, or ask for fewer clients."
                )
            count = min(max(round(share * len(rows)), 1), len(rows) - 1)
            # Evenly spaced, so that each class gives its share.
            spaced = (np.arange(count) + 0.5) * len(rows) / count
            marks[rows[spaced.astype(int)]] = True
        return marks

    def folds(self, sites: np.ndarray, count: int) -> np.ndarray:
        """Return in which of so many parts each row judges; all sites are in each."""
        if count < 2:
            raise InvalidInputError(f"folds={count}: there must be at least two.")
        numbers = np.zeros(len(sites), int)
        for name, rows in self._by_site(sites).items():
            if len(rows) < count:
                raise InvalidInputError(
                    f"site '{name}' has {len(rows)} sample(s), fewer than the {count} "
                    "folds. Leave it out, or ask for fewer folds or clients."
                )
            numbers[rows] = np.arange(len(rows)) % count
        return numbers
