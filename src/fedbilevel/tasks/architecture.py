r"""A small DARTS: which operation belongs on each edge of a network for images.

    h_0 = relu(conv3(image)),    h_{e+1} = sum_o softmax(x_e)_o o(h_e),    e = 0, 1
    f_k(x, y) = mean of CE(linear(h_2), label) over client k's validation images
    g_k(x, y) = the same over client k's training images + (0.001/2) ||y||^2

x has a logit for every operation o on both edges e; y are the weights of all operations
and of the layers before and after. h has 4x4 pixels of 8 channels. The operations are
relu(conv3), relu(conv5), the average of a 3x3 window, and the identity; DARTS has a
zero, too, and never chooses it. The lower level is not convex, so that no theorem
holds, and the series for its inverse is best kept short.

`retrained_accuracy` trains a network of one operation per edge from scratch. The model
that a run leaves is the mixed network, whose accuracy is measured.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._types import Key, Rows, Scalar
from fedbilevel.datasets import Dataset, Preparation, shrink
from fedbilevel.datasets.images import coverage
from fedbilevel.datasets.preparation import NumericColumn
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Dense, Layer, Pixels
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tasks import _parts, _rows
from fedbilevel.tasks._base import MEASURED_BELOW, Point, Task, settings
from fedbilevel.tasks._labeled import HeldOut, cross_entropy
from fedbilevel.tasks._networks import arrays_of

OPERATIONS = ("convolution_3", "convolution_5", "average", "identity")
EDGES = 2
_PENALTY = 0.001
_SIDE = 8  # of the images that the network takes
_INSIDE, _CHANNELS = 4, 8  # side of what is between its layers, and numbers of a pixel
_RETRAINING_STEP, _RETRAINING_MEMORY, _RETRAINING_BATCH = 0.02, 0.9, 32
_RECOMMENDED = MEASURED_BELOW | {
    "auto:fedbio-controls": "lower_step=1/L auxiliary_step=1/L",
    **settings("rounds=100 local_steps=5 batch=16 q=1 theta=0.05 upper_step=1"),
    **settings("lower_step=0.05 upper_weight=0.1 lower_weight=0.1"),
}


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
    side, size = math.isqrt(pixels), math.isqrt(window)
    stride = side // _INSIDE
    found = np.zeros((side, side, _INSIDE, _INSIDE, size, size))
    steps = range(_INSIDE), range(_INSIDE), range(size), range(size)
    for row, column, down, right in product(*steps):
        from_row = stride * row + down - size // 2
        from_column = stride * column + right - size // 2
        if 0 <= from_row < side and 0 <= from_column < side:
            found[from_row, from_column, row, column, down, right] = 1
    return found.reshape(pixels, _INSIDE**2, window)


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
        self.last = eqx.nn.Linear(_INSIDE**2 * _CHANNELS, classes, key=last)


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


def _penalty(y: Network) -> Scalar:
    return 0.5 * _PENALTY * _tree.dot(y, y)


def _upper(x: Array, y: Network, rows: Rows) -> Scalar:
    return cross_entropy(mixed_scores(x, y, rows["image"]), rows["label"])


def _lower(x: Array, y: Network, rows: Rows) -> Scalar:
    return _upper(x, y, rows) + _penalty(y)


PROBLEM = Problem(_upper, _lower)


class _HeldOutImages(HeldOut):
    """The mixed network on images that no client has, and the operations it prefers."""

    def __call__(self, x: Array, y: Network) -> dict[str, Array]:
        measured = super().__call__(x, y)
        best = jnp.argmax(x, axis=1).astype(x.dtype)
        return {
            **{name: measured[name] for name in ("test_loss", "test_accuracy")},
            **{f"operation_{place}": best[place] for place in range(EDGES)},
        }


def operation_names(x: Array | np.ndarray) -> tuple[str, ...]:
    """Name the operation with the largest logit on each edge."""
    return tuple(OPERATIONS[index] for index in np.argmax(np.asarray(x), axis=1))


def retrained_accuracy(
    task: Task, choice: Sequence[str], steps: int = 300, seed: int = 0
) -> float:
    """Train one operation per edge from scratch; return the accuracy on test images.

    By gradient steps with momentum on the training and validation images of all
    clients together. `seed` draws the first weights and the batches.
    """
    unknown = [name for name in choice if name not in OPERATIONS]
    if unknown or len(choice) != EDGES:
        raise InvalidInputError(
            f"choice={tuple(choice)}: name one of {', '.join(OPERATIONS)} for "
            f"each of the {EDGES} edges."
        )
    test: _HeldOutImages = task.metrics  # pyright: ignore[reportAssignmentType]
    names = tuple(choice)
    classes = len(task.classes)
    trained = _train(names, steps, classes, _pooled(task.data), jr.key(seed))
    return float(test.accuracy(single_scores(names, trained, test.features)))


def _pooled(data: ClientData) -> Rows:
    """Return the rows of all clients and both levels, without the padding."""
    levels = ((data.upper, data.upper_sizes), (data.lower, data.lower_sizes))
    every = [
        jax.tree.map(lambda leaf, k=k, size=size: leaf[k, :size], rows)
        for rows, sizes in levels
        for k, size in enumerate(np.asarray(sizes))
    ]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *every)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _train(
    choice: tuple[str, ...], steps: int, classes: int, rows: Rows, key: Key
) -> Network:
    begin, draw = jr.split(key)

    def loss(y: Network, batch: Rows) -> Scalar:
        scores = single_scores(choice, y, batch["image"])
        return cross_entropy(scores, batch["label"]) + _penalty(y)

    def step(carry: tuple[Network, Network], key: Key):
        y, direction = carry
        index = jr.randint(key, (_RETRAINING_BATCH,), 0, len(rows["label"]))
        slope = jax.grad(loss)(y, jax.tree.map(lambda leaf: leaf[index], rows))
        direction = _tree.add_scaled(slope, _RETRAINING_MEMORY, direction)
        return (_tree.add_scaled(y, -_RETRAINING_STEP, direction), direction), None

    first = Network(begin, classes)
    (last, _), _ = jax.lax.scan(
        step, (first, _tree.zeros_like(first)), jr.split(draw, steps)
    )
    return last


def _conclude(task: Task, point: Point) -> dict[str, Any]:
    chosen = operation_names(point["x"])
    return {
        "operations": list(chosen),
        "retrained_accuracy": retrained_accuracy(task, chosen),
    }


def _small_images(dataset: Dataset) -> tuple[Dataset, Pixels | None]:
    """Make gray images of 8x8 pixels, of mean 0 and variance 1 over all of them.

    Where columns are prepared the preparation says mean and variance of all together,
    so that they are the same at all sites.
    """
    made = dataset.preparation
    numbers = made is None or all(isinstance(c, NumericColumn) for c in made.columns)
    side = math.isqrt(math.prod(dataset.features.shape[1:2]))
    flat = dataset.features.ndim == 2
    if not numbers or (flat and (side**2 != dataset.features.shape[1] or side < _SIDE)):
        raise InvalidInputError(
            f"{dataset.name}: rows of {dataset.features.shape[1]} columns are no "
            "images of 8x8 pixels or more, for which the task architecture builds a "
            "network. Tasks for tables are regularization, cleaning, representation, "
            "loss-tuning and fairness."
        )

    def small(features: np.ndarray) -> np.ndarray:
        image = np.asarray(features, float)
        image = image.reshape(len(image), side, side) if flat else image
        image = image.mean(axis=3) if image.ndim == 4 else image
        image = image if image.shape[1:] == (_SIDE, _SIDE) else shrink(image, _SIDE)
        return image.reshape(len(image), -1)

    image, test = small(dataset.features), dataset.test
    center, spread = float(image.mean()), float(image.std()) or 1.0
    if made is not None:
        center, spread = _together(made)
    if test is not None:
        test = replace(test, features=(small(test.features) - center) / spread)
    shape, pixels = dataset.features.shape[1:], None
    if made is not None:
        alike = (replace(one, center=center, spread=spread) for one in made.columns)
        made = replace(made, columns=tuple(alike))
    elif len(shape) == 1:
        every = np.full(shape, center), np.full(shape, spread)
        made = Preparation.of_arrays(*every, dataset.classes)
    elif dataset.features.dtype == np.uint8:
        pixels = Pixels(center / 255, spread / 255, shape)
    scaled = (image - center) / spread
    return replace(dataset, features=scaled, test=test, preparation=made), pixels


def _together(made: Preparation) -> tuple[float, float]:
    """Return mean and deviation of the numbers in all columns together."""
    pairs = [(c.center, c.spread) for c in made.columns if isinstance(c, NumericColumn)]
    centers, spreads = np.asarray(pairs).T
    center = centers.mean()
    return float(center), float(np.sqrt((spreads**2 + (centers - center) ** 2).mean()))


def _layers(shape: tuple[int, ...], x: Array, y: Network) -> tuple[Layer, ...]:
    """Return the mixed network as a model; images of a shape become small before.

    What an edge is given is never negative, so that a relu leaves the average and the
    identity as they are, and all operations are one layer.
    """
    weight, bias = y.first.as_matrix(_SIDE**2)
    layers = [Dense(weight, bias, relu=True)]
    if math.prod(shape) != _SIDE**2:
        side = math.isqrt(shape[0])
        height, width, *channels = shape if len(shape) > 1 else (side, side)
        means = np.kron(coverage(height, _SIDE), coverage(width, _SIDE))
        count = math.prod(channels)
        means = np.repeat(means / count, count, axis=1).astype(weight.dtype)
        layers.insert(0, Dense(means, np.zeros(_SIDE**2, means.dtype)))
    near = _neighbors(_INSIDE**2, 9).mean(axis=-1).T
    same, blank = np.eye(len(bias), dtype=bias.dtype), np.zeros_like(bias)
    average = np.kron(near, np.eye(_CHANNELS)).astype(bias.dtype)
    for logits, edge in zip(np.asarray(x), y.edges, strict=True):
        share = np.exp(logits - logits.max())
        share = (share / share.sum()).astype(bias.dtype)
        learned = (edge.convolution_3, edge.convolution_5)
        every = [one.as_matrix(_INSIDE**2) for one in learned]
        weights, biases = zip(*every, (average, blank), (same, blank), strict=True)
        layers.append(Dense(np.vstack(weights), np.hstack(biases), relu=True))
        layers.append(Dense(np.kron(share[None], same), blank))
    return (*layers, Dense(*arrays_of(y.last)))


def make(
    clients: int = 0,
    *,
    data: _rows.Source = "digits",
    partition: _rows.PartitionText = "iid",
    train: _rows.TrainShare = 0.0,
    split: _rows.SplitSeed = 0,
    rows: _rows.RowLimit = 0,
    **table: _rows.TableOptions,
) -> Task:
    """Build the task; 4 clients, and two fifths of a built-in set for training.

    A fifth, or an official test part, is for testing; the other images validate. Images
    become gray, and are shrunk to 8x8 pixels. `split` seeds the first weights, too.
    """
    pool = _rows.load(data, split, rows, table, "architecture", transform=_small_images)
    parts = _parts.partition_rows(pool, clients, partition, train, usual_clients=4)
    upper, lower = (
        [{"image": one["features"], "label": one["label"]} for one in part]
        for part in (parts.upper, parts.lower)
    )
    made, pixels = pool.held.preparation, pool.pixels
    shape = pixels.shape if pixels else (len(made.feature_names) if made else 0,)
    return Task(
        PROBLEM,
        ClientData.from_clients(upper, lower),
        _tree.filled((EDGES, len(OPERATIONS))),
        Network(jr.key(split), pool.classes),
        _HeldOutImages.of(pool.test, mixed_scores),
        headline="test_loss",
        recommended=_RECOMMENDED,
        convex=False,
        conclusion=_conclude,
        concludes={"operations": "texts", "retrained_accuracy": "number"},
        **parts.about(partial(_layers, shape)),
    )
