"""Variations of the loop that one method brings along: parts, beside its listing.

ServerScale   AdaFBiO's A and B, by which clients divide their directions
OwnNumber     SimFBO's tau_i, a number of local steps of each client's own
FromAverage   the 2022 FedBiOAcc corrects from the averaged point, before its move
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import Pair
from fedbilevel.algorithms.base import Phase, Turn
from fedbilevel.algorithms.parts import Part, evaluate
from fedbilevel.errors import InvalidInputError
from fedbilevel.schedules import choice, count, number

# Divided by r at least, a step is no longer than the one that was asked for.
BY_R: dict[str, Any] = {
    "over": "eta",
    "convert": lambda value, made: value * made.get("r", 0.1),
    "after": ("r",),
}


class ServerScale(Part):
    """A and B: the server's averages of what the mean directions were."""

    tau: Any = number("what A and B keep in a round")
    r: Any = number("added to what steps are divided by")
    coordinatewise: bool = choice("scale every number of y by its own", default=False)

    def shared(self, start):
        """Return zeros for A and B."""
        return self.seen(_tree.zeros_like(start.point))

    def setup(self, method, place):
        """Return the exchange that measures the first A and B."""

        def local(point, memory, oracle, turn):
            (key,) = turn.keys(1)
            return memory, evaluate(method.directions(oracle, key, 0))(point)

        def up(server, mean):
            return server.sharing(place, self.seen(mean))

        return (Phase("first_directions", lambda server: server.point, local, up),)

    def begun(self, begin, shared, own):
        """Return A and B."""
        return shared

    def scaled(self, state, d):
        """Return u / (sqrt(A) + r) and v / (B + r), or v / (sqrt(B) + r)."""

        def by(root: Callable, d: PyTree, seen: PyTree) -> PyTree:
            def one(d: Array, s: Array) -> Array:
                return d / (root(s) + self.r.astype(d.dtype))

            return None if d is None else jax.tree.map(one, d, seen)

        below = jnp.sqrt if self.coordinatewise else lambda size: size
        return Pair(by(jnp.sqrt, d.x, state.x), by(below, d.y, state.y))

    def taken(self, shared, answer, server, turn):
        """Return tau A + (1 - tau) u^2, and B likewise."""

        def follow(old: Array, new: Array) -> Array:
            tau = self.tau.astype(old.dtype)
            return tau * old + (1 - tau) * new

        return jax.tree.map(follow, shared, self.seen(server.direction))

    def seen(self, direction: Pair) -> Pair:
        """Return u^2, and ||v|| in the place of every leaf of v, or v^2."""
        x = jax.tree.map(jnp.square, direction.x)
        if self.coordinatewise:
            return Pair(x, jax.tree.map(jnp.square, direction.y))
        size = _tree.norm(direction.y)
        return Pair(x, jax.tree.map(lambda leaf: size.astype(leaf.dtype), direction.y))


def own_number(turn: Turn, fewest: int, tau: int) -> Array:
    """Return tau_i, the same in every round."""
    return jr.randint(turn.lasting_key(), (), fewest, tau + 1, jnp.int32)


class OwnNumber(Part):
    """A number of local steps that differs by client."""

    unequal = True

    fewest_steps: int = count("fewest local steps of a client")
    most: int = count("most local steps, tau")

    def __check_init__(self) -> None:
        if self.fewest_steps > self.most:
            raise InvalidInputError(
                f"fewest_steps={self.fewest_steps}: at most local_steps, which is "
                f"{self.most}."
            )

    def begun(self, begin, shared, own):
        """Draw tau_i; return the iteration at which it ends."""
        first = begin.turn.steps(self.most)[0]
        return first + own_number(begin.turn, self.fewest_steps, self.most)

    def stepped(self, state, old, new, t):
        """Return the old place once tau_i steps are made."""
        return state, _tree.select(t < state, new, old)


class FromAverage(Part):
    """The next correction starts from the averaged x, before its move."""

    def previous(self, begin, seen, fallback):
        """Return x_t, where x_{t+1} = x_t - eta a_t nu_t, and the personal y."""
        method, sent = begin.method, begin.message
        last = jnp.maximum(jnp.asarray(begin.turn.index) * method.local_steps - 1, 0)
        x = _tree.add_scaled(sent.point.x, method.step(last).x, sent.direction.x)
        return tuple(replace(one, x=x) for one in seen), fallback
