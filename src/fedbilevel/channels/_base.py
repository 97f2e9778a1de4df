"""What a channel is made of: coders of one client's change, one reduction of all."""

import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from fedbilevel._types import Key

Vector = Float[Array, " size"]
_ROUNDING = 1e-9  # so that 0.1 of 30 is 3, though 0.1 * 30 > 3 in floating point


def share_of(fraction: float, count: int) -> int:
    """Return the least whole number that is at least this fraction of `count`."""
    return math.ceil(fraction * count - _ROUNDING)


class AbstractCoder(eqx.Module):
    """Codes one block of a change, as a vector, on the client that sends it.

    `compresses` is True where what travels is no longer a vector of that size.
    """

    compresses: ClassVar[bool] = False

    def start(self, like: jax.ShapeDtypeStruct) -> PyTree:
        """Return what a client remembers of a block before its first exchange."""
        del like

    @abc.abstractmethod
    def encode(self, vector: Vector, memory: PyTree, key: Key) -> tuple[Any, PyTree]:
        """Return what travels, and what the client remembers then."""

    def decode(self, coded: Any, like: jax.ShapeDtypeStruct) -> Vector:
        """Return the vector that arrives."""
        del like
        return coded

    def why_impossible(self, coded: Any, like: jax.ShapeDtypeStruct) -> str:
        """Return what `encode` would never have sent, or nothing; `coded` is NumPy's.

        Whoever sent it may have written it by hand.
        """
        del coded, like
        return ""


class AbstractReduction(eqx.Module):
    """Makes one reply of those of all participants, stacked over places.

    Places of weight 0 belong to no client, or to one that was absent; what they hold
    does not count. `adds_up` is True for a weighted mean, which devices can add up
    apart from each other. `bytes_per_number` is set where numbers travel in another
    width than their own.
    """

    adds_up: ClassVar[bool] = False
    bytes_per_number: ClassVar[int | None] = None

    def check(self, participants: int) -> None:
        """Raise if so few participants cannot be reduced."""
        del participants

    @abc.abstractmethod
    def __call__(self, replies: PyTree, weights: Float[Array, " places"]) -> PyTree:
        """Return the reply that stands for all."""
