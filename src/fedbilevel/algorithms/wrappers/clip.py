r"""Changes that are cut to a running quantile of their norms: no bound to guess.

A wrapper around any method. Every block of a change has a bound C, which the server
keeps and sends along. A client cuts its change down to the norm C, and reports whether
it was shorter; with b the mean of these reports and q the quantile:

    change <- change min(1, C / ||change||),     bit = 1 if ||change|| <= C else 0
    C      <- C exp(-RATE (b - q))

so that a share q of the changes are no longer than C. A C that is not known yet is
measured, not guessed: clients cut nothing and send log ||change||, and

    C = exp(mean over clients of log ||change||)

Where all norms are multiplied by a number, so is every C, from the first round on.
Changes of zero do not count.

In a method of one loop that sends its iterate back, the change of every local step, of
the point and of the direction that it moved along, is cut alike, by bounds of its own,
before the reply is. The server's C is one for all local steps of a round. Drift
corrections are never cut: c must remain the mean of all c_k. Nor are exchanges that
make no step: a series whose terms were cut would be no inverse. Where no reply is a
point, the slopes are cut that a server steps along.

More numbers travel than the method says: one down and two up for each bound, one for
every block of a reply, and one for every block of a local step.

Reference: Andrew, Thakkar, McMahan, Ramaswamy, arXiv 1905.03871, whose counts are noisy
and whose C protects clients, which this one does not.
"""

from dataclasses import replace
from functools import reduce
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import leaf_numbers
from fedbilevel._types import Lower, Number, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    ServerTurn,
    Turn,
    every_phase,
    with_turn,
)
from fedbilevel.algorithms.one_loop import OneLoop
from fedbilevel.algorithms.parts import Iterate, Part
from fedbilevel.algorithms.wrappers import base
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import is_known, number

RATE = 0.2  # of the paper
_SLOPES = 3  # blocks of a reply of which nothing is known: x, y and z at most
Blocks = Float[Array, " blocks"]


class Tally(eqx.Module):
    """Bits, or logarithms of norms, and how many of the changes were not zero."""

    values: Blocks
    counted: Blocks

    @staticmethod
    def expected(bounds: Blocks, quantile: Array) -> "Tally":
        """Return what is known beforehand: as many are cut as there should be."""
        usual = jnp.full_like(bounds, quantile.astype(bounds.dtype))
        return Tally(usual, jnp.ones_like(bounds))


class Clipping(base.Inside):
    """The server's state, and the bounds of every phase, 0 if unknown."""

    bounds: dict[str, Blocks]


class Bounded(eqx.Module):
    """A message, with the bounds."""

    message: PyTree
    bounds: Blocks


class Counted(eqx.Module):
    """A reply, with the tally of its norms."""

    reply: PyTree
    tally: Tally


def quantile_clipped(algorithm: AbstractAlgorithm, quantile: float) -> "QuantileClip":
    """Cut what a method's replies change, and its local steps where it has one loop.

    Where a correction of drift travels with the steps, these are not cut.
    """
    if isinstance(algorithm, OneLoop) and algorithm.returns_point:
        if not any(part.corrects for part in algorithm.parts()):
            algorithm = base.With(algorithm, StepClip(quantile))
    return QuantileClip(algorithm, quantile)


def _check_quantile(quantile: Any) -> None:
    if is_known(quantile) and not 0 < float(quantile) < 1:
        raise InvalidInputError(
            f"a bound at the quantile {float(quantile):g} of the norms: give one "
            "between 0 and 1, such as 0.5."
        )


class StepClip(Part):
    """Local steps, each of them cut to a running quantile of their norms."""

    clip_quantile: Number = number("share of the changes that are not to be cut")

    def __check_init__(self) -> None:
        _check_quantile(self.clip_quantile)

    def shared(self, start):
        """Start with unknown bounds, one for each block of point and direction."""
        return _unknown(start, base.kind_of_numbers(start.point))

    def begun(self, begin, shared, own):
        """Return the bounds, the tally of no steps, and their number."""
        none, p = jnp.zeros_like(shared), begin.method.local_steps
        return shared, Tally(none, none), jnp.asarray(p, shared.dtype)

    def stepped(self, state, old, new, t):
        """Return the step with bounded changes, and the tally."""
        bounds, tally, p = state
        before, after = (Iterate(one.point, one.direction) for one in (old, new))
        after, cut = _cut(after, before, bounds)
        tally = _tree.add(tally, cut)
        new = replace(new, point=after.point, direction=after.direction)
        return (bounds, tally, p), new

    def ended(self, state, answer):
        """Send the mean over the steps."""
        _, tally, p = state
        return None, jax.tree.map(lambda total: total / p, tally)

    def known(self, shared):
        """Expect as many cuts as there should be."""
        return Tally.expected(shared, self.clip_quantile)

    def taken(self, shared, answer, server, turn):
        """Move the bounds."""
        return _followed(shared, answer, self.clip_quantile)


class QuantileClip(base.AroundServer):
    """A method whose replies are cut to a running quantile of the norms of changes."""

    quantile: Number = number("share of the changes that are not to be cut")

    def __check_init__(self) -> None:
        _check_quantile(self.quantile)
        inner = self.algorithm
        if inner.channel().coders:
            raise InvalidInputError(
                f"`{inner.title}` compresses its replies: what clients report of their "
                "norms would be thinned out or rounded with the rest. Give clip as a "
                "number, or leave it out."
            )
        if not isinstance(inner, OneLoop) or inner.returns_point:
            return
        if any(part.sums for part in inner.parts()):
            raise InvalidInputError(
                f"`{inner.title}` with controls learns them from the sums that would "
                "be cut. Use an anchor in their place, or no clip."
            )

    def settings(self) -> dict[str, Any]:
        """Return those of the method, and the quantile."""
        return {**self.algorithm.settings(), "clip_quantile": self.quantile}

    def init_server(self, x: Upper, y: Lower) -> Clipping:
        """Start the method, with no bound known."""
        server, kind = self.algorithm.init_server(x, y), base.kind_of_numbers(x)
        cut = self._cut_phases()
        return Clipping(server, {p.name: _unknown(p.known(server), kind) for p in cut})

    def _cut_phases(self) -> list[Phase]:
        """Return the phases that make steps."""
        every = every_phase(self.algorithm.phases())
        moving = [one for one in every if one.moves]
        slopes = [one for one in every if one.about is None and not one.gathers]
        return moving or slopes

    def phases(self) -> Phases:
        """Return the method's own, with bounded steps."""
        cut = {one.name for one in self._cut_phases()}

        def change(phase: Phase) -> Phase:
            return self._cut(phase) if phase.name in cut else base.inner_phase(phase)

        return base.mapped(self.algorithm.phases(), change)

    def _cut(self, inner: Phase) -> Phase:
        """Return an exchange with bounded replies."""
        name, plain = inner.name, base.inner_phase(inner)
        known: Any = inner.about

        def down(server: Clipping, turn: Any) -> Bounded:
            return Bounded(plain.message(server, turn), server.bounds[name])

        def about(sent: Bounded) -> Counted:
            return Counted(
                known(sent.message), Tally.expected(sent.bounds, self.quantile)
            )

        def local(sent: Bounded, client: PyTree, oracle: Oracle, turn: Turn):
            client, reply = inner.local(sent.message, client, oracle, turn)
            before = _tree.zeros_like(reply) if known is None else known(sent.message)
            return client, Counted(*_cut(reply, before, sent.bounds))

        def up(server: Clipping, counted: Counted, turn: ServerTurn) -> Clipping:
            C = _followed(server.bounds[name], counted.tally, self.quantile)
            after = plain.taken_in(server, counted.reply, turn)
            return replace(after, bounds={**server.bounds, name: C})

        given = None if known is None else about
        change = {"local": local, "up": with_turn(up), "about": given}
        return replace(inner.saying(down), **change, moves=False)


def _unknown(known: PyTree | None, kind: Any) -> Blocks:
    """Return a bound of 0 for each block of a reply, of a few where none is known."""
    blocks = _SLOPES if known is None else len(leaf_numbers(_cuttable(known)))
    return jnp.zeros(blocks, kind)


def _cuttable(reply: PyTree) -> PyTree:
    """Return what of a reply is cut."""
    return replace(reply, shared=()) if isinstance(reply, Iterate) else reply


def _cut(reply: PyTree, known: PyTree, bounds: Blocks) -> tuple[PyTree, Tally]:
    """Return a reply with bounded changes, and the tally of each block."""
    part = _cuttable(reply)
    leaves, structure = jax.tree.flatten(part)
    before = jax.tree.leaves(_cuttable(known))
    values, counted = jnp.zeros_like(bounds), jnp.zeros_like(bounds)
    for block, numbers in enumerate(leaf_numbers(part)):
        C = bounds[block]
        changes = [leaves[one] - before[one] for one in numbers]
        size = _norm([change.astype(C.dtype) for change in changes])
        short, unknown = size <= C, C == 0
        factor = C / jnp.where(short, 1, size)
        for one, change in zip(numbers, changes, strict=True):
            shorter = before[one] + factor.astype(change.dtype) * change
            leaves[one] = jnp.where(short | unknown, leaves[one], shorter)
        logarithm = jnp.log(jnp.where(size > 0, size, 1))
        value = jnp.where(unknown, logarithm, short.astype(C.dtype))
        # A first norm that is not finite does not count. A later one is too long.
        counts = (size > 0) & (jnp.isfinite(value))
        values = values.at[block].set(jnp.where(counts, value, 0))
        counted = counted.at[block].set(counts.astype(C.dtype))
    cut = jax.tree.unflatten(structure, leaves)
    if isinstance(reply, Iterate):
        cut = replace(cut, shared=reply.shared)
    return cut, Tally(values, counted)


def _norm(parts: list[Array]) -> Array:
    """Return the norm of a block, without squaring what is too large for it."""
    largest = reduce(jnp.maximum, [jnp.max(jnp.abs(a), initial=0) for a in parts])
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    squares = [jnp.sum((a / unit) ** 2) for a in parts]
    return unit * jnp.sqrt(reduce(jnp.add, squares))


def _followed(C: Array, tally: Tally, quantile: Array) -> Array:
    """Return the bounds after an exchange."""
    counted = tally.counted
    mean = tally.values / jnp.where(counted > 0, counted, 1)
    rate = jnp.asarray(RATE, C.dtype)
    moved = C * jnp.exp(-rate * (mean - quantile.astype(C.dtype)))
    after = jnp.where(C > 0, moved, jnp.exp(mean))
    return jnp.where(counted > 0, after, C).astype(C.dtype)
