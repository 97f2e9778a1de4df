"""Losses and accuracies of labeled rows, and how bytes of images become numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from fedbilevel._types import Lower, Rows, Scalar, Upper
from fedbilevel.datasets import Dataset
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.models import Pixels
from fedbilevel.problem import padded

_AT_ONCE = 500  # rows of a test set; a convolution keeps every window of them


def as_numbers(features: Any, pixels: Pixels | None) -> Any:
    """Return the features of a loss: images are kept as bytes, and scaled only here."""
    return features if pixels is None else pixels.apply(features)


def pixels_of(features: np.ndarray) -> Pixels:
    """Return the scaling that gives all pixels together mean 0 and variance 1."""
    # Counted row by row: as numbers, all pixels together would need much memory.
    counts = np.zeros(256)
    for row in features:
        counts += np.bincount(row.ravel(), minlength=256)
    share, value = counts / counts.sum(), np.arange(256) / 255
    center = float(share @ value)
    spread = float(np.sqrt(share @ (value - center) ** 2)) or 1.0
    return Pixels(center, spread, features.shape[1:])


def cross_entropies(
    scores: Float[Array, "rows classes"], label: Int[Array, " rows"]
) -> Float[Array, " rows"]:
    """Return the loss of each row."""
    chosen = jnp.take_along_axis(scores, label[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - chosen


def cross_entropy(scores: Array, label: Array) -> Scalar:
    """Return the mean loss of rows."""
    return jnp.mean(cross_entropies(scores, label))


def improbabilities(scores: Array, label: Array) -> Array:
    """Return for each row 1 - the probability of its label.

    Where a share s < 1 - 1/c of the labels of c classes is replaced by others at
    random, it is (1 - s c/(c-1)) times that of the right labels, plus s: wrong labels
    make a noisier judge, not one that prefers another model (Ghosh, Kumar, Sastry 2017,
    arXiv 1712.09482). Cross entropy prefers a model that repeats the wrong labels.
    """
    return 1 - jnp.exp(-cross_entropies(scores, label))


@dataclass(frozen=True)
class MeanLoss:
    """The mean over rows of `losses(scores, label)`, of `scores(x, y, features)`."""

    scores: Callable[[Any, Any, Array], Array]
    losses: Callable[[Array, Array], Array] = cross_entropies

    def __call__(self, x: Upper, y: Lower, rows: Rows) -> Scalar:
        scores = self.scores(x, y, rows["features"])
        return jnp.mean(self.losses(scores, rows["label"]))


def _is_right(scores: Array, label: Array) -> Array:
    """Return 1 for each row whose label has the highest score, else 0."""
    guess = jnp.argmax(scores, axis=1).astype(label.dtype)
    return (guess == label).astype(scores.dtype)


def accuracy(scores: Array, label: Array) -> Array:
    """Return the share of rows whose label has the highest score."""
    return jnp.mean(_is_right(scores, label))


def balanced_accuracy(scores: Array, label: Array) -> Array:
    """Return the mean over classes of the accuracy on the class; -1 is of none."""
    member = jax.nn.one_hot(label, scores.shape[1], dtype=scores.dtype)
    sizes = jnp.sum(member, axis=0)
    of_class = _is_right(scores, label) @ member / jnp.maximum(sizes, 1)
    return jnp.sum(of_class) / jnp.sum((sizes > 0).astype(scores.dtype))


def held_array(array: Any, kind: Any, axis: int = 0) -> Array:
    """Return a copy of rows for JAX, without a program of it to compile.

    It is padded along the axis of rows: how many are real is to be kept beside.
    """
    rows = np.asarray(array, jax.dtypes.canonicalize_dtype(kind))
    return jax.device_put(padded(rows, axis))


def mean_of_first(values: Float[Array, "... rows"], size: Int[Array, ""]) -> Array:
    """Return the mean over the first rows, along the last axis; the others pad."""
    real = jnp.arange(values.shape[-1], dtype=size.dtype) < size
    return jnp.sum(jnp.where(real, values, 0), axis=-1) / size.astype(values.dtype)


class HeldOut(eqx.Module):
    """Loss and accuracy on rows that no client has, by `scores(x, y, features)`.

    Rows past `size` are padding, and count for nothing.
    """

    features: Array
    label: Shaped[Array, " rows"]
    size: Int[Array, ""]
    scores: Callable[[Upper, Lower, Array], Array] = eqx.field(static=True)

    @classmethod
    def of(
        cls, test: Dataset, scores: Callable[[Any, Any, Array], Array], **more: Array
    ) -> Self:
        """Hold rows for testing; `more` are fields of a subclass."""
        features = test.features
        kind = features.dtype if features.dtype == np.uint8 else float
        label = held_array(test.label, test.label.dtype)
        size = jax.device_put(np.int32(len(test.label)))
        return cls(held_array(features, kind), label, size, scores, **more)

    def all_scores(self, x: Upper, y: Lower) -> Array:
        """Return the scores of all rows, computed some rows at a time."""
        if len(self.label) <= _AT_ONCE:
            return self.scores(x, y, self.features)
        return jax.lax.map(
            lambda row: self.scores(x, y, row[None])[0],
            self.features,
            batch_size=_AT_ONCE,
        )

    def accuracy(self, scores: Array) -> Array:
        """Return the share of rows whose label has the highest score."""
        return mean_of_first(_is_right(scores, self.label), self.size)

    def __call__(self, x: Upper, y: Lower) -> dict[str, Array]:
        """Return loss, accuracy and its complement, which is better when lower."""
        scores = self.all_scores(x, y)
        right = self.accuracy(scores)
        losses = cross_entropies(scores, self.label)
        return {
            "test_loss": mean_of_first(losses, self.size),
            "test_accuracy": right,
            # Rounded, a mean of ones may be more than 1.
            "test_error": jnp.maximum(1 - right, 0),
        }


class HeldOutNumbers(HeldOut):
    """Errors of predicted numbers on rows that no client has.

    `spread` is what the numbers were divided by, so that errors are in their units: an
    array, as it differs from table to table, which one program serves.
    """

    spread: Float[Array, ""]

    def __call__(self, x: Upper, y: Lower) -> dict[str, Array]:
        """Return the root of the mean squared error, and the explained variance."""
        error = self.scores(x, y, self.features)[:, 0] - self.label
        left = mean_of_first(error**2, self.size)
        apart = self.label - mean_of_first(self.label, self.size)
        return {
            "test_root_mean_squared_error": self.spread * jnp.sqrt(left),
            "test_explained_variance": 1 - left / mean_of_first(apart**2, self.size),
        }


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Raise unless an option is one of some words."""
    if value not in known:
        raise unknown_name(name, value, known)


def check_not_negative(**options: float) -> None:
    """Raise if one of the options is negative."""
    for name, value in options.items():
        if not value >= 0:
            raise InvalidInputError(f"{name}={value}: it must not be negative.")
