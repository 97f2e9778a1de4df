"""What small learning tasks are about: waves, or characters of alphabets."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from fedbilevel import _tree, datasets, models
from fedbilevel._types import Key, Scalar
from fedbilevel.errors import InvalidInputError
from fedbilevel.tasks._adaptation import Loss
from fedbilevel.tasks._episodes import (
    Episodes,
    Sizes,
    alphabets_apart,
    characters,
    sinusoids,
)
from fedbilevel.tasks._labeled import accuracy, cross_entropy, pixel_scaling
from fedbilevel.tasks._networks import Hidden, Network, apply, arrays_of, build

__all__ = ["Domain", "characters_of", "waves"]

_WIDTH = 40
_SIDE = 28
_CHANNELS = (16, 32, 32)
_FIT_STEPS = 50
_SQUARED_LENGTH = 10.0
_TINY = 1e-6


@dataclass(frozen=True)
class Domain:
    """Tasks of clients, new tasks, and a network for them.

    `measure(scores, targets)` names what is told of a set. `pixels` is for images.
    """

    own: Episodes
    new: Episodes
    network: Network
    loss: Loss
    measure: Callable[[Array, Array], dict[str, Scalar]]
    pixels: models.Pixels | None = None


class _Waves(Hidden):
    layers: tuple[eqx.nn.Linear, ...]

    def __call__(self, inputs: Array) -> Array:
        for layer in self.layers:
            inputs = jnp.tanh(apply(layer, inputs))
        # Of length about 1 whatever the width, and so is the curvature for the head.
        return inputs * inputs.shape[-1] ** -0.5

    def layers_of_model(self, width: int) -> tuple[models.Layer, ...]:
        """Return the layers, and the scaling."""
        every = [models.Dense(*arrays_of(layer)) for layer in self.layers]
        pairs = [part for one in every for part in (one, models.Tanh())]
        return (*pairs, models.Multiply(width**-0.5))


def _network_for_waves(key: Key) -> Network:
    sizes = (1, _WIDTH, _WIDTH, 1)
    keys = jr.split(key, len(sizes) - 1)
    *hidden, head = (
        eqx.nn.Linear(before, after, key=k)
        for before, after, k in zip(sizes[:-1], sizes[1:], keys, strict=True)
    )
    return Network(_Waves(tuple(hidden)), head)


def _half_mean_square(prediction: Array, targets: Array) -> Scalar:
    return 0.5 * jnp.mean((prediction - targets) ** 2)


def _mean_square(prediction: Array, targets: Array) -> dict[str, Scalar]:
    return {"error": 2 * _half_mean_square(prediction, targets)}


def _ridge(
    features: Array, targets: Array, start: eqx.nn.Linear, strength: float
) -> eqx.nn.Linear:
    flat, restore = ravel_pytree(start)

    def loss(y: Array) -> Scalar:
        error = _half_mean_square(apply(restore(y), features), targets)
        return error + 0.5 * strength * y @ y

    # The loss is quadratic in the head: one Newton step ends at its minimum.
    step = jnp.linalg.solve(jax.hessian(loss)(flat), jax.grad(loss)(flat))
    return restore(flat - step)


class _OneLength(Hidden):
    layers: Hidden

    def __call__(self, inputs: Array) -> Array:
        # However much the layers grow, the curvature for the head stays the same. It is
        # larger than theirs, so that where all adapt at one step the head goes ahead.
        features = self.layers(inputs)
        features -= jnp.mean(features, axis=1, keepdims=True)
        square = jnp.sum(features**2, axis=1, keepdims=True)
        return features * jnp.sqrt(_SQUARED_LENGTH / (square + _TINY))

    def layers_of_model(self, width: int) -> tuple[models.Layer, ...]:
        """Return the layers, and what gives features one length."""
        last = models.OneLength(_SQUARED_LENGTH, _TINY)
        return (*self.layers.layers_of_model(width), last)


def _rates(scores: Array, targets: Array) -> dict[str, Scalar]:
    right = accuracy(scores, targets)
    return {"error": 1 - right, "accuracy": right}


def _softmax_regression(
    features: Array, targets: Array, start: eqx.nn.Linear, strength: float
) -> eqx.nn.Linear:
    def loss(y: eqx.nn.Linear) -> Scalar:
        error = cross_entropy(apply(y, features), targets)
        return error + 0.5 * strength * _tree.dot(y, y)

    # Softmax has curvature 1/2 at most, so these steps never grow, however long the
    # features; Newton's could.
    longest = jnp.max(jnp.sum(features**2, axis=1)) + 1
    step = 1 / (0.5 * longest + strength)
    root = jnp.sqrt(strength * step)
    momentum = (1 - root) / (1 + root)

    def move(carry: tuple, _: None) -> tuple[tuple, None]:
        here, before = carry
        ahead = _tree.add_scaled(here, momentum, _tree.subtract(here, before))
        return (_tree.add_scaled(ahead, -step, jax.grad(loss)(ahead)), here), None

    return jax.lax.scan(move, (start, start), None, length=_FIT_STEPS)[0][0]


def _unchanged(inputs: Array) -> Array:
    return inputs


def waves(tasks: tuple[int, int], sizes: Sizes, instance: int) -> Domain:
    """Draw waves for so many clients and new tasks, and a network of dense layers."""
    draw = np.random.default_rng(instance)
    own, new = (sinusoids(count, sizes, draw) for count in tasks)
    network = _network_for_waves(jr.key(instance))
    return Domain(
        own, new, network, Loss(_unchanged, _half_mean_square, _ridge), _mean_square
    )


def characters_of(
    source: str, tasks: tuple[int, int], sizes: Sizes, instance: int
) -> Domain:
    """Draw characters of a data set, and a convolutional network."""
    dataset, draw = datasets.load(source), np.random.default_rng(instance)
    sides = [_small(side) for side in alphabets_apart(dataset, draw)]
    # First the new ones, so that they are the same for any number of clients.
    new, own = (characters(tasks[i], sides[i], sizes, draw) for i in (1, 0))
    images = sides[0].features
    network = build(
        "convolutional", images.shape[1:], sizes.ways, 1, jr.key(instance), _CHANNELS
    )
    network = Network(_OneLength(network.hidden), network.head)
    scaling = pixel_scaling(images)
    pixels = models.Pixels(scaling.center, scaling.spread, images.shape[1:])
    loss = Loss(scaling, cross_entropy, _softmax_regression)
    return Domain(own, new, network, loss, _rates, pixels)


def _small(dataset: datasets.Dataset) -> datasets.Dataset:
    images, least = dataset.features, 2 ** len(_CHANNELS)
    side = min(_SIDE, *images.shape[1:3])
    if images.dtype != np.uint8 or images.ndim < 3 or side < least:
        raise InvalidInputError(
            f"{dataset.name}: a sample is {images.dtype} of shape {images.shape[1:]}. "
            f"Give images of bytes, of {least}x{least} pixels at least."
        )
    return replace(dataset, features=datasets.shrink(images, side))
