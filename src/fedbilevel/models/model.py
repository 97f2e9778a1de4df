"""A trained model: layers, classes, and how raw rows become its features."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._folders import MODEL, WEIGHTS
from fedbilevel.datasets.preparation import Preparation, TargetLabel
from fedbilevel.datasets.tables import table_of_frame
from fedbilevel.errors import InvalidInputError
from fedbilevel.models.files import load, save
from fedbilevel.models.layers import Dense, Layer, Multiply, Pixels

_AT_ONCE = 1000  # rows; a convolution keeps every window of them


@dataclass(frozen=True)
class Predictor:
    """How the point of a run makes a model: `layers`, a function of (x, y).

    `pixels` is for images of bytes; features of other kinds have a preparation.
    `advice` says what to do with layers that predict nothing by themselves, since every
    client has a y of its own; they are made of x alone.
    """

    layers: Callable[[Any, Any], tuple[Layer, ...]]
    pixels: Pixels | None = None
    advice: str = ""


@dataclass(frozen=True, eq=False)
class Model:
    """Predicts classes, or numbers where there are none, from raw rows.

    `layers` turn prepared features into scores. `classes` are the names in the order of
    the scores. Raw rows are prepared by `preparation`, by columns, or by `pixels`.
    `about` says where the model comes from. With an `advice` it is what other models
    begin with: it predicts nothing, and need not know what its features are made of.
    """

    layers: tuple[Layer, ...]
    classes: tuple[str, ...]
    preparation: Preparation | None = None
    pixels: Pixels | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""

    def __post_init__(self) -> None:
        if self.advice:
            if not self.layers or self.classes:
                raise InvalidInputError(
                    "a model with an `advice` has layers, and no classes."
                )
            return
        last = self.layers[-1] if self.layers else None
        if not isinstance(last, Dense) or last.relu:
            raise InvalidInputError(
                "the last layer of a model must be dense, without a relu: it gives the "
                "scores."
            )
        if len(last.bias) != (len(self.classes) or 1):
            raise InvalidInputError(
                f"a model with {len(last.bias)} scores for {len(self.classes)} "
                "classes: each class has one."
            )
        if (self.preparation is None) == (self.pixels is None):
            raise InvalidInputError(
                "a model needs a `preparation` or `pixels`, not both."
            )
        if not self.classes and not isinstance(self._label, TargetLabel):
            raise InvalidInputError(
                "a model without classes needs a `preparation` whose label is a number."
            )

    @property
    def _label(self) -> Any:
        return None if self.preparation is None else self.preparation.label

    @property
    def is_linear(self) -> bool:
        """Say whether scores are a linear function of the features."""
        if self.advice:
            return False
        dense = [one for one in self.layers if isinstance(one, Dense)]
        plain = all(isinstance(one, Multiply | Dense) for one in self.layers)
        return plain and len(dense) == 1

    def features(self, rows: Any) -> np.ndarray:
        """Prepare raw rows: columns by name, a frame, or an array.

        An array has the columns of the model's `feature_names`, not scaled yet, or is
        one of images.
        """
        if self.pixels is not None:
            return self.pixels.apply(np.asarray(rows))
        made = self.preparation
        if made is None:  # of a model that others begin with
            return np.asarray(rows, dtype=float)
        if hasattr(rows, "columns"):
            table = table_of_frame(rows)
            return made.apply(table.columns, table.where)
        if isinstance(rows, Mapping):
            return made.apply({str(n): np.asarray(one) for n, one in rows.items()})
        array = np.asarray(rows, dtype=float)
        if array.ndim != 2 or array.shape[1] != len(made.feature_names):
            raise InvalidInputError(
                f"rows of shape {array.shape}: give one row per sample and the "
                f"{len(made.feature_names)} columns of the model's features."
            )
        return made.scale(array)

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return the scores of prepared features, some rows at a time."""
        parts = []
        for first in range(0, max(len(features), 1), _AT_ONCE):
            part = np.asarray(features[first : first + _AT_ONCE], float)
            for layer in self.layers:
                part = layer(part)
            parts.append(part)
        return np.concatenate(parts)

    def probabilities(self, rows: Any) -> np.ndarray:
        """Return the probability of every class for raw rows."""
        self.check_predicts()
        if not self.classes:
            raise InvalidInputError(
                "the model predicts a number, which has no probabilities."
            )
        return softmax(self.scores(self.features(rows)))

    def predict(self, rows: Any) -> np.ndarray:
        """Return the name of the likeliest class of raw rows, or the number."""
        self.check_predicts()
        return self.decided(self.scores(self.features(rows)))

    def check_predicts(self) -> None:
        """Raise if this is what other models begin with."""
        if self.advice:
            raise InvalidInputError(self.advice)

    def decided(self, scores: np.ndarray) -> np.ndarray:
        """Return what scores say: a class, or a number in the label's own units."""
        if not self.classes:
            return self._label.decode(scores[:, 0])
        return np.asarray(self.classes)[np.argmax(scores, axis=1)]

    def save(self, folder: Path) -> None:
        """Write the model into a folder: JSON and safetensors."""
        save(self, folder / WEIGHTS, folder / MODEL)

    @staticmethod
    def load(folder: Path | str) -> "Model":
        """Read the model of a run folder."""
        return load(Path(folder), Model)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return probabilities that are proportional to exp(scores)."""
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
