"""Labeled rows for clients: loaded, scaled, partitioned, and cut for both levels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from fedbilevel import datasets
from fedbilevel._types import Rows
from fedbilevel.datasets import Dataset, Preparation, TableChoices, partition
from fedbilevel.datasets.partition import Parts
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.models import Pixels, Predictor
from fedbilevel.problem import stored
from fedbilevel.tasks._base import Origin, Tested
from fedbilevel.tasks._labeled import MNIST_SCALING, Scaling, pixel_scaling

# The options that tasks on labeled rows share, each with its meaning.
Source: TypeAlias = Annotated[
    str | Dataset, "name, file or folder of the data; see `fedbilevel list data`"
]
PartitionText: TypeAlias = Annotated[
    str, "who holds what: iid, dirichlet:0.3, shards:2, dominant:0.5 or column:NAME"
]
TrainShare: TypeAlias = Annotated[
    float,
    "share of all rows that is for training; the others validate, a fifth tests; 0 is "
    "the task's own for a built-in set, and 0.6 for your own",
]
SplitSeed: TypeAlias = Annotated[int, "random seed of who gets which rows"]
RowLimit: TypeAlias = Annotated[int, "take only so many rows, at random; 0 takes all"]
# Its meanings are those of the fields.
TableOptions: TypeAlias = Annotated[str, TableChoices]
SettingName: TypeAlias = Annotated[
    str, "what is usual where nothing is chosen: default, or fednest (see above)"
]

_TESTED = 0.2
_OWN_TRAIN = 0.6
_MOST_NAMED = 10  # sites in a sentence


class Setting(NamedTuple):
    """What is used where nothing is chosen.

    `train` is the share for training, where clients are alike and where they differ; 0
    is what is usual for the data. `width` are the units of a hidden layer.
    """

    clients: int
    width: int
    train: tuple[float, float]
    scaling: Scaling | None

    def train_share(self, scheme: str) -> float:
        """Return the share for training under a partition."""
        return self.train[scheme != "iid"]


SETTINGS = {
    "default": Setting(8, 64, (0.0, 0.0), None),
    # That of FedNest for MNIST.
    "fednest": Setting(100, 200, (0.5, 0.8), MNIST_SCALING),
}


@dataclass(frozen=True)
class Pool:
    """Rows for the clients, in random order, and rows for testing.

    `total` is the number of rows of which a share is for training. `is_own` is False
    for a set that is built in, which is there for experiments. `whole` are the columns
    of all rows. `pixels` says how bytes of images become numbers, where rows were such.
    `split` is the seed of the order and of the partition. `tested` are the rows
    for testing as a model takes them; None where those rows validate, too.
    """

    held: Dataset
    test: Dataset
    total: float
    scaling: Scaling
    is_own: bool
    choices: TableChoices
    whole: Mapping[str, np.ndarray]
    pixels: Pixels | None
    split: int
    tested: np.ndarray | None = None

    @property
    def classes(self) -> int:
        """The number of classes; 0 where numbers are predicted."""
        return len(self.held.classes)

    def usual(self, built_in: float, own: float) -> float:
        """Return what is usual for such data."""
        return own if self.is_own else built_in


def load(
    source: str | Dataset,
    split: int,
    rows: int,
    table: Mapping[str, str],
    task: str = "",
    scaling: Scaling | None = None,
    transform: Callable[[Dataset], tuple[Dataset, Pixels | None]] | None = None,
) -> Pool:
    """Load a data set, in an order that `split` seeds, the first `rows` of it if any.

    Tested is the official test part, or else the first fifth. Images of bytes are kept
    and scaled later, by `scaling` or to mean 0 and variance 1 over all pixels; other
    features are centered and scaled by column over all rows. Images in a memory-mapped
    file stay there, but for the tested ones. `table` are the choices of columns. A
    `task` that is named classifies and does nothing else. A `transform` makes features
    that are used as they are; it returns how images were scaled, and the set's new
    preparation how columns were. Where samples are marked for validation, and there is
    no test part, they test, too.
    """
    choices = TableChoices(**table)
    if isinstance(source, Dataset):
        choices.check_unused(f"a data set in memory ({source.name})")
        dataset, is_own = source, True
    else:
        dataset = datasets.load(source, choices=choices)
        is_own = not datasets.is_named(source)
    _check(dataset, rows, task)
    order = np.random.default_rng(split).permutation(len(dataset.label))
    order = order[: rows or None]
    if dataset.places is None:
        dataset = replace(dataset, places=np.arange(len(dataset.label)))
    whole = {name: values[order] for name, values in dataset.columns.items()}
    raw = dataset
    if transform is None:
        dataset, found = _scaled(dataset)
        scaling = scaling or found
        pixels, images = None, dataset.features
        if images.dtype == np.uint8:
            pixels = Pixels(scaling.center, scaling.spread, images.shape[1:])
    else:
        (dataset, pixels), scaling = transform(dataset), Scaling()
    marks, tested = dataset.validation, 0
    if marks is not None:
        test = dataset.test or take(dataset, order[marks[order]])
    else:
        tested = 0 if dataset.test else len(order) - untested(len(order))
        test = dataset.test or take(dataset, order[:tested])
    held = replace(take(dataset, order[tested:]), test=None)
    about = (scaling, is_own, choices, whole, pixels, split)
    apart = raw.features[order[:tested]] if marks is None else None
    apart = apart if raw.test is None else raw.test.features
    return Pool(held, test, len(order), *about, apart)


def untested(rows: int) -> int:
    """Return how many rows of a table are left once some are put aside for testing."""
    return rows - int(_TESTED * rows)


def _check(dataset: Dataset, rows: int, task: str) -> None:
    if not 0 <= rows <= len(dataset.label):
        raise InvalidInputError(
            f"rows={rows}: {dataset.name} has {len(dataset.label)}. Choose as many or "
            "fewer, or 0 for all."
        )
    if len(dataset.classes) == 1:
        raise InvalidInputError(
            f"{dataset.name}: all {len(dataset.label)} rows have the label "
            f"'{dataset.classes[0]}', so there is nothing to classify. Choose "
            "another label with --label COLUMN; the classes of other sites come with "
            "--preparation FILE."
        )
    if not dataset.classes and task:
        raise InvalidInputError(
            f"{dataset.name}: the label '{dataset.notes.get('label')}' holds numbers "
            f"with fractions, and the task {task} predicts classes. The task "
            "regularization predicts numbers; --label chooses another column."
        )


def thin(pool: Pool, kept: np.ndarray) -> Pool:
    """Keep only some of the clients' rows."""
    total = pool.total * len(kept) / len(pool.held.label)
    return replace(pool, held=take(pool.held, kept), total=total)


def with_constant(pool: Pool) -> Pool:
    """Scale rows to length about 1, and append a constant feature."""

    def completed(table: Dataset) -> Dataset:
        flat = table.features.reshape(len(table.features), -1)
        flat = flat / np.sqrt(flat.shape[1])
        return replace(table, features=np.hstack([flat, np.ones((len(flat), 1))]))

    return replace(pool, held=completed(pool.held), test=completed(pool.test))


def take(dataset: Dataset, rows: np.ndarray) -> Dataset:
    """Return some rows of a data set, by their numbers or by a mask."""
    columns = {name: values[rows] for name, values in dataset.columns.items()}
    arrays = ("features", "label", "places", "validation", "files")
    held = {name: getattr(dataset, name) for name in arrays}
    taken = {name: None if one is None else one[rows] for name, one in held.items()}
    return replace(dataset, columns=columns, **taken)


def _scaled(dataset: Dataset) -> tuple[Dataset, Scaling]:
    features, test, made = dataset.features, dataset.test, dataset.preparation
    if features.dtype == np.uint8:
        scaling = pixel_scaling(features)
        if isinstance(features, np.memmap):  # rows stay there until they are drawn
            everything: Any = stored(features, [np.arange(len(features))])[0]
            dataset = replace(dataset, features=everything)
        return dataset, scaling
    if made is not None:
        return replace(dataset, features=made.scale(features)), Scaling()
    center, spread = features.mean(axis=0), features.std(axis=0)
    # Constant columns have no spread to divide by; they stay zero.
    spread = np.where(spread > 0, spread, 1)
    if test is not None:
        test = replace(test, features=(test.features - center) / spread)
    scaled = replace(dataset, features=(features - center) / spread, test=test)
    if features.ndim == 2:
        made = Preparation.of_arrays(center, spread, dataset.classes)
    return replace(scaled, preparation=made), Scaling()


@dataclass(frozen=True)
class Partition:
    """Every client's rows for validation and for training, and where they are from.

    `places` are the numbers of the training rows in their file. `names` are those of
    the clients, where a `column` says who they are. `files` are the training rows'
    own, where each is one. Of several `folds` all rows train, and all validate.
    """

    pool: Pool
    upper: list[Rows]
    lower: list[Rows]
    places: list[np.ndarray]
    names: tuple[str, ...]
    column: str
    train: float
    remarks: tuple[str, ...] = ()
    folds: int = 1
    files: tuple[np.ndarray, ...] = ()

    def about(self, layers: Callable[[Any, Any], Any]) -> dict[str, Any]:
        """Return the fields of a `Task` that describe its data, and its predictor.

        `layers` of a point make a model, where it is known how rows are scaled.
        """
        held, pixels, known = self.pool.held, self.pool.pixels, self._summary()
        scaled = held.preparation or pixels
        places = tuple(self.places)
        return {
            "classes": held.classes,
            "preparation": held.preparation,
            "predictor": Predictor(layers, pixels) if scaled else None,
            "names": self.names,
            "tested": self._tested(),
            "origin": Origin(known["source"], held.unit, places, known, self.files),
        }

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
        sites = []
        for name, upper, lower in zip(names, self.upper, self.lower, strict=True):
            every = [lower["label"]] + [upper["label"]] * (self.folds == 1)
            labels = np.concatenate(every)
            counts = {}
            if held.classes:
                found = np.bincount(labels, minlength=len(held.classes)).tolist()
                counts = dict(zip(held.classes, found, strict=True))
            sizes = {"training": len(lower["label"]), "validation": len(upper["label"])}
            # What trains and validates, too, counts once.
            once = {"rows": len(labels)} if self.folds > 1 else {}
            sites.append({"name": name, **sizes, **once, "classes": counts})
        return {
            "source": held.source or held.name,
            "own": self.pool.is_own,
            "rows": int(sum(s["training"] for s in sites)) + self._validating(),
            "tested": len(self.pool.test.label),
            "train": self.train,
            "folds": self.folds,
            "site_column": self.column,
            "predicts": "class" if held.classes else "number",
            "sites": sites,
            "remarks": list(self.remarks),
            **held.notes,
        }

    def _validating(self) -> int:
        """Return how many rows validate and do not train."""
        return sum(len(one["label"]) for one in self.upper) if self.folds == 1 else 0


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
    held, scheme = pool.held, _scheme(pool, scheme)
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
        [np.asarray(held.places)[part] for part in lower],
        names,
        scheme.partition(":")[2] if names else "",
        train,
        tuple(remarks),
        folds,
        tuple(held.files[part] for part in lower) if held.files is not None else (),
    )


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


def _scheme(pool: Pool, scheme: str) -> str:
    """Return who holds what, by the column of sites if there is one."""
    partition.parse(scheme)
    if not pool.choices.site:
        return scheme
    chosen = f"column:{pool.choices.site}"
    if scheme not in ("iid", chosen):
        raise InvalidInputError(
            f"site={pool.choices.site} and partition={scheme} both say who holds what. "
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
