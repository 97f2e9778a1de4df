r"""The local loop of all single-loop methods, and the exchange around it.

A method states the point w it carries (x, y or x, y, z), the directions G it evaluates
there, the estimator that filters them, its weights and steps, and the order of its
moves. At local iteration t with sample bundle b_t, for each group of blocks in turn:

    d_t     = estimator(G(., b_t), w_t, w_{t-1}, d_{t-1}, weight_t)
    w_{t+1} = w_t - step_t d_t

One group of all blocks is the simultaneous order; groups of one block each are the
alternating order, where a later group sees the moves of the earlier ones. w_{t-1} is
where the group's direction was last evaluated, on this client, before any averaging.

After p iterations the clients' blocks are averaged, and their directions where the
estimator remembers them.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import join, only, pick, put
from fedbilevel._types import Key, Lower, Pair, Triple, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Turn, when
from fedbilevel.errors import InvalidInputError
from fedbilevel.estimators import AbstractEstimator
from fedbilevel.problem import Oracle

__all__ = ["AbstractSingleLoop", "Directions", "Iterate", "Memory", "Order"]

Directions = Mapping[str, Callable[[Any], PyTree]]
Order = tuple[tuple[str, ...], ...]


class Iterate(eqx.Module):
    """A point and the directions it moved along; this is what travels."""

    point: Pair
    direction: Pair | None


class Memory(eqx.Module):
    """Where each group's direction was last evaluated, and in which round."""

    evaluated: tuple[Pair, ...]
    round: Int[Array, ""]


class AbstractSingleLoop(AbstractAlgorithm):
    """A method that is one loop over t, averaged every `local_steps` iterations."""

    local_steps: int = eqx.field(static=True, kw_only=True)

    @abc.abstractmethod
    def estimator(self) -> AbstractEstimator:
        """Return the filter of all directions."""

    @abc.abstractmethod
    def directions(self, oracle: Oracle, key: Key) -> Directions:
        """Draw a bundle; return, per block, its direction as a function of the point.

        Blocks that are not named do not move.
        """

    @abc.abstractmethod
    def step(self, t: Any) -> Pair:
        """Return the step size of every block at iteration t."""

    def weight(self, t: Any) -> Pair:
        """Return the estimator's weight of every block at t, 1/B at t = 0; if any."""
        del t
        return Triple(None, None, None)

    @abc.abstractmethod
    def order(self) -> Order:
        """Return the groups of blocks in the order of their moves."""

    def first_point(self, x: Upper, y: Lower) -> Pair:
        """Return the point to start from."""
        return Pair(x, y)

    def first_bundles(self) -> int:
        """Return B, the number of bundles averaged at t = 0."""
        return 1

    def project(self, point: Pair) -> Pair:
        """Return the nearest point that is allowed."""
        return point

    def last_evaluated(
        self, message: Iterate, client: Memory | None, turn: Turn
    ) -> tuple[Any, ...]:
        """Return, for each group, the point to correct from at the first step."""
        groups = len(self.order())
        if client is None:
            return (None,) * groups
        # A client that missed a round has no previous point on the averaged path; at
        # the received one the correction vanishes and momentum remains.
        current = client.round == turn.round - 1
        return _tree.select(current, client.evaluated, (message.point,) * groups)

    def __check_init__(self) -> None:
        if self.local_steps < 1:
            raise InvalidInputError(
                f"`{type(self).__name__}(local_steps=...)` must be at least 1, got "
                f"{self.local_steps}."
            )

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y); directions are formed on the clients at t = 0."""
        point = self.first_point(x, y)
        if not self.estimator().keeps_direction:
            return Iterate(point, None)
        return Iterate(point, _tree.zeros_like(only(point, self._moving())))

    def init_client(self, x: Upper, y: Lower) -> Memory | None:
        """Start without a usable previous point."""
        if not self.estimator().keeps_point:
            return None
        points = (self.first_point(x, y),) * len(self.order())
        return Memory(points, jnp.asarray(-2, jnp.int32))

    def phases(self) -> Phases:
        """Return the one exchange of a round: p local steps, then averages."""
        return (
            Phase(
                "local",
                lambda server: server,
                self._local,
                self._take_averages,
                about=self._sent_back,
            ),
        )

    def point(self, server: Iterate) -> Pair:
        """Return the averaged iterate."""
        return Pair(server.point.x, server.point.y)

    def _moving(self) -> list[str]:
        return [name for group in self.order() for name in group]

    def _sent_back(self, state: Iterate) -> Iterate:
        return Iterate(only(state.point, self._moving()), state.direction)

    def _take_averages(self, server: Iterate, mean: Iterate) -> Iterate:
        # Blocks that do not move were not sent back.
        return join(mean, server)

    def _local(
        self, message: Iterate, client: Memory | None, oracle: Oracle, turn: Turn
    ) -> tuple[Memory | None, Iterate]:
        direction = message.direction
        if self.first_bundles() > 1:
            direction = when(
                turn.round == 0,
                lambda: self._other_first_bundles(message, oracle, turn),
                lambda: message.direction,
            )
        begin = (message.point, direction, self.last_evaluated(message, client, turn))
        p = self.local_steps
        (point, direction, seen), _ = jax.lax.scan(
            lambda carry, time: (self.one_step(oracle, carry, time), None),
            begin,
            (turn.steps(p), turn.keys(p)),
        )
        memory = None if client is None else Memory(seen, self._now(turn))
        return memory, self._sent_back(Iterate(point, direction))

    def one_step(
        self, oracle: Oracle, carry: tuple[Any, Any, tuple], time: tuple[Array, Key]
    ) -> tuple[Any, Any, tuple]:
        """Make one local iteration from (point, direction, last evaluated)."""
        (point, direction, evaluated), (t, key) = carry, time
        blocks, estimator, seen = self.directions(oracle, key), self.estimator(), []
        steps, weights = self.step(t), self.weight(t)
        for group, before in zip(self.order(), evaluated, strict=True):

            def directions(at: Any, group: tuple[str, ...] = group) -> dict:
                return {name: blocks[name](at) for name in group}

            held = None if direction is None else pick(direction, group)
            fresh = estimator(directions, point, before, held, pick(weights, group))
            seen.append(point if estimator.keeps_point else None)
            moved = {
                name: _tree.add_scaled(
                    getattr(point, name), -getattr(steps, name), fresh[name]
                )
                for name in group
            }
            point = self.project(put(point, moved))
            direction = direction if direction is None else put(direction, fresh)
        return point, direction, tuple(seen)

    def _now(self, turn: Turn) -> Int[Array, ""]:
        return jnp.asarray(turn.round, jnp.int32)

    def _other_first_bundles(self, message: Iterate, oracle: Oracle, turn: Turn):
        # The mean of B-1 bundles; the loop adds the B-th with weight 1/B at t = 0.
        others = self.first_bundles() - 1

        def add(total: Any, key: Key) -> tuple[Any, None]:
            blocks = self.directions(oracle, key)
            values = {name: blocks[name](message.point) for name in self._moving()}
            return put(total, _tree.add(pick(total, values), values)), None

        total, _ = jax.lax.scan(add, message.direction, turn.spare_keys(others))
        return _tree.scale(1 / others, total)
