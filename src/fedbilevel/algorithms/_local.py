r"""Parts of methods that walk locally and are averaged: what travels, the loop, a move.

    d_t     = estimator(G(., b_t), w_t, w_{t-1}, d_{t-1}, weight_t)
    w_{t+1} = w_t - step_t d_t                          p times, then the clients' mean

A method states its own G, weights and steps in its file. Points, directions, weights
and steps are `Pair`s or `Triple`s, whose blocks move together by one prefix map.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import Key, Pair
from fedbilevel.algorithms._base import Phase, Turn
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule

__all__ = [
    "Iterate",
    "Memory",
    "at_time",
    "averaged",
    "check_counts",
    "check_words",
    "evaluate",
    "first_batch",
    "hypergradient_and_slope",
    "local_steps",
    "momentum_weight",
    "move",
    "no_memory",
    "only",
    "previous_point",
    "when",
]


class Iterate(eqx.Module):
    """A point and the directions it moved along; this is what travels.

    `control` corrects drift where a method asks for it: the server's c on its way to
    the clients, the change of c_k on the way back.
    """

    point: Any
    direction: Any = None
    control: Any = None


class Memory(eqx.Module):
    """Where a client last evaluated its directions, in which turn, and its control."""

    evaluated: Any
    index: Int[Array, ""]
    control: Any = None


def no_memory(point: PyTree, control: Any = None) -> Memory:
    """Return the memory of a client that has no usable previous point."""
    return Memory(point, jnp.asarray(-2, jnp.int32), control)


def averaged(local: Callable, about: Callable[[Any], Any] = lambda sent: sent) -> Phase:
    """Return the one exchange of a round: local steps, then the mean of what moved.

    `about` chooses what is sent back; the rest of the server's state stays.
    """
    return Phase(
        "local", lambda server: server, local, _take_averages, about, moves=True
    )


def _take_averages(server: Iterate, mean: Iterate) -> Iterate:
    # Blocks that do not move were not sent back.
    return combine(mean, server)


def local_steps(iterate: Callable, carry: Any, turn: Turn, count: int) -> Any:
    """Repeat carry <- iterate(carry, (t, key of t)) over the iterations of a turn."""

    def body(carry: Any, time: Any) -> tuple[Any, None]:
        return iterate(carry, time), None

    return jax.lax.scan(body, carry, (turn.steps(count), turn.keys(count)))[0]


def move(point: PyTree, steps: PyTree, directions: PyTree) -> PyTree:
    """Return point - steps * directions; `steps` has a number for each block."""

    def block(step: Array, w: PyTree, d: PyTree) -> PyTree:
        return _tree.add_scaled(w, -step, d)

    return jax.tree.map(block, steps, point, directions)


def only(tree: PyTree, group: PyTree) -> PyTree:
    """Return the blocks that are flagged, None in the place of the others."""
    return jax.tree.map(lambda flag, block: block if flag else None, group, tree)


def previous_point(received: Any, memory: Memory, turn: Turn) -> Any:
    """Return where this client stood before, if it took part in the last turn.

    One that did not has no previous point on the averaged path: at the received one
    the correction vanishes and momentum remains.
    """
    current = memory.index == turn.index - 1
    return _tree.select(current, memory.evaluated, received)


def first_batch(G: Callable, w: Any, d: Any, turn: Turn, bundles: int) -> Any:
    """Return d, at t = 0 the mean of all but one of so many bundles at w.

    The loop adds the last one, with the weight 1/B. `G(key)` draws a bundle and returns
    the map that it makes.
    """
    if bundles == 1:
        return d

    def add(total: Any, key: Key) -> tuple[Any, None]:
        return _tree.add(total, G(key)(w)), None

    def mean() -> Any:
        total, _ = jax.lax.scan(add, d, turn.spare_keys(bundles - 1))
        return _tree.scale(1 / (bundles - 1), total)

    return when(turn.index == 0, mean, lambda: d)


def evaluate(maps: Any) -> Callable[[Any], Any]:
    """Return w -> the value of every block's map at w, where there is one."""
    return lambda w: jax.tree.map(lambda G: G(w), maps)


def hypergradient_and_slope(
    rule: AbstractHypergradient, oracle: Oracle, key: Key
) -> Pair:
    """Draw a bundle b and, independent of it, zeta; return h_k(.; b), gy_k(.; zeta)."""
    for_bundle, for_zeta = jr.split(key)
    b, zeta = rule.draw(oracle, for_bundle), oracle.draw_lower(for_zeta)
    return Pair(
        lambda w: rule(oracle, w.x, w.y, b),
        lambda w: oracle.lower_gradient(w.x, w.y, zeta),
    )


def at_time(schedule: Schedule, t: Any, like: Array) -> Array:
    """Return a schedule's value; one of another library chooses its own precision."""
    return jnp.asarray(schedule(t), like.dtype)


def momentum_weight(
    factor: Array, schedule: Schedule, t: Any, power: int, bundles: int = 1
) -> Array:
    """Return factor * schedule(t-1)^power; 1/B at t = 0, where there is no momentum."""
    earlier = jnp.maximum(jnp.asarray(t) - 1, 0)
    weight = factor * at_time(schedule, earlier, factor) ** power
    return jnp.where(t == 0, jnp.asarray(1 / bundles, weight.dtype), weight)


def when(
    predicate: Any, then: Callable[[], PyTree], otherwise: Callable[[], PyTree]
) -> PyTree:
    """Branch on a value all clients share, in Python where it is already known."""
    if not isinstance(predicate, Tracer):
        return then() if bool(predicate) else otherwise()
    return jax.lax.cond(predicate, then, otherwise)


def check_counts(algorithm: Any, least: int = 1, **counts: int) -> None:
    """Raise unless counts are large enough."""
    for name, value in counts.items():
        if value < least:
            raise InvalidInputError(
                f"`{type(algorithm).__name__}({name}=...)` must be at least {least}, "
                f"got {value}."
            )


def check_words(algorithm: Any) -> None:
    """Raise unless every choice between words is one of them."""
    for one in fields(algorithm):
        words, value = one.metadata.get("words", ()), getattr(algorithm, one.name)
        if words and value not in (*words, one.default):
            raise InvalidInputError(
                f"`{type(algorithm).__name__}({one.name}=...)` is one of "
                f"{', '.join(map(repr, dict.fromkeys((one.default, *words))))}, got "
                f"{value!r}."
            )
