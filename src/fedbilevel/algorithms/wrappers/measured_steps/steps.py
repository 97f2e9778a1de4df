r"""Steps that follow the curvature, and a run that survives steps that are too long.

A wrapper around any method. Its numbers may be relative ones (`fedbilevel.units`): the
wrapper measures what they refer to, along the run, and hands the method plain numbers
in every exchange. With `safeguard`, a run that explodes goes back and goes on by
shorter steps, a theta that was given is told when it stops to fit, and y and z get
momentum where they go on and on in one direction. The method's listing knows nothing of
all this.

What travels more than the method says, each way: L1 and the stride of x where they are
followed, and how often steps were halved, down; (L_k / L)^4 once a round, and whether
a reply was finite, up. One Hessian product more a round, ten before the first one.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import Lower, Pair, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Gathered,
    Phase,
    Phases,
    Repeat,
    SeesTurn,
    ServerTurn,
    Turn,
    every_phase,
    with_turn,
)
from fedbilevel.algorithms.wrappers.base import AroundServer, Inside, mapped
from fedbilevel.algorithms.wrappers.measured_steps import curvature as _curvature
from fedbilevel.algorithms.wrappers.measured_steps.curvature import POWER, START
from fedbilevel.algorithms.wrappers.measured_steps.dog_stride import DogStride
from fedbilevel.algorithms.wrappers.measured_steps.momentum import Momentum
from fedbilevel.algorithms.wrappers.measured_steps.plain_steps import (
    fixed_thetas,
    largest_share,
    plain,
    shorter,
)
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import (
    MOST,
    Guard,
    Move,
    Turned,
)
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import Oracle
from fedbilevel.schedules import choice
from fedbilevel.units import OfCurvature, OfDistance, relative_kinds


class Steady(Inside):
    """The server's state, and what is measured and kept beside it."""

    server: PyTree
    curvature: Array | None
    way: DogStride | None
    guard: Guard | None
    momentum: Momentum | None


class Sent(eqx.Module):
    """A message, with the numbers that make plain steps of relative ones."""

    message: PyTree
    curvature: Array | None
    stride: Array | None
    halvings: Array | None
    returns: Array | None


class Told(eqx.Module):
    """A reply, with (L_k / L)^4 and whether it had to be replaced."""

    reply: PyTree
    ratio: Array | None
    troubled: Array | None


class Held(eqx.Module):
    """What a client keeps: the method's memory, v, its own L, and returns it knows."""

    memory: PyTree
    vector: Pair | None
    curvature: Array | None
    returns: Array | None


def steadied(algorithm: AbstractAlgorithm, safeguard: bool = False) -> Any:
    """Wrap a method that needs it: one with relative numbers, or to be guarded."""
    if isinstance(algorithm, SteadySteps):
        return algorithm
    needed = safeguard or relative_kinds(algorithm)
    return SteadySteps(algorithm, safeguard=safeguard) if needed else algorithm


class SteadySteps(AroundServer):
    """A method with steps that follow the curvature, and a safeguard."""

    safeguard: bool = choice("go back where a run explodes", default=True)

    @property
    def follows(self) -> bool:
        """Say whether L1 is measured: steps need it, or a theta is watched."""
        watches = self.safeguard and bool(fixed_thetas(self.algorithm))
        return watches or OfCurvature in relative_kinds(self.algorithm)

    @property
    def paces(self) -> bool:
        """Say whether the stride of x is measured."""
        return OfDistance in relative_kinds(self.algorithm)

    @property
    def pushes(self) -> bool:
        """Say whether y and z may get momentum: their steps follow the curvature.

        What it may spoil a safeguard mends.
        """
        return self.safeguard and OfCurvature in relative_kinds(self.algorithm)

    def init_server(self, x: Upper, y: Lower) -> Steady:
        """Start the method, with nothing measured."""
        server = self.plain().init_server(x, y)
        way = DogStride.of(x) if self.paces else None
        guard = Guard.of((server, way), None) if self.safeguard else None
        curvature = jnp.ones((), _kind(x)) if self.follows else None
        return self.begun(Steady(server, curvature, way, guard, None))

    def begun(self, state: Steady) -> Steady:
        """Return a state before the first round, to which a run may go back."""
        if self.pushes:
            blocks = self.algorithm.blocks(state.server)
            state = replace(state, momentum=Momentum.of(blocks))
        if state.guard is None:
            return state
        first = state.server if self.paces else None
        guard = state.guard.at((state.server, state.way), first)
        return replace(state, guard=guard)

    def init_client(self, x: Upper, y: Lower) -> Held:
        """Start the method's memory, and the power iteration."""
        vector = Pair(None, _curvature.first_vector(y)) if self.follows else None
        return Held(
            self.plain().init_client(x, y),
            vector,
            jnp.zeros((), _kind(x)) if self.follows else None,
            jnp.zeros((), jnp.int32) if self.safeguard else None,
        )

    def setup(self) -> Phases:
        """Return the first measurements, and the method's own setup."""
        own = self._wrapped(self.plain().setup(), "setup", None)
        measures = self.follows or self.paces
        return ((self._first_measurement(),) if measures else ()) + own

    def phases(self) -> Phases:
        """Return the method's own, the last of them judged."""
        phases = self.plain().phases()
        return self._wrapped(phases, "phases", len(every_phase(phases)) - 1)

    def events(self, server: Any) -> list[str]:
        """Say what happened on the way."""
        if server.guard is None:
            return []
        return server.guard.told(_times_of_last(self.plain().phases()))

    def plain(self, sent: "Sent | None" = None, own: Array | None = None) -> Any:
        """Return the method with plain numbers; any, where only its shape counts."""
        if sent is None:
            return plain(self.algorithm)
        known = (sent.curvature, sent.stride, sent.halvings)
        return plain(self.algorithm, *known, own)

    def known(self, server: Steady) -> Sent:
        """Return the numbers that travel with a message, without one."""
        guard, way = server.guard, server.way
        return Sent(
            None,
            server.curvature,
            None if way is None else way.stride(),
            None if guard is None else guard.halvings,
            None if guard is None else guard.returns,
        )

    # Exchanges ----------------------------------------------------------------------

    def _first_measurement(self) -> Phase:
        """Return the exchange that measures L1, and the size of the first direction."""

        def local(point: Pair, held: Held, oracle: Oracle, turn: Turn):
            for_curvature, for_slope = turn.spare_keys(2)
            v = _curvature.first_vector(point.y)
            v, size = _curvature.multiplied(oracle, point, v, for_curvature, START)
            slope = None
            if self.paces:
                rule = Neumann(5, 0.5 / size)
                bundle = rule.draw(oracle, for_slope)
                slope = _tree.norm(rule(oracle, point.x, point.y, bundle))
            if self.follows:
                own: Any = held.curvature
                own = size.astype(own.dtype)
                held = replace(held, vector=Pair(None, v), curvature=own)
            return held, (size**POWER, slope)

        def up(server: Steady, mean: Any) -> Steady:
            power, slope = _arrays(mean)
            way = server.way
            if way is not None and slope is not None:
                way = way.began(slope)
            curvature = server.curvature
            if curvature is not None:
                curvature = (power ** (1 / POWER)).astype(curvature.dtype)
            return self.begun(replace(server, curvature=curvature, way=way))

        return Phase("curvature", lambda s: self.point(s), local, up)

    def _wrapped(self, phases: Phases, stage: str, judged: int | None) -> Phases:
        numbers = iter(range(len(every_phase(phases))))

        def change(phase: Phase) -> Phase:
            number = next(numbers)
            return _Exchange(self, stage, number, number == judged).phase(phase)

        return mapped(phases, change)


class _Exchange(eqx.Module):
    """One exchange of a method inside of the wrapper."""

    whole: SteadySteps
    stage: str = eqx.field(static=True)
    number: int = eqx.field(static=True)
    judges: bool = eqx.field(static=True)

    def phase(self, like: Phase) -> Phase:
        """Return the wrapped exchange."""
        about = None if like.about is None else self.about
        sees = isinstance(like.down, SeesTurn)
        return replace(
            like,
            down=with_turn(self.down) if sees else self.down,
            local=self.local,
            up=with_turn(self.up),
            about=about,
            moves=False,
        )

    def _own(self, sent: Sent, own: Array | None = None) -> Phase:
        plain = self.whole.plain(sent, own)
        return every_phase(getattr(plain, self.stage)())[self.number]

    @property
    def _measures(self) -> bool:
        return self.judges and self.whole.follows

    def down(self, server: Steady, turn: Any = None) -> Sent:
        """Say what the method says, and the numbers."""
        known = self.whole.known(server)
        own: Any = self._own(known)
        say = own.down if turn is None else partial(own.message, turn=turn)
        said = say(server.server)
        return replace(known, message=said)

    def about(self, sent: Sent) -> Told:
        """Return what is known of a reply: nothing changes, all is well."""
        inner: Any = self._own(sent).about
        still = jnp.zeros((), jnp.float32)
        return self._told(inner(sent.message), self._same(sent), still)

    @staticmethod
    def _same(sent: Sent) -> Array:
        """Return the (L_k / L)^4 of a client that curves as all do."""
        like = sent.curvature
        return jnp.ones(()) if like is None else jnp.ones_like(like)

    def _told(self, reply: PyTree, ratio: Array, troubled: Array) -> Told:
        return Told(
            reply,
            ratio if self._measures else None,
            troubled if self.whole.safeguard else None,
        )

    def local(self, sent: Sent, held: Held, oracle: Oracle, turn: Turn):
        """Do the method's work with plain numbers; measure, and replace what is bad."""
        phase, ratio = self._own(sent, held.curvature), self._same(sent)
        memory = self._memory(sent, held)
        after, reply = phase.local(sent.message, memory, oracle, turn)
        if self._measures:
            held, ratio = self._measured(sent, held, oracle, turn)
        troubled = jnp.zeros((), jnp.float32)
        if self.whole.safeguard:
            returns: Any = sent.returns
            about = phase.about
            known = _tree.zeros_like(reply) if about is None else about(sent.message)
            # A run that is given up fails as any other.
            fine = _tree.all_finite((reply, after)) | (returns >= MOST)
            reply = _tree.select(fine, reply, known)
            after = _tree.select(fine, after, memory)
            troubled = (~fine).astype(jnp.float32)
            held = replace(held, returns=returns)
        return replace(held, memory=after), self._told(reply, ratio, troubled)

    def _memory(self, sent: Sent, held: Held) -> PyTree:
        """Return the method's memory, a fresh one if the server went back."""
        point: Any = _curvature.point_in(sent.message)
        if sent.returns is None or point is None:
            return held.memory
        fresh = self.whole.plain(sent).init_client(point.x, point.y)
        return _tree.select(held.returns == sent.returns, held.memory, fresh)

    def _measured(self, sent: Sent, held: Held, oracle: Oracle, turn: Turn):
        """Return v and L_k after one product, and what is told of it."""
        point, vector = _curvature.point_in(sent.message), held.vector
        if point is None or vector is None or sent.curvature is None:
            return held, self._same(sent)
        key = jr.fold_in(jr.fold_in(turn.key, 2**32 - 3), turn.index)
        v, size = _curvature.multiplied(oracle, point, vector.y, key)
        own: Any = held.curvature
        own = jnp.maximum(size, own + 0.1 * (size - own)).astype(own.dtype)
        # What is not finite must not become the measure of all others.
        sound = jnp.isfinite(size)
        held = replace(
            held,
            vector=Pair(None, _tree.select(sound, v, vector.y)),
            curvature=_tree.select(sound, own, held.curvature),
        )
        ratio = jnp.minimum((size / sent.curvature) ** POWER, 1e6)
        return held, jnp.where(sound, ratio, 1).astype(sent.curvature.dtype)

    def up(self, server: Steady, told: Any, turn: ServerTurn) -> Steady:
        """Take the replies in as the method does; judge the round after its last."""
        reply, ratio, troubled = _opened(told)
        phase = self._own(self.whole.known(server))
        state = replace(server, server=phase.taken_in(server.server, reply, turn))
        if self._measures:
            curvature: Any = server.curvature
            state = replace(state, curvature=_curvature.followed(curvature, ratio))
        if self.stage == "setup":
            return self.whole.begun(_noting(state, troubled))
        if not self.judges:
            return _noting(state, troubled)
        return self._judged(_noting(state, troubled), turn)

    def _judged(self, state: Steady, turn: ServerTurn) -> Steady:
        """Return the state to go on from, once the way of x is known."""
        before, guard, point = state.way, state.guard, self.whole.point(state)
        way = before
        if before is not None:
            share = largest_share(self.whole.algorithm)
            unit = before.stride() * share.astype(before.squares.dtype)
            if guard is not None:
                unit = unit * shorter("upper", guard.halvings, unit)
            way = before.gone(point.x, unit)
        if guard is None:
            return replace(state, way=way)
        carried, turned = (state.server, way), _turned(state, guard, way)
        guard = self._fitting(state, guard, turn)
        watched = self.whole.algorithm.watched
        speed = 1.0 if state.momentum is None else state.momentum.speed()
        move = Move(watched(state.server), watched(guard.recent()[0]), speed)
        kept, after = guard.judged(carried, move, turned, turn.index)
        # Clients forget what they kept of the time that did not count.
        returned = after.returns > guard.returns
        forgotten = self.whole.algorithm.forgotten
        server = _tree.select(returned, forgotten(kept[0]), kept[0])
        state = replace(state, server=server, way=kept[1], guard=after)
        if state.momentum is None:
            return state
        here: Any = self.whole.algorithm.blocks(server)
        there, momentum = state.momentum.pushed(here, returned)
        server = self.whole.algorithm.at(server, there)
        return replace(state, server=server, momentum=momentum)

    def _fitting(self, state: Steady, guard: Guard, turn: ServerTurn) -> Guard:
        """Remember the first round in which a theta that was given did not fit."""
        thetas = fixed_thetas(self.whole.algorithm)
        if not thetas or state.curvature is None:
            return guard
        theta = jnp.max(jnp.stack(thetas)).astype(state.curvature.dtype)
        theta = theta * shorter("lower", guard.halvings, theta)
        return guard.watched(theta * state.curvature > 1, turn.index)


def _turned(state: Steady, guard: Guard, way: DogStride | None) -> Turned:
    """Say whether x turned round; where its way is not followed, it never does."""
    before, never = state.way, jnp.zeros((), bool)
    if before is None or way is None:
        return Turned(never, never, never, (state.server, way))
    turned = way.turns > before.turns
    # What explodes leaves nothing in `way` that could be relied upon.
    start = _tree.select(turned, way, before.limited()).anew()
    too_fast = before.is_lost() if state.momentum is not None else never
    return Turned(turned, way.is_lost(), too_fast, (guard.first, start))


def _times_of_last(phases: Phases) -> int:
    """Return how often the last phase, which judges, is in a round at most."""
    last = phases[-1]
    return last.times * _times_of_last(last.phases) if isinstance(last, Repeat) else 1


def _kind(x: Upper) -> Any:
    """Return the type of the numbers that are measured."""
    kind = jnp.asarray(jax.tree.leaves(x)[0]).dtype
    return kind if kind.itemsize > 2 else jnp.dtype(jnp.float32)


def _noting(state: Steady, troubled: Array | None) -> Steady:
    """Remember until the round is judged whether replies had to be replaced."""
    if state.guard is None or troubled is None:
        return state
    trouble = state.guard.trouble + troubled.astype(state.guard.trouble.dtype)
    return replace(state, guard=replace(state.guard, trouble=trouble))


def _arrays(numbers: PyTree) -> PyTree:
    """Return numbers as the server computes with them; off the wire NumPy has them."""
    return jax.tree.map(jnp.asarray, numbers)


def _opened(told: Any) -> tuple[PyTree, Any, Any]:
    """Return the reply, or all of them, and the means of the two numbers."""
    if not isinstance(told, Gathered):
        return told.reply, *_arrays((told.ratio, told.troubled))
    share = told.weights / jnp.sum(told.weights)

    def mean(values: Array | None) -> Array | None:
        if values is None:
            return None
        return jnp.sum(share.astype(values.dtype) * values)

    inner = told.replies
    replies = Gathered(inner.reply, told.weights)
    return replies, mean(inner.ratio), mean(inner.troubled)
