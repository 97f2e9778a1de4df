"""Labeled rows for clients: loaded, scaled, and put aside for testing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from fedbilevel import datasets
from fedbilevel.datasets import Dataset, Preparation, TableChoices
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Pixels
from fedbilevel.problem import stored
from fedbilevel.tasks._labeled import pixels_of

# The options that tasks on labeled rows share, each with its meaning.
Source: TypeAlias = Annotated[
    str | Dataset, "name, file or folder of the data; see `fedbilevel list data`"
]
PartitionText: TypeAlias = Annotated[
    str, "partition of rows: iid, dirichlet:0.3, shards:2, dominant:0.5 or column:NAME"
]
TrainShare: TypeAlias = Annotated[
    float,
    "share of all rows that is for training; the others validate, a fifth tests; 0 is "
    "the task's own for a built-in set, and 0.6 for your own",
]
SplitSeed: TypeAlias = Annotated[int, "random seed of the partition"]
RowLimit: TypeAlias = Annotated[int, "take only so many rows, at random; 0 takes all"]
# Its meanings are those of the fields.
TableOptions: TypeAlias = Annotated[str, TableChoices]
SettingName: TypeAlias = Annotated[
    str, "what is usual where nothing is chosen: default, or fednest (see above)"
]

_TESTED = 0.2


class Setting(NamedTuple):
    """Default values where nothing is chosen.

    `train` is the share for training, where clients are alike and where they differ; 0
    is what is usual for the data. `width` are the units of a hidden layer, `scaling`
    are mean and deviation of pixels, where they are not those of the data.
    """

    clients: int
    width: int
    train: tuple[float, float]
    scaling: tuple[float, float] | None

    def train_share(self, scheme: str) -> float:
        """Return the share for training under a partition."""
        return self.train[scheme != "iid"]


SETTINGS = {
    "default": Setting(8, 64, (0.0, 0.0), None),
    # The setting of FedNest for MNIST.
    "fednest": Setting(100, 200, (0.5, 0.8), (0.1307, 0.3081)),
}


@dataclass(frozen=True)
class Pool:
    """Rows for the clients, in random order, and rows for testing.

    `total` is the number of rows of which a share is for training. `is_own` is False
    for a set that is built in, which is there for experiments. `whole` are the columns
    of all rows. `pixels` says how bytes of images become numbers, where rows were such.
    `split` is the seed of the order and of the partition. `tested` are the rows for
    testing as a model takes them; None where those rows validate, too.
    """

    held: Dataset
    test: Dataset
    total: float
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
    scaling: tuple[float, float] | None = None,
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
    aside, tested, marks = 0, None, dataset.validation
    if dataset.test is not None:
        tested = dataset.test.features
    elif marks is None:
        aside = len(order) - untested(len(order))
        tested = dataset.features[order[:aside]]
    whole = _Some(dataset.columns, order)
    dataset, pixels = transform(dataset) if transform else _scaled(dataset, scaling)
    judges = order[:aside] if marks is None else order[marks[order]]
    test = dataset.test or take(dataset, judges)
    held = replace(take(dataset, order[aside:]), test=None)
    about = (is_own, choices, whole, pixels, split, tested)
    return Pool(held, test, len(order), *about)


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
            "another label with --label COLUMN. The classes of other sites come with "
            "--preparation FILE."
        )
    if not dataset.classes and task:
        raise InvalidInputError(
            f"{dataset.name}: the label '{dataset.notes.get('label')}' holds numbers "
            f"with fractions, and the task {task} predicts classes. The task "
            "regularization predicts numbers. --label chooses another column."
        )


def with_constant(pool: Pool) -> Pool:
    """Scale rows to length about 1, and append a constant feature."""

    def completed(table: Dataset) -> Dataset:
        flat = table.features.reshape(len(table.features), -1)
        flat = flat / np.sqrt(flat.shape[1])
        return replace(table, features=np.hstack([flat, np.ones((len(flat), 1))]))

    return replace(pool, held=completed(pool.held), test=completed(pool.test))


def take(dataset: Dataset, rows: np.ndarray) -> Dataset:
    """Return some rows of a data set, by their numbers or by a mask."""
    arrays = ("features", "label", "places", "validation", "files")
    held = {name: getattr(dataset, name) for name in arrays}
    taken = {name: None if one is None else one[rows] for name, one in held.items()}
    return replace(dataset, columns=_Some(dataset.columns, rows), **taken)


@dataclass(frozen=True, eq=False)
class _Some(Mapping[str, np.ndarray]):
    """Some rows of columns, taken where they are asked for: few are, of many."""

    columns: Mapping[str, np.ndarray]
    rows: np.ndarray

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name][self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def _scaled(
    dataset: Dataset, scaling: tuple[float, float] | None
) -> tuple[Dataset, Pixels | None]:
    features, test, made = dataset.features, dataset.test, dataset.preparation
    if features.dtype == np.uint8:
        shape = features.shape[1:]
        pixels = Pixels(*scaling, shape) if scaling else pixels_of(features)
        if isinstance(features, np.memmap):  # rows stay there until they are drawn
            everything: Any = stored(features, [np.arange(len(features))])[0]
            dataset = replace(dataset, features=everything)
        return dataset, pixels
    if made is not None:
        return replace(dataset, features=made.scale(features)), None
    center, spread = features.mean(axis=0), features.std(axis=0)
    # Constant columns have no spread to divide by; they stay zero.
    spread = np.where(spread > 0, spread, 1)
    if test is not None:
        test = replace(test, features=(test.features - center) / spread)
    scaled = replace(dataset, features=(features - center) / spread, test=test)
    if features.ndim == 2:
        made = Preparation.of_arrays(center, spread, dataset.classes)
    return replace(scaled, preparation=made), None
