"""How raw columns become the features that a model sees, and labels its answers.

A `Preparation` is fitted from `Sums`, which every site makes of its own rows and which
merge: the same preparation results from pooled rows and from merged sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from fedbilevel.datasets import _preparation_files as files
from fedbilevel.datasets import cells
from fedbilevel.datasets.cells import Columns, Where, numbered
from fedbilevel.datasets.sums import EMPTY, OTHER, Moments, Sums
from fedbilevel.errors import InvalidInputError

_POSITIVE = {"above": 0}


def _missing(place: str, name: str, kind: str) -> InvalidInputError:
    return InvalidInputError(
        f"{place}, column '{name}': the {kind} is missing. Fill it in, or give "
        "--missing mean to put the mean in its place, or --missing drop to leave such "
        "rows out."
    )


class Unseen(NamedTuple):
    """A text that a column did not have when it was prepared."""

    row: int
    column: str
    text: str


# Where a caller collects them; without it they are refused.
Noted: TypeAlias = list[Unseen] | None


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers, centered and divided by its spread.

    `fill` stands for a missing number; where it is None, none may be missing.
    """

    name: str
    center: float
    spread: float = field(metadata=_POSITIVE)
    fill: float | None = None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features made of it."""
        return (self.name,)

    def encode(self, values: np.ndarray, where: Where = numbered) -> np.ndarray:
        """Return the numbers, as one column."""
        numbers = cells.as_numbers(self.name, values, where)
        missing = np.isnan(numbers)
        if missing.any() and self.fill is None:
            raise _missing(where(int(np.argmax(missing))), self.name, "number")
        filled = numbers if self.fill is None else np.where(missing, self.fill, numbers)
        return filled[:, None]


@dataclass(frozen=True)
class CategoryColumn:
    """A column of text: one feature for each value, 1 where the row has it, else 0.

    A value that was not there when the columns were prepared is `OTHER` where sites had
    such, and else refused by its name, or noted where an encoder is given a list for
    it. A missing one, the empty text, is a value, too: `EMPTY`. Where it was not there,
    it gives zeros if `gaps` are allowed.
    """

    name: str
    values: tuple[str, ...]
    gaps: bool = False
    center: ClassVar[float] = 0.0
    spread: ClassVar[float] = 1.0

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features made of it."""
        return tuple(f"{self.name}={value}" for value in self.values)

    def encode(
        self, values: np.ndarray, where: Where = numbered, unseen: Noted = None
    ) -> np.ndarray:
        """Return one column of zeros and ones for each value."""
        places = {value: place for place, value in enumerate(self.values)}
        ones = np.zeros((len(values), len(places)))
        for row, text in enumerate(cells.as_texts(values)):
            place = places.get(text or EMPTY, places.get(OTHER))
            if place is not None:
                ones[row, place] = 1
            elif self.gaps and not text:
                continue
            elif unseen is not None:
                unseen.append(Unseen(row, self.name, text or EMPTY))
            elif not text:
                raise _missing(where(row), self.name, "text")
            else:
                raise InvalidInputError(
                    f"{where(row)}, column '{self.name}': '{text:.80}' is none of the "
                    f"values that the model knows: {', '.join(self.values[:20])}. "
                    "Correct it, or drop the row."
                )
        return ones


@dataclass(frozen=True)
class ClassLabel:
    """A column of classes; a label's code is its place among them."""

    name: str
    classes: tuple[str, ...]

    def encode(self, values: np.ndarray, where: Where = numbered) -> np.ndarray:
        """Return the codes of labels."""
        places = {name: code for code, name in enumerate(self.classes)}
        places |= {"1": places["+1"]} if "+1" in places else {}
        names = cells.as_classes(f"column '{self.name}'", values)
        for row, name in enumerate(names):
            if name not in places:
                raise InvalidInputError(
                    f"{where(row)}, column '{self.name}': '{name:.80}' is none of the "
                    f"classes {', '.join(self.classes[:20])}."
                )
        return np.asarray([places[name] for name in names], np.int32)


@dataclass(frozen=True)
class TargetLabel:
    """A column of numbers to be predicted, centered and divided by its spread."""

    name: str
    center: float
    spread: float = field(metadata=_POSITIVE)
    classes: ClassVar[tuple[str, ...]] = ()

    def encode(self, values: np.ndarray, where: Where = numbered) -> np.ndarray:
        """Return the targets as a model sees them."""
        return (cells.as_targets(self.name, values, where) - self.center) / self.spread

    def decode(self, predicted: np.ndarray) -> np.ndarray:
        """Return predictions in the units of the column."""
        return self.center + self.spread * np.asarray(predicted)


Column = NumericColumn | CategoryColumn
Label = ClassLabel | TargetLabel
_COLUMNS = {"number": NumericColumn, "text": CategoryColumn}
_LABELS = {"classes": ClassLabel, "number": TargetLabel}


@dataclass(frozen=True)
class Preparation:
    """Transforms of columns before a model sees them; others are left out.

    `sites` are the rows of clients 0, 1, ... of a federation, where they were counted.
    """

    columns: tuple[Column, ...]
    label: Label
    sites: tuple[int, ...] = ()

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features, in the order in which a model has them."""
        return tuple(name for one in self.columns for name in one.feature_names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, and of the label."""
        return (*(one.name for one in self.columns), self.label.name)

    @property
    def numbers(self) -> dict[str, float | None]:
        """The columns that hold numbers, and what stands for one that is missing."""
        found = {o.name: o.fill for o in self.columns if isinstance(o, NumericColumn)}
        return found | ({self.label.name: None} if not self.label.classes else {})

    def encode(
        self, columns: Columns, where: Where = numbered, unseen: Noted = None
    ) -> np.ndarray:
        """Return filled numbers and one-hot texts, not yet scaled.

        `where(row)` says in errors where a row is, such as a line of a file. Texts that
        no feature stands for are added to `unseen`, and refused without it.
        """
        for one in self.columns:
            if one.name not in columns:
                held = ", ".join(list(columns)[:50])
                raise InvalidInputError(
                    f"there is no column '{one.name}', which the model needs. There "
                    f"are {held or 'none'}."
                )
        every = []
        for one in self.columns:
            noted = (unseen,) if isinstance(one, CategoryColumn) else ()
            every.append(one.encode(columns[one.name], where, *noted))
        return np.hstack(every)

    def scale(self, encoded: np.ndarray) -> np.ndarray:
        """Center and scale what `encode` returned; zeros and ones stay."""
        center, spread = self.scales.T
        return (encoded - center) / spread

    def apply(
        self, columns: Columns, where: Where = numbered, unseen: Noted = None
    ) -> np.ndarray:
        """Return the features of rows: what a model was trained on."""
        return self.scale(self.encode(columns, where, unseen))

    @property
    def scales(self) -> np.ndarray:
        """The center and the spread of every feature, a row each."""
        every = [one for one in self.columns for _ in one.feature_names]
        return np.asarray([(one.center, one.spread) for one in every])

    @staticmethod
    def fit(sums: Sums, *, gaps: bool = False) -> "Preparation":
        """Make a preparation from the sums of all sites, merged.

        With `gaps` missing numbers are filled with the mean; else they are refused.
        Columns that are constant, or that no site reports, are left out.
        """
        columns: list[Column] = []
        for name, found in sums.columns.items():
            if isinstance(found, Moments) and found.varies:
                fill = found.mean if gaps else None
                columns.append(NumericColumn(name, found.mean, found.spread, fill))
            elif not isinstance(found, Moments) and len(found) > 1:
                columns.append(CategoryColumn(name, found, gaps))
        if not columns:
            raise InvalidInputError(
                f"none of the columns {', '.join(list(sums.columns)[:20])} differs "
                "between rows, so there is nothing to learn from."
            )
        if isinstance(sums.label, Moments):
            moments = sums.label
            label: Label = TargetLabel(sums.label_name, moments.mean, moments.spread)
        else:
            label = ClassLabel(sums.label_name, cells.class_names(sums.label))
        return Preparation(tuple(columns), label)

    @staticmethod
    def of_arrays(
        center: np.ndarray,
        spread: np.ndarray,
        classes: tuple[str, ...],
        names: Sequence[str] = (),
    ) -> "Preparation":
        """Describe how the columns of an array were scaled; without names, numbered."""
        called = list(map(str, names)) or [f"feature {n}" for n in range(len(center))]
        every = zip(called, map(float, center), map(float, spread), strict=True)
        columns = tuple(NumericColumn(*one) for one in every)
        return Preparation(columns, ClassLabel("label", classes))

    def to_json(self) -> str:
        """Return it as text; `from_json` reads that back, to the last bit."""
        columns = [files.kinded(one, _COLUMNS) for one in self.columns]
        label = {"name": self.label.name, **files.kinded(self.label, _LABELS)}
        sites = {"sites": self.sites} if self.sites else {}
        content = {"columns": columns, "label": label, **sites}
        return files.write("preparation", content)

    @staticmethod
    def from_json(text: str) -> "Preparation":
        """Read what `to_json` wrote; anything else is refused."""
        names = ("columns", "label")
        content = files.Node.of(text, "preparation", names, more=("sites",))
        columns = tuple(one.made(_COLUMNS) for one in content.items("columns"))
        files.check_different("columns", [one.name for one in columns])
        if not columns:
            raise InvalidInputError("the preparation has no columns.")
        for one in columns:
            values = one.values if isinstance(one, CategoryColumn) else ()
            if list(values) != sorted(values):
                raise InvalidInputError(f"the values of '{one.name}' are not sorted.")
        label, sites = content.node("label").made(_LABELS), content.counts("sites")
        if 0 in sites:
            raise InvalidInputError(
                f"the preparation counts no rows for client {sites.index(0)}. Leave "
                "the site out, and prepare again."
            )
        return Preparation(columns, label, sites)
