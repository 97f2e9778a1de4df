"""Three ways to adapt a network to a small task, as lower problems.

x is what tasks share, y what one of them has. Every kind says which layers are y, what
the lower level minimizes, and how a new task finds its y.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Lower, Rows, Scalar, Upper
from fedbilevel.models import Pixels
from fedbilevel.tasks._labeled import as_numbers
from fedbilevel.tasks._networks import Hidden, Network, apply


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
    pixels: Pixels | None = None


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
