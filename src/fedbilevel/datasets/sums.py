"""Sums of columns that a site reports, so that all sites prepare them alike.

Of a column of numbers the count, the mean and the sum of squared deviations leave it;
of a column of text the values that occur; of the label its classes or, where it is a
number to be predicted, the same as of any numbers. Which row has which value stays. Of
few rows nothing leaves: neither their mean, which may be one of them, nor their text.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedbilevel._table_choices import FEWEST_ROWS, ignoring
from fedbilevel.datasets import _preparation_files as files
from fedbilevel.datasets.cells import as_classes, as_numbers, as_targets, as_texts
from fedbilevel.errors import InvalidInputError

OTHER = "(other)"  # stands for all texts that no site holds in enough rows
EMPTY = "(missing)"  # stands for a text that is missing
_FEW = 5  # rows: a text of fewer is not reported


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers, missing ones aside.

    Kept so, and not as sums of numbers and of squares, they can be merged without
    losing digits where the mean is large.
    """

    count: int
    mean: float
    squares: float

    @staticmethod
    def of(values: np.ndarray) -> "Moments":
        """Sum up numbers; NaN is missing."""
        there = values[~np.isnan(values)]
        if len(there) == 0:
            return Moments(0, 0.0, 0.0)
        mean = float(there.mean())
        return Moments(len(there), mean, float(((there - mean) ** 2).sum()))

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of the numbers of both."""
        count = self.count + other.count
        if count == 0:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        between = apart**2 * self.count * other.count / count
        return Moments(count, mean, self.squares + other.squares + between)

    @property
    def spread(self) -> float:
        """The standard deviation; 1 where all numbers are the same."""
        return self._deviation if self.varies else 1.0

    @property
    def varies(self) -> bool:
        """Say whether not all numbers are the same."""
        # The rounding error of equal numbers is no spread to divide by.
        return self._deviation > 1e-12 * abs(self.mean)

    @property
    def _deviation(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))


Found = Moments | tuple[str, ...]


@dataclass(frozen=True)
class Sums:
    """Sums of columns that a site reports, so that all can be prepared alike.

    `columns` has the moments of numbers, or the different texts, sorted; `label` the
    moments of a target, or the classes. `sites` are the rows of each site, in their
    order, where it is known.
    """

    rows: int
    columns: Mapping[str, Found]
    label_name: str
    label: Found
    sites: tuple[int, ...] = ()

    @staticmethod
    def of(
        columns: Mapping[str, np.ndarray],
        label_name: str,
        label: np.ndarray,
        *,
        is_target: bool = False,
        minimum: int = FEWEST_ROWS,
    ) -> "Sums":
        """Sum up the columns of one site, which are arrays of numbers or of text.

        Fewer than `minimum` numbers of a column count as none. A text in fewer than 5
        rows, or than `minimum` if that is less, is `OTHER`. Classes are reported as
        they are: sites cannot predict classes without a name.
        """
        if len(label) < minimum:
            raise InvalidInputError(
                f"{len(label)} rows are too few: their sums would reveal them. Give "
                f"{minimum} at least, or allow fewer with --minimum-rows; in Python, "
                "with minimum."
            )
        found: dict[str, Found] = {}
        for name, values in columns.items():
            if values.dtype.kind in "buif":
                held = Moments.of(as_numbers(name, values))
                found[name] = held if held.count >= minimum else Moments(0, 0.0, 0.0)
            else:
                least = min(_FEW, minimum)
                counts = Counter(text or EMPTY for text in as_texts(values))
                kept = {t if n >= least else OTHER for t, n in counts.items()}
                found[name] = tuple(sorted(kept))
        if is_target:
            labels: Found = Moments.of(as_targets(label_name, label))
        else:
            labels = tuple(sorted(set(as_classes(f"column '{label_name}'", label))))
        return Sums(len(label), found, label_name, labels, (len(label),))

    @staticmethod
    def merged(every: Iterable["Sums"]) -> "Sums":
        """Return the sums over sites, which must have the same columns."""
        first, *others = every
        for other in others:
            _check_alike(first, other)
            columns = {}
            for name, found in first.columns.items():
                advice = f"leave the column out with {ignoring([name])}"
                pair = found, other.columns[name]
                columns[name] = _merge(f"column '{name}'", *pair, advice)
            name, pair = f"label '{first.label_name}'", (first.label, other.label)
            label = _merge(name, *pair, "say --label-kind for all")
            rows, known = first.rows + other.rows, first.sites and other.sites
            sites = first.sites + other.sites if known else ()
            first = Sums(rows, columns, first.label_name, label, sites)
        return first

    def to_json(self) -> str:
        """Return it as text."""
        columns = [_written(name, found) for name, found in self.columns.items()]
        label = _written(self.label_name, self.label)
        content = {"rows": self.rows, "columns": columns, "label": label}
        return files.write("sums", {**content, "sites": self.sites})

    @staticmethod
    def from_json(text: str) -> "Sums":
        """Read what `to_json` wrote; anything else is refused."""
        names = ("rows", "columns", "label")
        content = files.Node.of(text, "sums", names, more=("sites",))
        nodes = content.items("columns")
        names = [one.text("name") for one in nodes]
        files.check_different("columns", names)
        found = dict(zip(names, map(_read_found, nodes), strict=True))
        label = content.node("label")
        rows, sites = content.count("rows"), content.counts("sites")
        if sites and sum(sites) != rows:
            raise InvalidInputError(f"sums: the rows of its sites are not {rows}.")
        return Sums(rows, found, label.text("name"), _read_found(label), sites)


def _written(name: str, found: Found) -> dict[str, object]:
    if isinstance(found, Moments):
        return {"name": name, "kind": "number", **vars(found)}
    return {"name": name, "kind": "text", "values": found}


def _read_found(one: files.Node) -> Found:
    if one.word("kind", ("number", "text")) == "text":
        one.only("kind", "name", "values")
        return tuple(sorted(one.texts("values")))
    one.only("kind", "name", "count", "mean", "squares")
    squares = one.number("squares", least=0)
    return Moments(one.count("count"), one.number("mean"), squares)


def _check_alike(first: Sums, other: Sums) -> None:
    odd = sorted(set(first.columns) ^ set(other.columns))
    if odd or first.label_name != other.label_name:
        columns = f"only some have {', '.join(map(repr, odd[:20]))}"
        labels = f"labels are '{first.label_name}' and '{other.label_name}'"
        raise InvalidInputError(
            f"the sites differ: {columns if odd else labels}. All need the same "
            "columns. Leave others out with --ignore."
        )


def _merge(name: str, one: Found, other: Found, advice: str) -> Found:
    if isinstance(one, Moments) and isinstance(other, Moments):
        return one.merged(other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(sorted({*one, *other}))
    raise InvalidInputError(
        f"{name} holds numbers at one site and text or classes at another. Make them "
        f"alike, or {advice}."
    )
