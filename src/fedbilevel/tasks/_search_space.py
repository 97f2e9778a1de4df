"""The networks that the task architecture searches, and how they are evaluated."""

from functools import cache
from itertools import product
from math import isqrt

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from fedbilevel._types import Key
from fedbilevel.models import Dense

OPERATIONS = ("convolution_3", "convolution_5", "average", "identity")
EDGES = 2
_CHANNELS, _SIDE = 8, 4


class _Convolution(eqx.Module):
    """The relu of a convolution to 4x4 pixels, with zeros around the image.

    It is kept as a kernel and applied as a matrix from all pixels to all pixels, which
    is fastest for images this small, the more so where clients differ in their weights.
    """

    kernel: Float[Array, "window channels channels"]
    bias: Float[Array, " channels"]

    def __init__(self, size: int, channels: int, key: Key):
        shape, inputs = (size**2, channels, _CHANNELS), size**2 * channels
        self.kernel = (2 / inputs) ** 0.5 * jr.normal(key, shape)
        self.bias = jnp.zeros(_CHANNELS)

    def __call__(self, images: Float[Array, "rows pixels channels"]) -> Array:
        places = _neighbors(images.shape[1], len(self.kernel))
        matrix = jnp.tensordot(jnp.asarray(places, images.dtype), self.kernel, 1)
        return jax.nn.relu(jnp.einsum("npc,pqcd->nqd", images, matrix) + self.bias)

    def as_matrix(self, pixels: int) -> tuple[np.ndarray, np.ndarray]:
        """Return weights and bias from all flat pixels to all, before the relu."""
        kernel, bias = np.asarray(self.kernel), np.asarray(self.bias)
        places = _neighbors(pixels, len(kernel)).astype(kernel.dtype)
        matrix = np.tensordot(places, kernel, 1).transpose(1, 3, 0, 2)
        rows = matrix.shape[0] * matrix.shape[1]
        return matrix.reshape(rows, -1), np.tile(bias, matrix.shape[0])


@cache
def _neighbors(pixels: int, window: int) -> np.ndarray:
    """Return 1 at (p, q, s) where output q sees input p through entry s of a window.

    There are 4 x 4 outputs, spread evenly over the input.
    """
    side, size = isqrt(pixels), isqrt(window)
    stride = side // _SIDE
    found = np.zeros((side, side, _SIDE, _SIDE, size, size))
    steps = range(_SIDE), range(_SIDE), range(size), range(size)
    for row, column, down, right in product(*steps):
        from_row = stride * row + down - size // 2
        from_column = stride * column + right - size // 2
        if 0 <= from_row < side and 0 <= from_column < side:
            found[from_row, from_column, row, column, down, right] = 1
    return found.reshape(pixels, _SIDE**2, window)


class _Edge(eqx.Module):
    convolution_3: _Convolution
    convolution_5: _Convolution

    def __init__(self, key: Key):
        three, five = jr.split(key)
        self.convolution_3 = _Convolution(3, _CHANNELS, three)
        self.convolution_5 = _Convolution(5, _CHANNELS, five)

    def apply(self, operation: str, hidden: Array) -> Array:
        if operation == "average":
            near = _neighbors(hidden.shape[1], 9).mean(axis=-1)
            return jnp.einsum("npc,pq->nqc", hidden, jnp.asarray(near, hidden.dtype))
        if operation == "identity":
            return hidden
        return getattr(self, operation)(hidden)


class Network(eqx.Module):
    """All weights: those of the operations on every edge, and around them."""

    first: _Convolution
    edges: tuple[_Edge, ...]
    last: eqx.nn.Linear

    def __init__(self, key: Key, classes: int):
        first, last, *edges = jr.split(key, 2 + EDGES)
        self.first = _Convolution(3, 1, first)
        self.edges = tuple(_Edge(edge) for edge in edges)
        self.last = eqx.nn.Linear(_SIDE**2 * _CHANNELS, classes, key=last)


def mixed_scores(x: Array, y: Network, images: Array) -> Array:
    """Return the scores of the classes, all operations mixed by the logits x."""
    hidden = y.first(images[..., None])
    for place, edge in enumerate(y.edges):
        outputs = jnp.stack([edge.apply(name, hidden) for name in OPERATIONS])
        hidden = jnp.tensordot(jax.nn.softmax(x[place]), outputs, 1)
    return jax.vmap(y.last)(hidden.reshape(len(hidden), -1))


def single_scores(choice: tuple[str, ...], y: Network, images: Array) -> Array:
    """Return the scores of the classes with one operation on every edge."""
    hidden = y.first(images[..., None])
    for operation, edge in zip(choice, y.edges, strict=True):
        hidden = edge.apply(operation, hidden)
    return jax.vmap(y.last)(hidden.reshape(len(hidden), -1))


def mixed_layers(x: Array, y: Network, pixels: int) -> tuple[Dense, ...]:
    """Return the mixed network as layers of a model, for flat images of so many pixels.

    What an edge is given is never negative, so that a relu leaves the average and the
    identity as they are, and all operations are one layer.
    """
    first, bias = y.first.as_matrix(pixels)
    layers = [Dense(first, bias, relu=True)]
    width = len(bias)
    near = _neighbors(_SIDE**2, 9).mean(axis=-1).T
    blank = np.zeros(width, bias.dtype)
    others = [
        (np.kron(near, np.eye(_CHANNELS)).astype(bias.dtype), blank),
        (np.eye(width, dtype=bias.dtype), blank),
    ]
    for logits, edge in zip(np.asarray(x), y.edges, strict=True):
        share = np.exp(logits - logits.max())
        share = (share / share.sum()).astype(bias.dtype)
        learned = (edge.convolution_3, edge.convolution_5)
        every = [*(one.as_matrix(_SIDE**2) for one in learned), *others]
        weights, biases = zip(*every, strict=True)
        layers.append(Dense(np.vstack(weights), np.hstack(biases), relu=True))
        summed = np.kron(share[None], np.eye(width, dtype=bias.dtype))
        layers.append(Dense(summed, blank))
    last = Dense(np.asarray(y.last.weight), np.asarray(y.last.bias))
    return (*layers, last)
