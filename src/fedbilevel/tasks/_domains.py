"""Many small learning tasks, a network for them, and how it is adapted to one.

Tasks are waves, or characters. x is what they share, y what one of them has. Every kind
of lower problem says which layers are y, what the lower level minimizes, and how a new
task finds its y.
"""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from fedbilevel import _tree, datasets, models
from fedbilevel._types import Lower, Rows, Scalar, Upper
from fedbilevel.errors import InvalidInputError
from fedbilevel.tasks._labeled import accuracy, as_numbers, cross_entropy, pixels_of
from fedbilevel.tasks._networks import Hidden, Network, apply, arrays_of, build
from fedbilevel.tasks._rows import take

_WIDTH = 40
_SIDE = 28
_CHANNELS = (16, 32, 32)
_FIT_STEPS = 50
_SQUARED_LENGTH = 10.0
_TINY = 1e-6


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
    dataset: datasets.Dataset, draw: np.random.Generator
) -> tuple[datasets.Dataset, datasets.Dataset]:
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
    whole = replace(dataset, test=None)
    return take(whole, ~new), take(whole, new)


def characters(
    tasks: int, dataset: datasets.Dataset, sizes: Sizes, draw: np.random.Generator
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

    def examples(rows: np.ndarray) -> Rows:
        # The number of a character within the task.
        number = np.arange(sizes.ways, dtype=np.int32)[:, None]
        targets = np.broadcast_to(number, rows.shape).reshape(tasks, -1)
        return {"inputs": dataset.features[rows.reshape(tasks, -1)], "targets": targets}

    return Episodes(*map(examples, np.split(rows, [sizes.shots], axis=2)))


def _check_enough(
    dataset: datasets.Dataset, drawings: Mapping[int, np.ndarray], sizes: Sizes
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


@dataclass(frozen=True)
class Loss:
    """The training loss of a network.

    `error` compares scores with targets, `measure` names what is measured on a set, and
    `fit(features, targets, start, strength)` returns the head with the least error
    plus (strength/2) ||head||^2. `pixels` is for inputs that are images.
    """

    error: Callable[[Array, Array], Scalar]
    measure: Callable[[Array, Array], dict[str, Scalar]]
    fit: Callable[[Array, Array, eqx.nn.Linear, float], eqx.nn.Linear]
    pixels: models.Pixels | None = None


# Tasks of clients, new tasks, and a network for them.
Domain: TypeAlias = tuple[Episodes, Episodes, Network, Loss]


class _Waves(Hidden):
    layers: tuple[eqx.nn.Linear, ...]

    def __call__(self, inputs: Array) -> Array:
        for layer in self.layers:
            inputs = jnp.tanh(apply(layer, inputs))
        # Of length about 1 whatever the width, and so is the curvature for the head.
        return inputs * inputs.shape[-1] ** -0.5

    def layers_of_model(self, width: int) -> tuple[models.Layer, ...]:
        every = [models.Dense(*arrays_of(layer)) for layer in self.layers]
        pairs = [part for one in every for part in (one, models.Tanh())]
        return (*pairs, models.Multiply(width**-0.5))


def _half_mean_square(prediction: Array, targets: Array) -> Scalar:
    return 0.5 * jnp.mean((prediction - targets) ** 2)


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
        last = models.OneLength(_SQUARED_LENGTH, _TINY)
        return (*self.layers.layers_of_model(width), last)


def _mean_square(prediction: Array, targets: Array) -> dict[str, Scalar]:
    return {"error": 2 * _half_mean_square(prediction, targets)}


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


def waves(tasks: tuple[int, int], sizes: Sizes, instance: int) -> Domain:
    """Draw waves for so many clients and new tasks, and a network of dense layers."""
    draw = np.random.default_rng(instance)
    own, new = (sinusoids(count, sizes, draw) for count in tasks)
    widths, keys = (1, _WIDTH, _WIDTH, 1), jr.split(jr.key(instance), 3)
    *hidden, head = (
        eqx.nn.Linear(before, after, key=key)
        for before, after, key in zip(widths[:-1], widths[1:], keys, strict=True)
    )
    network = Network(_Waves(tuple(hidden)), head)
    return own, new, network, Loss(_half_mean_square, _mean_square, _ridge)


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
    loss = Loss(cross_entropy, _rates, _softmax_regression, pixels_of(images))
    return own, new, network, loss


def _small(dataset: datasets.Dataset) -> datasets.Dataset:
    images, least = dataset.features, 2 ** len(_CHANNELS)
    side = min(_SIDE, *images.shape[1:3])
    if images.dtype != np.uint8 or images.ndim < 3 or side < least:
        raise InvalidInputError(
            f"{dataset.name}: a sample is {images.dtype} of shape {images.shape[1:]}. "
            f"Give images of bytes, of {least}x{least} pixels at least."
        )
    return replace(dataset, features=datasets.shrink(images, side))


@dataclass(frozen=True)
class AbstractKind(abc.ABC):
    """A kind of lower problem.

    `strength` is what holds y, `steps` gradient steps of size `step` adapt all layers.
    """

    loss: Loss
    strength: float
    step: float = 0.0
    steps: int = 0

    @abc.abstractmethod
    def start(self, network: Network) -> tuple[Upper, Lower]:
        """Return x and y from a network."""

    @abc.abstractmethod
    def scores(self, x: Upper, y: Lower, inputs: Array) -> Array:
        """Return the scores of a set."""

    @abc.abstractmethod
    def adapt(self, x: Upper, like: Lower, support: Rows) -> Lower:
        """Return y, shaped `like` another one, for the support set of a new task."""

    @abc.abstractmethod
    def held_error(self, x: Upper, y: Lower, support: Rows) -> Scalar:
        """Return g_k on one set."""

    def error(self, x: Upper, y: Lower, examples: Rows) -> Scalar:
        """Return the error on one set."""
        scores = self.scores(x, y, examples["inputs"])
        return self.loss.error(scores, examples["targets"])

    def upper(self, x: Upper, y: Lower, rows: Rows) -> Scalar:
        """Return the mean of f_k over sets."""
        return jnp.mean(jax.vmap(self.error, (None, None, 0))(x, y, rows))

    def lower(self, x: Upper, y: Lower, rows: Rows) -> Scalar:
        """Return the mean of g_k over sets."""
        return jnp.mean(jax.vmap(self.held_error, (None, None, 0))(x, y, rows))


class Head(AbstractKind):
    """The last layer adapts, and is kept small."""

    def start(self, network: Network) -> tuple[Hidden, eqx.nn.Linear]:
        return network.hidden, _tree.zeros_like(network.head)

    def scores(self, x: Hidden, y: eqx.nn.Linear, inputs: Array) -> Array:
        return apply(y, x(as_numbers(inputs, self.loss.pixels)))

    def held_error(self, x: Hidden, y: eqx.nn.Linear, support: Rows) -> Scalar:
        return self.error(x, y, support) + 0.5 * self.strength * _tree.dot(y, y)

    def adapt(self, x: Hidden, like: eqx.nn.Linear, support: Rows) -> eqx.nn.Linear:
        features = x(as_numbers(support["inputs"], self.loss.pixels))
        start = _tree.zeros_like(like)
        return self.loss.fit(features, support["targets"], start, self.strength)


class _AbstractAllLayers(AbstractKind):
    def start(self, network: Network) -> tuple[Network, Network]:
        return network, network

    def scores(self, x: Network, y: Network, inputs: Array) -> Array:
        del x  # only the lower level depends on it
        return y(as_numbers(inputs, self.loss.pixels))

    def descend(self, loss: Callable[[Network], Scalar], start: Network) -> Network:
        """Take the gradient steps."""

        def move(y: Network, _: None) -> tuple[Network, None]:
            return _tree.add_scaled(y, -self.step, jax.grad(loss)(y)), None

        return jax.lax.scan(move, start, None, length=self.steps)[0]


class Proximal(_AbstractAllLayers):
    """All layers adapt, and are pulled to x."""

    def held_error(self, x: Network, y: Network, support: Rows) -> Scalar:
        change = _tree.subtract(y, x)
        pull = 0.5 * self.strength * _tree.dot(change, change)
        return self.error(x, y, support) + pull

    def adapt(self, x: Network, like: Network, support: Rows) -> Network:
        del like
        return self.descend(lambda y: self.held_error(x, y, support), x)


class Unrolled(_AbstractAllLayers):
    """All layers take a few steps from x, and the upper level sees through them."""

    def held_error(self, x: Network, y: Network, support: Rows) -> Scalar:
        """Return half the squared distance from what the steps lead to."""
        change = _tree.subtract(y, self.adapt(x, y, support))
        return 0.5 * _tree.dot(change, change)

    def adapt(self, x: Network, like: Network, support: Rows) -> Network:
        del like
        return self.descend(lambda y: self.error(x, y, support), x)
