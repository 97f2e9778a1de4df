"""Small classifiers as pytrees: hidden layers below, one linear head on top."""

import abc
import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from fedbilevel import _tree, models
from fedbilevel._types import Key, Upper
from fedbilevel.errors import InvalidInputError
from fedbilevel.models.layers import WINDOW, halved, windows
from fedbilevel.tasks._labeled import as_numbers, check_choice

_CHANNELS = (8, 16)


class Hidden(eqx.Module):
    """Layers that turn a batch of inputs into features."""

    @abc.abstractmethod
    def __call__(self, inputs: Array) -> Array: ...

    @abc.abstractmethod
    def layers_of_model(self, width: int) -> tuple[models.Layer, ...]:
        """Return the same as layers of a model, where there are `width` features."""


class Network(eqx.Module):
    """`hidden` turns a batch into features, `head` those into one score per class."""

    hidden: Hidden
    head: eqx.nn.Linear

    def __call__(self, inputs: Array) -> Array:
        return apply(self.head, self.hidden(inputs))


@dataclass(frozen=True)
class NetworkScores:
    """The scores of a network y, whatever x is, for rows as they are stored."""

    pixels: models.Pixels | None

    def __call__(self, x: Upper, y: Network, features: Array) -> Array:
        del x
        return y(as_numbers(features, self.pixels))


def layers_of(hidden: Hidden, head: eqx.nn.Linear) -> tuple[models.Layer, ...]:
    """Return hidden layers and a head as layers of a model."""
    weight, bias = arrays_of(head)
    return (*hidden.layers_of_model(weight.shape[-1]), models.Dense(weight, bias))


def linear_layers(x: Upper, y: Array | np.ndarray) -> tuple[models.Layer, ...]:
    """Return a matrix y as a layer: its last column, of a constant, is the bias.

    A vector has the score of the second of two classes; that of the first is 0.
    """
    del x
    W = np.asarray(y)
    W = np.stack([np.zeros_like(W), W]) if W.ndim == 1 else W
    scale = models.Multiply((W.shape[-1] - 1) ** -0.5)
    return scale, models.Dense(W[..., :-1], W[..., -1])


def network_layers(x: Upper, y: Network) -> tuple[models.Layer, ...]:
    """Return a network y, whatever x is, as layers of a model."""
    del x
    return layers_of(y.hidden, y.head)


def arrays_of(layer: eqx.nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight and the bias of a layer, on the host."""
    return np.asarray(layer.weight), np.asarray(layer.bias)


def apply(layer: eqx.nn.Linear, inputs: Array) -> Array:
    """Return W a + b for every row a."""
    product = inputs @ layer.weight.T
    return product if layer.bias is None else product + layer.bias


class Nothing(Hidden):
    """No hidden layer: the rows, flat and scaled."""

    def __call__(self, inputs: Array) -> Array:
        return _flat(inputs)

    def layers_of_model(self, width: int) -> tuple[models.Layer, ...]:
        return (models.Multiply(width**-0.5),)


class Dense(Hidden):
    """One hidden layer, relu(W a + b)."""

    layer: eqx.nn.Linear

    def __call__(self, inputs: Array) -> Array:
        return jax.nn.relu(apply(self.layer, inputs.reshape(len(inputs), -1)))

    def layers_of_model(self, width: int) -> tuple[models.Layer, ...]:
        del width
        return (models.Dense(*arrays_of(self.layer), relu=True),)


class Convolutions(Hidden):
    """3x3 windows, relu, halving, for each layer; what is left is flat and scaled."""

    layers: tuple[eqx.nn.Linear, ...]
    shape: tuple[int, int, int] = eqx.field(static=True)

    def __call__(self, inputs: Array) -> Array:
        images = inputs.reshape(len(inputs), *self.shape)
        for layer in self.layers:
            # As a product of matrices: where every client has its own weights, XLA's
            # convolutions on the CPU are several times slower.
            images = halved(jax.nn.relu(apply(layer, windows(images, jnp))))
        return _flat(images)

    def layers_of_model(self, width: int) -> tuple[models.Layer, ...]:
        every = [models.Convolution(*arrays_of(layer)) for layer in self.layers]
        return (*every, models.Multiply(width**-0.5))


def _flat(inputs: Array) -> Array:
    """Return flat rows of length about 1, so that steps suit any number of entries."""
    flat = inputs.reshape(len(inputs), -1)
    return flat * flat.shape[1] ** -0.5


def _convolutions(
    shape: tuple[int, ...], channels: tuple[int, ...], key: Key
) -> tuple[Convolutions, int]:
    side = math.isqrt(shape[0])
    if len(shape) == 1 and side**2 == shape[0]:
        shape = (side, side)
    if len(shape) not in (2, 3) or min(shape[:2]) < 2 ** len(channels):
        raise InvalidInputError(
            f"model=convolutional: a sample of shape {shape} is no image. It needs "
            "(height, width) or (height, width, channels). Choose another model."
        )
    height, wide, before = (*shape, 1)[:3]
    image = (height, wide, before)
    layers = []
    for after, one in zip(channels, jr.split(key, len(channels)), strict=True):
        layer = eqx.nn.Linear(WINDOW**2 * before, after, key=one)
        # Drawn from U(-1, 1)/sqrt(inputs), of variance 1/(3 inputs); a relu after each
        # of several layers needs 2/inputs, or the signal fades.
        layers.append(eqx.tree_at(lambda a: a.weight, layer, 6**0.5 * layer.weight))
        height, wide, before = height // 2, wide // 2, after
    return Convolutions(tuple(layers), image), height * wide * before


def build(
    model: str,
    shape: tuple[int, ...],
    classes: int,
    width: int,
    key: Key,
    channels: tuple[int, ...] = _CHANNELS,
) -> Network:
    """Draw hidden layers for samples of a shape; the head starts at zero.

    `width` is for a dense layer, `channels` has an entry for each convolution.
    """
    check_choice("model", model, ("linear", "mlp", "convolutional"))
    if width < 1:
        raise InvalidInputError(f"width={width}: a hidden layer needs a unit.")
    if model == "linear":
        hidden, features = Nothing(), math.prod(shape)
    elif model == "mlp":
        layer = eqx.nn.Linear(math.prod(shape), width, key=key)
        hidden, features = Dense(layer), width
    else:
        hidden, features = _convolutions(shape, channels, key)
    head = eqx.nn.Linear(features, classes, key=key)
    return Network(hidden, _tree.zeros_like(head))
