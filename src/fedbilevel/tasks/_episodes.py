"""Many small learning tasks, each with a set to learn from and a set to be asked."""

from collections.abc import Mapping
from dataclasses import dataclass

import equinox as eqx
import numpy as np

from fedbilevel._types import Rows
from fedbilevel.datasets import Dataset
from fedbilevel.errors import InvalidInputError

__all__ = ["Episodes", "Sizes", "alphabets_apart", "characters", "sinusoids"]


class Episodes(eqx.Module):
    """`inputs` and `targets` of the two sets; leaves are (tasks, examples, ...)."""

    support: Rows
    query: Rows


@dataclass(frozen=True)
class Sizes:
    """How many classes a task has, and examples, of each class if there are any."""

    ways: int
    shots: int
    queries: int


def sinusoids(tasks: int, sizes: Sizes, draw: np.random.Generator) -> Episodes:
    """Draw waves a sin(u - c): a from [0.1, 5], c from [0, pi], u from [-5, 5]."""
    amplitude = draw.uniform(0.1, 5, (tasks, 1, 1))
    phase = draw.uniform(0, np.pi, (tasks, 1, 1))

    def examples(count: int) -> Rows:
        inputs = draw.uniform(-5, 5, (tasks, count, 1))
        return {"inputs": inputs, "targets": amplitude * np.sin(inputs - phase)}

    return Episodes(examples(sizes.shots), examples(sizes.queries))


def alphabets_apart(
    dataset: Dataset, draw: np.random.Generator
) -> tuple[Dataset, Dataset]:
    """Return the rows of most alphabets, and those of a quarter of them, at least one.

    Neither has all classes of the data set.
    """
    alphabet = dataset.columns.get("alphabet")
    if alphabet is None:
        raise InvalidInputError(
            f"{dataset.name} has no alphabets. Give a folder or a zip file of "
            "alphabet/character/*.png."
        )
    names = draw.permutation(np.unique(alphabet))
    if len(names) < 2:
        raise InvalidInputError(
            f"{dataset.name} has one alphabet, {names[0]}. A second one is needed: new "
            "tasks come from alphabets that no client has."
        )
    new = np.isin(alphabet, names[: max(1, len(names) // 4)])
    return _take(dataset, ~new), _take(dataset, new)


def _take(dataset: Dataset, rows: np.ndarray) -> Dataset:
    columns = {name: values[rows] for name, values in dataset.columns.items()}
    features, label = dataset.features[rows], dataset.label[rows]
    return Dataset(dataset.name, features, label, dataset.classes, columns)


def characters(
    tasks: int, dataset: Dataset, sizes: Sizes, draw: np.random.Generator
) -> Episodes:
    """Draw characters for every task, and drawings of each for its two sets."""
    drawings = {one: np.flatnonzero(dataset.label == one) for one in set(dataset.label)}
    _check_enough(dataset, drawings, sizes)
    known, each = sorted(drawings), sizes.shots + sizes.queries
    chosen = [
        [draw.permutation(drawings[one])[:each] for one in some]
        for some in (draw.permutation(known)[: sizes.ways] for _ in range(tasks))
    ]
    rows = np.asarray(chosen)  # (tasks, ways, each)
    support, query = rows[:, :, : sizes.shots], rows[:, :, sizes.shots :]
    return Episodes(_labeled(dataset, support), _labeled(dataset, query))


def _labeled(dataset: Dataset, rows: np.ndarray) -> Rows:
    """Return images and the number of their character within the task."""
    number = np.arange(rows.shape[1], dtype=np.int32)[:, None]
    targets = np.broadcast_to(number, rows.shape).reshape(len(rows), -1)
    return {
        "inputs": dataset.features[rows.reshape(len(rows), -1)],
        "targets": targets,
    }


def _check_enough(
    dataset: Dataset, drawings: Mapping[int, np.ndarray], sizes: Sizes
) -> None:
    names = ", ".join(np.unique(dataset.columns["alphabet"]))
    if len(drawings) < sizes.ways:
        raise InvalidInputError(
            f"ways={sizes.ways}: the alphabets {names} of {dataset.name}, which were "
            f"drawn together, have {len(drawings)} characters. Choose fewer ways, or "
            "another instance."
        )
    scarce = min(drawings, key=lambda one: len(drawings[one]))
    if len(drawings[scarce]) < sizes.shots + sizes.queries:
        raise InvalidInputError(
            f"shots={sizes.shots} and queries={sizes.queries}: {dataset.name} has "
            f"{len(drawings[scarce])} drawings of {dataset.classes[scarce]}. Choose "
            "fewer shots or queries."
        )
