"""The layers of models, and the scaling before: what each makes of a batch."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from fedbilevel.errors import InvalidInputError

WINDOW = 3


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
class Multiply:
    """Flattens rows, and multiplies them by a number."""

    factor: float

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Return factor * a for every row a."""
        return self.factor * inputs.reshape(len(inputs), -1)


@dataclass(frozen=True, eq=False)
class _Weighted:
    weight: np.ndarray
    bias: np.ndarray

    def __post_init__(self) -> None:
        weight, bias = self.weight, self.bias
        if weight.ndim != 2 or bias.shape != weight.shape[:1] or 0 in weight.shape:
            raise InvalidInputError(
                f"weights of shape {weight.shape} do not fit a bias of shape "
                f"{bias.shape}."
            )
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise InvalidInputError("a layer of the model holds NaN or infinity.")


@dataclass(frozen=True, eq=False)
class Dense(_Weighted):
    """W a + b for every row a, flattened; with `relu` what is negative becomes 0."""

    relu: bool = False

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Return the outputs of a batch."""
        flat = inputs.reshape(len(inputs), -1)
        if flat.shape[1] != self.weight.shape[1]:
            raise InvalidInputError(
                f"a row has {flat.shape[1]} features, but the model takes "
                f"{self.weight.shape[1]}."
            )
        outputs = flat @ self.weight.T + self.bias
        return np.maximum(outputs, 0) if self.relu else outputs


@dataclass(frozen=True, eq=False)
class Convolution(_Weighted):
    """3x3 windows of images with zeros around, a relu, and the mean of 2x2 blocks."""

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Return images of half the height and width."""
        images = inputs[..., None] if inputs.ndim == 3 else inputs
        if images.ndim != 4 or WINDOW**2 * images.shape[3] != self.weight.shape[1]:
            raise InvalidInputError(
                f"a sample has the shape {inputs.shape[1:]}, which is not that of the "
                "model's images."
            )
        return halved(np.maximum(windows(images) @ self.weight.T + self.bias, 0))


@dataclass(frozen=True, eq=False)
class Tanh:
    """The hyperbolic tangent of every number."""

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Return tanh(a) for every row a."""
        return np.tanh(inputs)


@dataclass(frozen=True, eq=False)
class OneLength:
    """Rows without their means, times sqrt(square / (their squared length + tiny))."""

    square: float = field(metadata={"above": 0})
    tiny: float = field(metadata={"above": 0})

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Return rows of one length."""
        around = inputs - inputs.mean(axis=1, keepdims=True)
        squares = np.sum(around**2, axis=1, keepdims=True)
        return around * np.sqrt(self.square / (squares + self.tiny))


Layer: TypeAlias = Multiply | Dense | Convolution | Tanh | OneLength
# By the names that files have.
KINDS = {
    "multiply": Multiply,
    "dense": Dense,
    "convolution": Convolution,
    "tanh": Tanh,
    "one length": OneLength,
}


def windows(images: Any, numpy: Any = np) -> Any:
    """Return (rows, height, width, window * channels), with zeros around an image.

    `numpy` is that of NumPy or of JAX, as the images are.
    """
    height, width = images.shape[1:3]
    padded = numpy.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    places = product(range(WINDOW), repeat=2)
    shifted = [padded[:, i : i + height, j : j + width] for i, j in places]
    return numpy.concatenate(shifted, axis=-1)


def halved(images: Any) -> Any:
    """Return the mean of every 2x2 block of pixels."""
    rows, height, width, channels = images.shape
    even = images[:, : height // 2 * 2, : width // 2 * 2]
    blocks = even.reshape(rows, height // 2, 2, width // 2, 2, channels)
    return blocks.mean(axis=(2, 4))
