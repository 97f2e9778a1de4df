r"""The equation of the one-loop family, once: local steps, then the clients' mean.

    G       = directions(oracle, key, t)               one map per block, samples drawn
    d_t     = estimator(G, w_t, w_{t-1}, d_{t-1}, weight(t))
    w_{t+1} = w_t - step(t) d_t                        p times, then the clients' mean

A method states its variables w, directions G, steps, weights and estimator. No method
overrides the loop. Points, directions, weights and steps are `Pair`s or `Triple`s,
whose blocks move together by one prefix map. A variation is a `Part`, which a wrapper
adds (`fedbilevel.algorithms.wrappers`): it corrects directions, changes one local step,
or shares numbers with the server, and the loop asks every part in turn.
"""

import abc
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import AbstractBlocks, Key, Lower, Upper
from fedbilevel.algorithms.base import Phase, Phases, ServerTurn, Turn, with_turn
from fedbilevel.algorithms.parts import (
    Begin,
    Iterate,
    Memory,
    Order,
    Part,
    Step,
    Stepping,
    evaluate,
    local_steps,
    move,
    no_memory,
    only,
    previous_point,
)
from fedbilevel.estimators import Plain
from fedbilevel.problem import Oracle
from fedbilevel.units import OfCurvature, OfDistance


class TakesOptions(type(Stepping)):
    """Lets a method be built with options, each a wrapper around it.

    `wrappers` says what options stand for, once it is imported with the package.
    """

    applied: ClassVar[Callable[[Any, dict[str, Any]], Any]]

    def __call__(cls, *values: Any, **named: Any) -> Any:
        """Build the method. Anything that is no field of it is an option."""
        own = {one.name for one in fields(cls)}
        own |= {*inspect.signature(cls.__init__).parameters}
        options = {name: named.pop(name) for name in [*named] if name not in own}
        made = super().__call__(*values, **_measured(cls, values, named))
        return TakesOptions.applied(made, options) if options else made


def _measured(cls: type, values: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Return named arguments with measured steps in the place of those left out.

    They are left out if none of them is given, nor anything else by its place.
    """
    steps = {
        one.name: OfDistance(1.0)
        if one.metadata["step"] == "upper"
        else OfCurvature(0.5)
        for one in fields(cls)
        if one.metadata.get("step") and one.default is MISSING
    }
    if values or steps.keys() & named.keys():
        return named
    return {**steps, **named}


class OneLoop(Stepping, metaclass=TakesOptions):
    """A method of one loop: variables, directions, steps, weights and an estimator.

    `estimator` is one for all blocks, or blocks of them. Blocks that do not move are
    sent to clients and never back. A method that `sums` samples replies with more than
    its iterate. Without `returns_point` the iterate is no part of the reply, and the
    server steps by itself in `received`.
    """

    estimator: ClassVar[Any] = Plain()
    sums: ClassVar[bool] = False
    returns_point: ClassVar[bool] = True

    @abc.abstractmethod
    def directions(self, oracle: Oracle, key: Key, t: Any) -> Any:
        """Draw the samples of iteration t; return one map w -> direction per block."""

    def order(self) -> Order:
        """Return which blocks move together, in turn: all of them at once."""
        return (self.moves,)

    def in_turn(self) -> Order:
        """Return the order of alternating moves: the lower level first, then x."""
        below = tuple((name,) for name in self.moves if name != "x")
        return (*below, ("x",)) if "x" in self.moves else below

    def parts(self) -> tuple[Part, ...]:
        """Return the variations of the loop, the innermost first."""
        return ()

    def drifts(self) -> bool:
        """Say whether local steps drift: unless a part corrects their directions."""
        return not any(part.corrects for part in self.parts())

    def with_local_steps(self, count: int) -> Any:
        """Return the same method with another number of local steps."""
        return replace(self, local_steps=count)

    def sent(self, end: Iterate, total: PyTree, turn: Turn) -> PyTree:
        """Return the reply: the iterate, with what parts send."""
        return end

    def received(self, server: Iterate, mean: PyTree) -> tuple[Iterate, PyTree]:
        """Return where a mean reply leads, and the mean sample where that is known."""
        here = Iterate(mean.point, mean.direction)
        # Blocks that stay are not sent back.
        return combine(here, Iterate(server.point, server.direction)), None

    # Sent values --------------------------------------------------------------------

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y); directions are formed on the clients at t = 0."""
        w = self.variables(x, y)
        d = self._kept(_tree.zeros_like(self.moving(w)))
        start = Iterate(self.moving(w), d)
        return Iterate(w, d, tuple(part.shared(start) for part in self.parts()))

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without a usable previous point."""
        w = self.moving(self.variables(x, y))
        own = tuple(part.own(w) for part in self.parts())
        if not self._keeping("keeps_point"):
            return Memory(own=own)
        return no_memory((w,) * len(self.order()), own=own)

    def setup(self) -> Phases:
        """Return what parts do before the first round."""
        numbered = enumerate(self.parts())
        return sum((part.setup(self, place) for place, part in numbered), ())

    def phases(self) -> Phases:
        """Return the exchanges of a round: those of parts, then the local steps."""
        numbered = enumerate(self.parts())
        first = sum((part.before(self, place) for place, part in numbered), ())
        point = self.returns_point
        about = self.about if point else None
        up = with_turn(self.up)
        own = Phase("local", lambda s: s, self.local, up, about, moves=point)
        return (*first, own)

    def about(self, sent: Iterate) -> Iterate:
        """Return what is known of a reply: nothing moved."""
        pairs = zip(self.parts(), sent.shared, strict=True)
        known = tuple(part.known(shared) for part, shared in pairs)
        return Iterate(self.moving(sent.point), sent.direction, known)

    def up(self, server: Iterate, reply: PyTree, turn: ServerTurn) -> Iterate:
        """Take the mean reply in."""
        after, mean = self.received(server, reply)
        had = list(zip(self.parts(), server.shared, strict=True))
        if self.returns_point:
            answers = reply.shared
        else:
            answers = [part.answer(shared, mean) for part, shared in had]
            for part, _ in had:
                after = replace(after, point=part.projected(after.point))
        shared = [
            part.taken(shared, answer, after, turn)
            for (part, shared), answer in zip(had, answers, strict=True)
        ]
        return replace(after, shared=tuple(shared))

    def forgotten(self, server: Iterate) -> Iterate:
        """Let every part forget what clients no longer know."""
        pairs = zip(self.parts(), server.shared, strict=True)
        return replace(server, shared=tuple(part.forgotten(one) for part, one in pairs))

    # The loop -----------------------------------------------------------------------

    def local(self, message: Iterate, memory: Memory, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        parts, begin = self.parts(), Begin(self, message, memory, oracle, turn)
        states = tuple(
            part.begun(begin, shared, own)
            for part, shared, own in zip(parts, message.shared, memory.own, strict=True)
        )
        w = self.moving(message.point)

        def G(key: Key, t: Any = 0) -> Any:
            maps = self.moving(self.directions(oracle, key, t))
            for part, state in zip(parts, states, strict=True):
                maps = part.corrected(state, maps)
            # Blocks that stay are those that were received.
            received = message.point
            return jax.tree.map(lambda one: lambda w: one(combine(w, received)), maps)

        def iterate(carry: tuple[Step, tuple], time: tuple[Array, Key]):
            (here, states), (t, key) = carry, time
            new = self.advance(here, G(key, t), states, t)
            after = []
            for part, state in zip(parts, states, strict=True):
                state, new = part.stepped(state, here, new, t)
                after.append(state)
            return new, tuple(after)

        d = message.direction
        for part in parts:
            d = part.first(begin, lambda key: evaluate(G(key)), d)
        summed = self.sums or any(part.sums for part in parts)
        total = _tree.zeros_like(w) if summed else None
        start = Step(w, d, self._previous(begin, w), total)
        end, states = local_steps(iterate, (start, states), turn, self.local_steps)
        return self._ended(begin, end, states)

    def advance(self, here: Step, maps: Any, states: tuple, t: Array) -> Step:
        """Make ONE local step, each group at fresh values: sample, filter, move."""
        w, d, steps, weights = here.point, here.direction, self.step(t), self.weight(t)
        both = list(zip(self.parts(), states, strict=True))
        for part, state in both:
            weights = part.weights(state, weights, t)
        seen, samples = [], []
        for group, before in zip(self.order(), here.evaluated, strict=True):
            G, held, a = (only(tree, group) for tree in (maps, d, weights))
            fresh, sample = _filtered(self.estimator, G, w, before, held, a)
            seen.append(w)
            samples.append(sample)
            along = fresh
            for part, state in both:
                along = part.scaled(state, along)
            w = combine(move(only(w, group), only(steps, group), along), w)
            for part, _ in both if self.returns_point else ():
                w = part.projected(w)
            d = combine(self._kept(fresh), d)
        total = here.total
        if total is not None:
            total = _tree.add(total, eqx.combine(*samples))
        evaluated = tuple(seen) if self._keeping("keeps_point") else here.evaluated
        return Step(w, d, evaluated, total)

    def _ended(self, begin: Begin, end: Step, states: tuple) -> tuple[Memory, PyTree]:
        parts, mean = self.parts(), None
        if end.total is not None:
            mean = _tree.scale(1 / self.local_steps, end.total)
        every = zip(parts, states, begin.message.shared, strict=True)
        ended = [one.ended(was, one.answer(seen, mean)) for one, was, seen in every]
        answers = tuple(answer for _, answer in ended)
        reply = Iterate(end.point, end.direction, answers)
        memory = Memory(own=tuple(kept for kept, _ in ended))
        if self._keeping("keeps_point"):
            index = jnp.asarray(begin.turn.index, jnp.int32)
            memory = replace(memory, evaluated=end.evaluated, index=index)
        return memory, self.sent(reply, end.total, begin.turn)

    def _previous(self, begin: Begin, w: Any) -> tuple[Any, ...]:
        """Return where each group's directions were last evaluated."""
        nowhere = (w,) * len(self.order())
        if not self._keeping("keeps_point"):
            return (None,) * len(nowhere)
        seen, fallback = begin.memory.evaluated, nowhere
        for part in self.parts():
            seen, fallback = part.previous(begin, seen, fallback)
        known = replace(begin.memory, evaluated=seen)
        return previous_point(fallback, known, begin.turn)

    def _keeping(self, trait: str) -> list[str]:
        """Return the blocks whose estimator keeps a point, or a direction."""
        estimator = self.estimator
        if not isinstance(estimator, AbstractBlocks):
            return [*self.moves] if getattr(estimator, trait) else []
        return [n for n, one in vars(estimator).items() if getattr(one, trait, False)]

    def _kept(self, d: Any) -> Any:
        """Return the directions that estimators remember."""
        kept = self._keeping("keeps_direction")
        return only(d, kept) if kept else None

    def moving(self, w: Any) -> Any:
        """Return the blocks that move."""
        return only(w, self.moves)


def _filtered(
    estimator: Any, G: Any, w: Any, before: Any, d: Any, weight: Any
) -> tuple[Any, Any]:
    """Return the direction of every block, and its sample."""
    if not isinstance(estimator, AbstractBlocks):
        return estimator(evaluate(G), w, before, d, weight)
    blocks, samples = {}, {}
    for one in fields(estimator):
        own, name = getattr(G, one.name), one.name
        if own is not None:
            memory, a = getattr(d, name, None), getattr(weight, name, 1.0)
            part = getattr(estimator, name)
            blocks[name], samples[name] = part(own, w, before, memory, a)
    return replace(G, **blocks), replace(G, **samples)


def when(
    predicate: Any, then: Callable[[], PyTree], otherwise: Callable[[], PyTree]
) -> PyTree:
    """Branch on a value all clients share, in Python where it is already known."""
    if not isinstance(predicate, Tracer):
        return then() if bool(predicate) else otherwise()
    return jax.lax.cond(predicate, then, otherwise)
