"""How the replies of all participants become one: means, and robust reductions.

The robust reductions count clients, not their weights, but for the geometric median.
"""

import abc
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from fedbilevel.channels.coders import share_of
from fedbilevel.errors import InvalidInputError
from fedbilevel.schedules import as_number

Weights = Float[Array, " places"]


def weighted_mean(
    replies: PyTree, weights: Weights, total: Callable[[Any], Any] = lambda value: value
) -> PyTree:
    """Average replies by weights; `total` adds up what other devices hold.

    Places of weight 0 are not clients and are left out whatever they hold.
    """
    share = weights / total(jnp.sum(weights))

    def mean(leaf: Array) -> Array:
        part = _across(share.astype(leaf.dtype), leaf)
        return total(jnp.sum(jnp.where(part > 0, part * leaf, 0), axis=0))

    return jax.tree.map(mean, replies)


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

    @abc.abstractmethod
    def __call__(self, replies: PyTree, weights: Weights) -> PyTree:
        """Return the reply that stands for all."""


class Mean(AbstractReduction):
    """The mean by weights, as the algorithms state it."""

    adds_up: ClassVar[bool] = True

    def __call__(self, replies: PyTree, weights: Weights) -> PyTree:
        """Return the weighted mean."""
        return weighted_mean(replies, weights)


class SecureMean(Mean):
    """The mean of replies that the server never sees one by one.

    In a deployment they travel as masked whole numbers of 64 bits, whose masks cancel
    in the sum. Here the mean is taken as it is, and counted in that width.
    """

    bytes_per_number: ClassVar[int | None] = 8


class Median(AbstractReduction):
    """The median of each coordinate; every client counts once, whatever its weight."""

    def __call__(self, replies: PyTree, weights: Weights) -> PyTree:
        """Return the mean of the one or two entries in the middle."""
        present = weights > 0
        count = _number_of(present)

        def median(leaf: Array) -> Array:
            ordered = _in_order(leaf, present)
            lower, upper = (count - 1) // 2, count // 2
            return (ordered[lower] + ordered[upper]) / 2

        return jax.tree.map(median, replies)


class TrimmedMean(AbstractReduction):
    """The mean of each coordinate without its extremes; every client counts once.

    At least this `fraction` of the participants is left out at each end.
    """

    fraction: float = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not 0 <= self.fraction < 0.5:
            raise InvalidInputError(
                f"`TrimmedMean(fraction={self.fraction})`: choose a share for each "
                "end, at least 0 and below 0.5."
            )

    def check(self, participants: int) -> None:
        """Raise if no reply would be left."""
        cut = share_of(self.fraction, participants)
        if participants <= 2 * cut:
            raise InvalidInputError(
                f"`TrimmedMean(fraction={self.fraction})` leaves out {cut} of "
                f"{participants} participants at each end, which is all of them. Use a "
                "smaller fraction or more participants."
            )

    def __call__(self, replies: PyTree, weights: Weights) -> PyTree:
        """Return the mean of the middle."""
        present = weights > 0
        places, count = weights.shape[0], _number_of(present)
        cuts = [share_of(self.fraction, number) for number in range(places + 1)]
        cut = jnp.asarray(cuts, jnp.int32)[count]
        rank = jnp.arange(places, dtype=jnp.int32)
        inside = (rank >= cut) & (rank < count - cut)

        def mean(leaf: Array) -> Array:
            ordered = _in_order(leaf, present)
            kept = jnp.where(_across(inside, leaf), ordered, 0)
            return jnp.sum(kept, axis=0) / (count - 2 * cut).astype(leaf.dtype)

        return jax.tree.map(mean, replies)


class GeometricMedian(AbstractReduction):
    """The point with the least weighted sum of distances to the whole replies.

    `iterations` smoothed Weiszfeld steps as in RFA (arXiv 1912.13445): distances below
    `smoothing` count as that long.
    """

    iterations: int = eqx.field(static=True, default=16)
    smoothing: Float[Array, "..."] = eqx.field(converter=as_number, default=1e-6)

    def __check_init__(self) -> None:
        if self.iterations < 1:
            raise InvalidInputError(
                f"`GeometricMedian(iterations={self.iterations})`: at least 1."
            )

    def __call__(self, replies: PyTree, weights: Weights) -> PyTree:
        """Return it after the given number of steps."""

        def distances(middle: PyTree) -> Weights:
            return jnp.sqrt(_squares(replies, middle)).astype(weights.dtype)

        def step(middle: PyTree, least: Array) -> PyTree:
            pull = weights / jnp.maximum(distances(middle), least)
            return weighted_mean(replies, jnp.where(weights > 0, pull, 0))

        smoothing = self.smoothing.astype(weights.dtype)
        median = Median()
        start = median(replies, weights)
        # Steps hardly leave a point that is a client's own, as the start may be. One
        # first, in which all of the nearer half pull alike, leads away from there.
        reach = median(distances(start), weights)
        start = step(start, jnp.maximum(reach, smoothing))
        return jax.lax.fori_loop(
            0, self.iterations, lambda _, middle: step(middle, smoothing), start
        )


class Krum(AbstractReduction):
    """The reply of the one client that is nearest to its neighbors (arXiv 1703.02757).

    With m present and up to `faulty` of them faulty, the m - faulty - 2 nearest count.
    """

    faulty: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.faulty < 0:
            raise InvalidInputError(
                f"`Krum(faulty={self.faulty})`: the number must not be negative."
            )

    def check(self, participants: int) -> None:
        """Raise if so many faulty ones could decide."""
        if participants < 2 * self.faulty + 3:
            raise InvalidInputError(
                f"`Krum(faulty={self.faulty})` needs at least 2 * faulty + 3 = "
                f"{2 * self.faulty + 3} participants, there are {participants}. Use "
                "more participants, or a smaller `faulty`."
            )

    def __call__(self, replies: PyTree, weights: Weights) -> PyTree:
        """Return the reply with the least sum of squared distances to neighbors."""
        present = weights > 0
        places = jnp.arange(weights.shape[0], dtype=jnp.int32)
        neighbors = _number_of(present) - self.faulty - 2

        def score(place: Array) -> Array:
            one = jax.tree.map(lambda leaf: leaf[place], replies)
            others = present & (places != place)
            squares = jnp.where(others, _squares(replies, one), jnp.inf)
            near = jnp.where(places < neighbors, jnp.sort(squares), 0)
            return jnp.where(present[place], jnp.sum(near), jnp.inf)

        # One at a time: all pairs at once would hold every reply once per client.
        chosen = jnp.argmin(jax.lax.map(score, places))
        return jax.tree.map(lambda leaf: leaf[chosen], replies)


def _across(values: Array, leaf: Array) -> Array:
    """Return one value per place so that it meets a whole leaf."""
    return values.reshape((-1,) + (1,) * (leaf.ndim - 1))


def _number_of(present: Bool[Array, " places"]) -> Int[Array, ""]:
    return jnp.sum(present, dtype=jnp.int32)


def _in_order(leaf: Array, present: Bool[Array, " places"]) -> Array:
    """Sort every coordinate over places; absent clients come last."""
    return jnp.sort(jnp.where(_across(present, leaf), leaf, jnp.inf), axis=0)


def _squares(replies: PyTree, one: PyTree) -> Array:
    """Return the squared distance of every reply to this one."""

    def square(leaf: Array, middle: Array) -> Array:
        axes = tuple(range(1, leaf.ndim))
        return jnp.sum(jnp.square(leaf - middle), axis=axes)

    return reduce(jnp.add, jax.tree.leaves(jax.tree.map(square, replies, one)))
