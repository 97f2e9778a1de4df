"""Labeled rows for clients: loaded, scaled, dealt out, and cut for the two levels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedbilevel import datasets
from fedbilevel._types import Lower, Rows, Scalar, Upper
from fedbilevel.datasets import Dataset, Preparation, partition
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.problem import stored

__all__ = [
    "CrossEntropy",
    "HeldOut",
    "MNIST_SCALING",
    "Pool",
    "Scaling",
    "accuracy",
    "balanced_accuracy",
    "check_choice",
    "check_positive",
    "cross_entropies",
    "cross_entropy",
    "deal",
    "load",
    "pixel_scaling",
    "thin",
]

_TESTED = 0.2
_AT_ONCE = 500  # rows of a test set; a convolution keeps every window of them


@dataclass(frozen=True)
class Scaling:
    """Turns stored bytes a into (a/255 - center)/spread; other features stay.

    Losses apply it to the rows they are given, so that images are kept as bytes.
    """

    center: float = 0.0
    spread: float = 1.0

    def __call__(self, features: Array) -> Array:
        """Return features as floating-point numbers."""
        if features.dtype != jnp.uint8:
            return features
        return (features.astype(float) / 255 - self.center) / self.spread


MNIST_SCALING = Scaling(0.1307, 0.3081)


@dataclass(frozen=True)
class Pool:
    """Rows for the clients, in random order, and rows for testing.

    `total` is the number of rows of which a share is for training. `preparation` says
    how the features were scaled, where they are numbers in columns.
    """

    held: Dataset
    test: Dataset
    total: float
    scaling: Scaling
    preparation: Preparation | None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.held.classes)


def load(source: str, *, split: int, rows: int, scaling: Scaling | None = None) -> Pool:
    """Load a data set, in an order that `split` seeds, the first `rows` of it if any.

    Tested is the official test part, or else the first fifth. Images of bytes are kept
    and scaled later, to mean 0 and variance 1 over all pixels unless told how; other
    features are centered and scaled by column over all rows. Images in a memory-mapped
    file stay there, but for the tested ones.
    """
    dataset = datasets.load(source)
    if not 0 <= rows <= len(dataset.label):
        raise InvalidInputError(
            f"rows={rows}: {dataset.name} has {len(dataset.label)}. Choose as many or "
            "fewer, or 0 for all."
        )
    order = np.random.default_rng(split).permutation(len(dataset.label))
    order = order[: rows or None]
    dataset, found, preparation = _scaled(dataset)
    tested = 0 if dataset.test else int(_TESTED * len(order))
    test = dataset.test or _take(dataset, order[:tested])
    held = replace(_take(dataset, order[tested:]), test=None)
    return Pool(held, test, len(order), scaling or found, preparation)


def thin(pool: Pool, kept: np.ndarray) -> Pool:
    """Keep only some of the clients' rows."""
    total = pool.total * len(kept) / len(pool.held.label)
    return replace(pool, held=_take(pool.held, kept), total=total)


def _take(dataset: Dataset, rows: np.ndarray) -> Dataset:
    columns = {name: values[rows] for name, values in dataset.columns.items()}
    return replace(
        dataset,
        features=dataset.features[rows],
        label=dataset.label[rows],
        columns=columns,
    )


def _scaled(dataset: Dataset) -> tuple[Dataset, Scaling, Preparation | None]:
    features, test = dataset.features, dataset.test
    if features.dtype == np.uint8:
        scaling = pixel_scaling(features)
        if isinstance(features, np.memmap):  # rows stay there until they are drawn
            everything: Any = stored(features, [np.arange(len(features))])[0]
            dataset = replace(dataset, features=everything)
        return dataset, scaling, None
    center, spread = features.mean(axis=0), features.std(axis=0)
    # Constant columns have no spread to divide by; they stay zero.
    spread = np.where(spread > 0, spread, 1)
    if test is not None:
        test = replace(test, features=(test.features - center) / spread)
    scaled = replace(dataset, features=(features - center) / spread, test=test)
    made = None
    if features.ndim == 2:
        made = Preparation.of_arrays(center, spread, dataset.classes)
    return scaled, Scaling(), made


def pixel_scaling(features: np.ndarray) -> Scaling:
    # Counted row by row: as numbers, all pixels together would need much memory.
    counts = np.zeros(256)
    for row in features:
        counts += np.bincount(row.ravel(), minlength=256)
    share, value = counts / counts.sum(), np.arange(256) / 255
    center = float(share @ value)
    return Scaling(center, float(np.sqrt(share @ (value - center) ** 2)) or 1.0)


def deal(
    pool: Pool, clients: int, *, scheme: str, train: float, split: int
) -> tuple[list[Rows], list[Rows]]:
    """Return every client's rows for validation, and for training.

    `train` is the share of all rows that is for training, an official test part aside.
    """
    held, split_rows = pool.held, partition.parse(scheme)
    if clients < 1:
        raise InvalidInputError(f"clients={clients}: there must be at least one.")
    trained = int(train * pool.total)
    if not 0 < trained < len(held.label):
        most = len(held.label) / pool.total
        raise InvalidInputError(
            f"train={train}: of the rows of {held.name}, {most:.0%} are for training "
            f"and validation together. Choose a share between 0 and {most:.4g}."
        )
    if scheme == "iid":
        # The rows are in random order already.
        every = np.arange(len(held.label))
        lower = np.array_split(every[:trained], clients)
        upper = np.array_split(every[trained:], clients)
    else:
        parts = split_rows(held, clients, split)
        cuts = [round(len(part) * trained / len(held.label)) for part in parts]
        cuts = [
            min(max(cut, 1), len(part) - 1)
            for cut, part in zip(cuts, parts, strict=True)
        ]
        lower = [part[:cut] for cut, part in zip(cuts, parts, strict=True)]
        upper = [part[cut:] for cut, part in zip(cuts, parts, strict=True)]
    _check_parts(held, lower, upper)
    return _rows_of(held, upper), _rows_of(held, lower)


def _check_parts(held: Dataset, *levels: Sequence[np.ndarray]) -> None:
    for parts in levels:
        for client, part in enumerate(parts):
            if len(part) == 0:
                raise InvalidInputError(
                    f"client {client} of {len(parts)} would get too few rows of the "
                    f"{len(held.label)}: it needs one for training and one for "
                    "validation. Ask for fewer clients, or another partition."
                )


def _rows_of(held: Dataset, parts: Sequence[np.ndarray]) -> list[Rows]:
    return [{"features": held.features[p], "label": held.label[p]} for p in parts]


def cross_entropies(
    scores: Float[Array, "rows classes"], label: Int[Array, " rows"]
) -> Float[Array, " rows"]:
    """Return the loss of each row."""
    chosen = jnp.take_along_axis(scores, label[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - chosen


def cross_entropy(scores: Array, label: Array) -> Scalar:
    """Return the mean loss of rows."""
    return jnp.mean(cross_entropies(scores, label))


@dataclass(frozen=True)
class CrossEntropy:
    """The mean loss over rows, of `scores(x, y, features)`."""

    scores: Callable[[Any, Any, Array], Array]

    def __call__(self, x: Upper, y: Lower, rows: Rows) -> Scalar:
        """Return it."""
        return cross_entropy(self.scores(x, y, rows["features"]), rows["label"])


def _right(scores: Array, label: Array) -> Array:
    guess = jnp.argmax(scores, axis=1).astype(label.dtype)
    return (guess == label).astype(scores.dtype)


def accuracy(scores: Array, label: Array) -> Array:
    """Return the share of rows whose label has the highest score."""
    return jnp.mean(_right(scores, label))


def balanced_accuracy(scores: Array, label: Array) -> Array:
    """Return the mean over classes of the accuracy on the class."""
    member = jax.nn.one_hot(label, scores.shape[1], dtype=scores.dtype)
    sizes = jnp.sum(member, axis=0)
    of_class = _right(scores, label) @ member / jnp.maximum(sizes, 1)
    return jnp.sum(of_class) / jnp.sum((sizes > 0).astype(scores.dtype))


class HeldOut(eqx.Module):
    """Loss and accuracy on rows that no client has, by `scores(x, y, features)`."""

    features: Array
    label: Int[Array, " rows"]
    scores: Callable[[Upper, Lower, Array], Array] = eqx.field(static=True)

    @classmethod
    def of(cls, pool: Pool, scores: Callable[[Any, Any, Array], Array]) -> "HeldOut":
        """Hold the test rows of a pool."""
        features = pool.test.features
        kind = None if features.dtype == np.uint8 else float
        label = jnp.asarray(pool.test.label)
        return cls(jnp.asarray(np.asarray(features), dtype=kind), label, scores)

    def all_scores(self, x: Upper, y: Lower) -> Array:
        """Return the scores of all rows, computed some rows at a time."""
        if len(self.label) <= _AT_ONCE:
            return self.scores(x, y, self.features)
        return jax.lax.map(
            lambda row: self.scores(x, y, row[None])[0],
            self.features,
            batch_size=_AT_ONCE,
        )

    def __call__(self, x: Upper, y: Lower) -> dict[str, Array]:
        """Return loss, accuracy and its complement, which is better when lower."""
        scores = self.all_scores(x, y)
        right = accuracy(scores, self.label)
        return {
            "test_loss": cross_entropy(scores, self.label),
            "test_accuracy": right,
            "test_error": 1 - right,
        }


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Raise unless an option is one of some words."""
    if value not in known:
        raise unknown_name(name, value, known)


def check_positive(**options: float) -> None:
    """Raise unless the options are positive numbers."""
    for name, value in options.items():
        if not 0 < value < np.inf:
            raise InvalidInputError(f"{name}={value}: it must be a positive number.")
