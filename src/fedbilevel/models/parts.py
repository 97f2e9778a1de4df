"""What a model is made of, and what its files hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbilevel.datasets import Preparation
from fedbilevel.errors import InvalidInputError
from fedbilevel.models.layers import Layer


@dataclass(frozen=True)
class Pixels:
    """How bytes of images become numbers: (a/255 - center)/spread, in a shape."""

    center: float
    spread: float
    shape: tuple[int, ...]

    def apply(self, features: np.ndarray) -> np.ndarray:
        """Return the numbers that a model was trained on."""
        if features.dtype != np.uint8 or features.shape[1:] != self.shape:
            raise InvalidInputError(
                f"a sample is {features.dtype} of shape {features.shape[1:]}, but the "
                f"model takes images of bytes of shape {self.shape}."
            )
        return (features.astype(float) / 255 - self.center) / self.spread


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The fields of a model, which its files hold.

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
