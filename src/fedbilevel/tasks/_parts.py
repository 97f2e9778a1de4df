"""Partition of a pool's rows over clients, and into training and validation rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbilevel._types import Rows
from fedbilevel.datasets import Dataset, partition
from fedbilevel.datasets.images import IN_SITES
from fedbilevel.datasets.partition import Parts
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.models import Predictor
from fedbilevel.tasks._base import Origin, Tested
from fedbilevel.tasks._rows import Pool

_OWN_TRAIN = 0.6
_MOST_NAMED = 10  # sites in a sentence


@dataclass(frozen=True)
class Partition:
    """Every client's rows for validation and for training.

    `numbers` are those of the training rows in the pool, `names` those of the clients,
    where a `column` has them. Of several `folds` all rows train, and all validate.
    """

    pool: Pool
    upper: list[Rows]
    lower: list[Rows]
    numbers: Parts
    names: tuple[str, ...]
    column: str
    train: float
    remarks: tuple[str, ...] = ()
    folds: int = 1

    def about(self, layers: Callable[[Any, Any], Any]) -> dict[str, Any]:
        """Return the fields of a `Task` that describe its data, and its predictor.

        `layers` of a point make a model, where it is known how rows are scaled.
        """
        held, pixels, known = self.pool.held, self.pool.pixels, self._summary()
        scaled = held.preparation or pixels
        files = () if held.files is None else self._of_rows(held.files)
        return {
            "classes": held.classes,
            "preparation": held.preparation,
            "predictor": Predictor(layers, pixels) if scaled else None,
            "names": self.names,
            "tested": self._tested(),
            "origin": Origin(known, held.unit, self._of_rows(held.places), files),
        }

    def _of_rows(self, known: Any) -> tuple[np.ndarray, ...]:
        """Return what is known of every client's training rows."""
        return tuple(np.asarray(known)[own] for own in self.numbers)

    def _tested(self) -> Tested | None:
        """Return the rows that no client has, and whose they would be."""
        if self.pool.tested is None:
            return None
        found = self.pool.test.columns.get(self.column)
        site = None
        if found is not None:
            numbers = {name: number for number, name in enumerate(self.names)}
            site = np.asarray([numbers.get(str(one), -1) for one in found])
        return Tested(self.pool.tested, self.pool.test.label, site)

    def _summary(self) -> dict[str, Any]:
        """Say in plain data what the clients hold, and what was done to it."""
        held = self.pool.held
        names = self.names or [f"client {k}" for k in range(len(self.lower))]
        sites, total = [], 0
        for name, upper, lower in zip(names, self.upper, self.lower, strict=True):
            every = [lower["label"]] + [upper["label"]] * (self.folds == 1)
            labels = np.concatenate(every)
            total += len(labels)
            counts = {}
            if held.classes:
                found = np.bincount(labels, minlength=len(held.classes)).tolist()
                counts = dict(zip(held.classes, found, strict=True))
            sizes = {"training": len(lower["label"]), "validation": len(upper["label"])}
            # Rows that train and validate, too, count once.
            once = {"rows": len(labels)} if self.folds > 1 else {}
            sites.append({"name": name, **sizes, **once, "classes": counts})
        return {
            "source": held.source or held.name,
            "own": self.pool.is_own,
            "rows": total,
            "tested": len(self.pool.test.label),
            "train": self.train,
            "folds": self.folds,
            "site_column": self.column,
            "predicts": "class" if held.classes else "number",
            "sites": sites,
            "remarks": list(self.remarks),
            **held.notes,
        }


def partition_rows(
    pool: Pool,
    clients: int,
    scheme: str,
    train: float,
    *,
    usual_clients: int = 8,
    usual_train: float = 0.4,
    remarks: Sequence[str] = (),
    more: Mapping[str, np.ndarray] | None = None,
    folds: int = 1,
) -> Partition:
    """Partition the rows; 0 leaves `clients` and `train` to what is usual.

    `train` is the share of all rows that is for training, an official test part aside.
    Where samples are marked for validation, all others train. `more` are arrays that
    rows are to have besides features and label. With a column, as many clients as it
    has values; another number is refused. With several `folds` nothing is cut.
    """
    held, scheme = pool.held, _scheme(pool, scheme, clients)
    train = train or pool.usual(usual_train, own=_OWN_TRAIN)
    if clients < 0:
        raise InvalidInputError(f"clients={clients}: there must be at least one.")
    names = _names(pool, clients, scheme)
    clients = len(names) or clients or usual_clients
    if folds > 1:
        upper = lower = _dealt(pool, clients, scheme)
        train = len(held.label) / pool.total
    elif held.validation is None:
        lower, upper = _cut(pool, clients, scheme, train)
    else:
        train = 1 - float(np.mean(held.validation))
        parts = partition.parse(scheme)(held, clients, pool.split)
        lower = [part[~held.validation[part]] for part in parts]
        upper = [part[held.validation[part]] for part in parts]
    _check_parts(held, names, lower, upper)
    arrays = {"features": held.features, "label": held.label, **(more or {})}
    above, below = (
        [{name: array[part] for name, array in arrays.items()} for part in parts]
        for parts in (upper, lower)
    )
    return Partition(
        pool,
        above,
        below,
        lower,
        names,
        scheme.partition(":")[2] if names else "",
        train,
        (*remarks, *_unused_folders(held, scheme)),
        folds,
    )


def _unused_folders(held: Dataset, scheme: str) -> list[str]:
    """Warn if folders of sites do not determine the partition."""
    if held.notes.get("layout") != IN_SITES or scheme.startswith("column:"):
        return []
    return ["the folders of sites are not the clients, since others were asked for"]


def _dealt(pool: Pool, clients: int, scheme: str) -> Parts:
    """Return each client's rows, by number."""
    if scheme == "iid":  # the rows are in random order already
        return np.array_split(np.arange(len(pool.held.label)), clients)
    return partition.parse(scheme)(pool.held, clients, pool.split)


def _cut(pool: Pool, clients: int, scheme: str, train: float) -> tuple[Parts, Parts]:
    """Return each client's rows for training and for validation, by number."""
    trained, held = int(train * pool.total), pool.held
    if not 0 < trained < len(held.label):
        most = len(held.label) / pool.total
        raise InvalidInputError(
            f"train={train}: of the rows of {held.name}, {most:.0%} are for training "
            f"and validation together. Choose a share between 0 and {most:.4g}."
        )
    if scheme == "iid":
        every = np.arange(len(held.label))
        lower = np.array_split(every[:trained], clients)
        return lower, np.array_split(every[trained:], clients)
    parts = _dealt(pool, clients, scheme)
    cuts = [round(len(part) * trained / len(held.label)) for part in parts]
    pairs = [(p, min(max(n, 1), len(p) - 1)) for p, n in zip(parts, cuts, strict=True)]
    return [part[:cut] for part, cut in pairs], [part[cut:] for part, cut in pairs]


def _scheme(pool: Pool, scheme: str, clients: int) -> str:
    """Return the partition, by the column of sites if there is one.

    Folders of sites are the clients unless a number of them was asked for.
    """
    partition.parse(scheme)
    if not pool.choices.site:
        own = pool.held.notes.get("layout") == IN_SITES and not clients
        return "column:site" if own and scheme == "iid" else scheme
    chosen = f"column:{pool.choices.site}"
    if scheme not in ("iid", chosen):
        raise InvalidInputError(
            f"site={pool.choices.site} and partition={scheme} both set the partition. "
            "Leave one out."
        )
    return chosen


def _names(pool: Pool, clients: int, scheme: str) -> tuple[str, ...]:
    """Return the names of the clients that a column has, none if there is no column."""
    kind, _, column = scheme.partition(":")
    if kind != "column":
        return ()
    if column not in pool.whole:
        raise unknown_name(f"column of {pool.held.name}", column, pool.whole)
    names = tuple(str(value) for value in np.unique(pool.whole[column]))
    left = {str(value) for value in np.unique(pool.held.columns[column])}
    listed = ", ".join(names[:_MOST_NAMED]) + (", ..." if names[_MOST_NAMED:] else "")
    if clients and clients != len(names):
        raise InvalidInputError(
            f"--clients {clients}: column '{column}' of {pool.held.name} has "
            f"{len(names)} values, {listed}, and each is a client. Leave "
            f"--clients out, or give {len(names)}."
        )
    for name in [name for name in names if name not in left]:
        raise InvalidInputError(
            f"'{name}' of column '{column}' has too few rows: none is left after a "
            "fifth of all is put aside for testing. Leave its rows out."
        )
    return names


def _check_parts(held: Dataset, names: Sequence[str], *levels: Parts) -> None:
    for client, part in [one for parts in levels for one in enumerate(parts)]:
        if len(part) == 0:
            who = f"'{names[client]}'" if names else f"client {client}"
            raise InvalidInputError(
                f"{who} of {len(levels[0])} would get too few rows of the "
                f"{len(held.label)}: it needs one for training and one for "
                "validation. Ask for fewer clients, or another partition."
            )
