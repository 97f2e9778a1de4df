"""One exchange of a method inside of measured steps."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import Pair, Triple
from fedbilevel.algorithms.base import (
    Gathered,
    Phase,
    ServerTurn,
    Turn,
    every_phase,
    with_turn,
)
from fedbilevel.algorithms.wrappers.measured_steps import curvature as _curvature
from fedbilevel.algorithms.wrappers.measured_steps import plain_steps
from fedbilevel.algorithms.wrappers.measured_steps.curvature import POWER
from fedbilevel.algorithms.wrappers.measured_steps.plain_steps import Sent
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import MOST, Guard, Move
from fedbilevel.problem import Oracle

_FOR_CURVATURE, _FOR_LOSS = 2**32 - 3, 2**32 - 4  # folded into the key of a turn


class Seen(eqx.Module):
    """(L_k / L)^4, the curvature along z over L, f, and if a reply was replaced."""

    ratio: Array | None
    along: Array | None
    loss: Array | None
    troubled: Array | None


class Reply(eqx.Module):
    """A reply, with what a client has seen."""

    reply: PyTree
    seen: Seen


class Held(eqx.Module):
    """A client's memory: that of the method, v, its own L, and known rollbacks."""

    memory: PyTree
    vector: Pair | None
    curvature: Array | None
    returns: Array | None


class Exchange(eqx.Module):
    """One exchange of a method. The one that `judges` ends a round."""

    whole: Any
    stage: str = eqx.field(static=True)
    number: int = eqx.field(static=True)
    judges: bool = eqx.field(static=True)

    def phase(self, like: Phase) -> Phase:
        """Return the wrapped exchange."""
        about = None if like.about is None else self.about
        change = {"local": self.local, "up": with_turn(self.up), "about": about}
        return replace(like.saying(self.down), **change, moves=False)

    def _own(self, sent: Sent, own: Array | None = None) -> Phase:
        plain = self.whole.plain(sent, own)
        return every_phase(getattr(plain, self.stage)())[self.number]

    @property
    def _measures(self) -> bool:
        return self.judges and self.whole.follows

    def down(self, server: Any, turn: Any) -> Sent:
        """Say what the method says, and the numbers."""
        known = self.whole.known(server)
        return replace(known, message=self._own(known).message(server.server, turn))

    # On a client --------------------------------------------------------------------

    def about(self, sent: Sent) -> Reply:
        """Return what is known of a reply: nothing changes, all is well."""
        inner: Any = self._own(sent).about
        return Reply(inner(sent.message), self._expected(sent))

    def _expected(self, sent: Sent) -> Seen:
        """Return what a client sees that curves as all do, where all is as it was."""
        measures, guarded = self._measures, self.whole.safeguard
        one = None if sent.curvature is None else jnp.ones_like(sent.curvature)
        return Seen(
            one if measures else None,
            one if measures and sent.damping is not None else None,
            sent.loss if guarded and self.judges else None,
            jnp.zeros((), jnp.float32) if guarded else None,
        )

    def local(self, sent: Sent, held: Held, oracle: Oracle, turn: Turn):
        """Do the method's work with plain numbers, measure, and replace bad replies."""
        phase, seen = self._own(sent, held.curvature), self._expected(sent)
        memory = self._memory(sent, held)
        damped = replace(oracle, damping=sent.damping)
        after, reply = phase.local(sent.message, memory, damped, turn)
        point = _curvature.point_in(sent.message)
        if point is not None:
            held, seen = self._measured(sent, held, seen, oracle, point, turn)
        if self.whole.safeguard:
            returns: Any = sent.halvings
            about = phase.about
            known = _tree.zeros_like(reply) if about is None else about(sent.message)
            # A run that is given up fails as any other.
            fine = _tree.all_finite((reply, after)) | (returns >= MOST)
            reply = _tree.select(fine, reply, known)
            after = _tree.select(fine, after, memory)
            seen = replace(seen, troubled=(~fine).astype(jnp.float32))
            held = replace(held, returns=returns)
        return replace(held, memory=after), Reply(reply, seen)

    def _memory(self, sent: Sent, held: Held) -> PyTree:
        """Return the method's memory, a fresh one if the server rolled back."""
        point: Any = _curvature.point_in(sent.message)
        if sent.halvings is None or point is None:
            return held.memory
        fresh = self.whole.plain(sent).init_client(point.x, point.y)
        return _tree.select(held.returns == sent.halvings, held.memory, fresh)

    def _measured(
        self, sent: Sent, held: Held, seen: Seen, oracle: Oracle, point: Any, turn: Turn
    ) -> tuple[Held, Seen]:
        """Return v and L_k after one product, and what was seen."""
        for_product, for_loss = (
            jr.fold_in(jr.fold_in(turn.key, number), turn.index)
            for number in (_FOR_CURVATURE, _FOR_LOSS)
        )
        if seen.loss is not None:
            xi = oracle.draw_upper(for_loss)
            loss = oracle.upper_loss(point.x, point.y, xi).astype(seen.loss.dtype)
            seen = replace(seen, loss=jnp.where(jnp.isfinite(loss), loss, seen.loss))
        if seen.ratio is None or held.vector is None:
            return held, seen
        v, is_z = held.vector.y, jnp.zeros((), bool)
        if seen.along is not None and isinstance(point, Triple):
            unit = _tree.scale(1 / jnp.maximum(_tree.norm(point.z), 1e-30), point.z)
            is_z = _curvature.is_along_z(turn.index) & (_tree.norm(unit) > 0.5)
            v = _tree.select(is_z, unit, v)
        after, size = _curvature.multiplied(oracle, point, v, for_product)
        common: Any = sent.curvature
        # A value that is not finite must not scale all others.
        sound = jnp.isfinite(size)
        size = jnp.where(sound, size, common)
        after = _tree.select(sound, after, v)
        ratio = jnp.minimum((size / common) ** POWER, 1e6)
        ratio = jnp.where(is_z, jnp.maximum(ratio, 1), ratio)
        if seen.along is not None:
            along = jnp.clip(size * _tree.dot(v, after) / common, -1, 1)
            along = jnp.where(is_z & sound, along, 1).astype(common.dtype)
            seen = replace(seen, along=along)
        own: Any = held.curvature
        slower = jnp.where(is_z, own, own + 0.1 * (size - own))
        found = _curvature.found(after, size)
        held = replace(
            held,
            vector=Pair(None, _tree.select(is_z, held.vector.y, found)),
            curvature=jnp.maximum(size, slower).astype(own.dtype),
        )
        return held, replace(seen, ratio=ratio.astype(common.dtype))

    # On the server ------------------------------------------------------------------

    def up(self, server: Any, replies: Any, turn: ServerTurn) -> Any:
        """Take in the replies as the method does. Judge a round after the last."""
        reply, seen = _opened(replies)
        phase = self._own(self.whole.known(server))
        state = replace(server, server=phase.taken_in(server.server, reply, turn))
        if self._measures:
            curvature = _curvature.followed(state.curvature, seen.ratio)
            softness = state.softness
            if softness is not None:
                is_z = _curvature.is_along_z(turn.index)
                softness = softness.seen(seen.along, is_z)
            state = replace(state, curvature=curvature, softness=softness)
        if state.guard is not None:
            state = replace(state, guard=state.guard.told(seen.troubled, seen.loss))
        if self.stage == "setup":
            return self.whole.begun(state)
        return self._judged(state, turn) if self.judges else state

    def _judged(self, state: Any, turn: ServerTurn) -> Any:
        """Return the next state, once the move of x is known."""
        before, guard, point = state.way, state.guard, self.whole.point(state)
        way = before
        if before is not None:
            share = plain_steps.largest_share(self.whole.algorithm)
            unit = before.stride() * share.astype(before.squares.dtype)
            if guard is not None:
                unit = unit * plain_steps.shorter("upper", guard.halvings, unit)
            way = before.gone(point.x, unit)
        if guard is None:
            return replace(state, way=way)
        guard = self._fitting(state, guard, turn)
        watched, curvature = self.whole.algorithm.watched, state.curvature
        places = watched(state.server), watched(guard.kept[0])
        speed = 1.0 if state.momentum is None else state.momentum.speed()
        turned = leapt = jnp.zeros((), bool)
        if before is not None:
            turned, leapt = way.turns > before.turns, way.leapt(before)
        curvature = 1.0 if curvature is None else curvature
        move = Move(*places, speed, curvature, turned, leapt)
        kept, after = guard.judged((state.server, way), move, turn.index)
        # Clients forget what they kept of the time that did not count.
        returned = after.halvings > guard.halvings
        forgotten = self.whole.algorithm.forgotten
        server = _tree.select(returned, forgotten(kept[0]), kept[0])
        state = replace(state, server=server, way=kept[1], guard=after)
        if state.momentum is None:
            return state
        here: Any = self.whole.algorithm.blocks(server)
        there, momentum = state.momentum.pushed(here, returned)
        server = self.whole.algorithm.at(server, there)
        return replace(state, server=server, momentum=momentum)

    def _fitting(self, state: Any, guard: Guard, turn: ServerTurn) -> Guard:
        """Remember the first round in which a theta did not fit, or z was damped."""
        if state.softness is not None:
            guard = guard.noting("soft", state.softness.is_felt(), turn.index)
        thetas = plain_steps.fixed_thetas(self.whole.algorithm)
        if not thetas or state.curvature is None:
            return guard
        theta = jnp.max(jnp.stack(thetas)).astype(state.curvature.dtype)
        theta = theta * plain_steps.shorter("lower", guard.halvings, theta)
        return guard.noting("unfit", theta * state.curvature > 1, turn.index)


def _opened(replies: Any) -> tuple[PyTree, Any]:
    """Return the reply, or all of them, and the means of what was seen."""
    if not isinstance(replies, Gathered):
        return replies.reply, jax.tree.map(jnp.asarray, replies.seen)
    share = replies.weights / jnp.sum(replies.weights)
    inner = replies.replies

    def mean(values: Array) -> Array:
        return jnp.sum(share.astype(values.dtype) * values)

    seen = jax.tree.map(mean, inner.seen)
    return Gathered(inner.reply, replies.weights), seen
