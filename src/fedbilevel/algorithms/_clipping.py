r"""Changes that are cut to a running quantile of their norms: no bound to guess.

A wrapper around any method. Every block of what a step changes has a bound C, which
the server keeps and sends along. A client cuts its change down to the norm C, and says
whether it was shorter; with b the mean of what all said and q the quantile:

    change <- change min(1, C / ||change||),     bit = 1 if ||change|| <= C else 0
    C      <- C exp(-RATE (b - q))

so that a share q of the changes are no longer than C. A C that is not known yet is
measured, not guessed: clients cut nothing and send log ||change||, and

    C = exp(mean over clients of log ||change||)

Where all norms are multiplied by a number, so is every C, from the first round on.
Changes of zero tell nothing, and do not count.

In a method of one loop that sends its iterate back, the change of every local step, of
the point and of the direction that it moved along, is cut in the same way, by bounds
of its own, before the reply is. The server's C is one for all local steps of a round.
What corrects drift (`control`) is never cut: c must remain the mean of all c_k. Nor are
exchanges that make no step: a series whose terms were cut would be no inverse. Where no
reply is a point, the slopes are cut that a server steps along.

What travels more than the method says: a number down and two up for each bound, one for
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
from fedbilevel._blocks import combine, leaf_numbers
from fedbilevel._types import Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    SeesTurn,
    ServerTurn,
    Turn,
    every_phase,
    with_turn,
)
from fedbilevel.algorithms._drift import CONTROLS
from fedbilevel.algorithms._local import Iterate
from fedbilevel.algorithms._optimizers import AbstractWrapper, mapped
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, describe, is_known, number

__all__ = ["QuantileClip", "quantile_clipped"]

RATE = 0.2  # of the paper
_SLOPES = 3  # blocks of a reply of which nothing is known: x, y and z at most


class Bounds(eqx.Module):
    """C for each block of a reply, and of a local step where these are cut; 0: unknown.

    The same shape holds what is told of the norms.
    """

    reply: Float[Array, " blocks"]
    step: Float[Array, " blocks"] | None


class Clipping(eqx.Module):
    """The server's state, and the bounds of every phase."""

    server: PyTree
    bounds: dict[str, Bounds]


class Bounded(eqx.Module):
    """A message, with the bounds."""

    message: PyTree
    bounds: Bounds


class Tally(eqx.Module):
    """Bits, or logarithms of norms, and how many of the changes were not zero."""

    values: Bounds
    counted: Bounds


class Told(eqx.Module):
    """A reply, with what is told of its norms."""

    reply: PyTree
    tally: Tally


def quantile_clipped(algorithm: AbstractAlgorithm, quantile: float) -> "QuantileClip":
    """Cut what a method's replies change, and its local steps where it has one loop."""
    if not _walks_alone(algorithm):
        return QuantileClip(algorithm, quantile)
    walking: Any = algorithm
    one: Any = replace(walking, local_steps=1)
    return QuantileClip(one, quantile, local_steps=walking.local_steps)


class QuantileClip(AbstractWrapper):
    """A method whose changes are cut to a running quantile of their norms.

    With `local_steps`, `algorithm` makes one local step, and every one of so many here
    is one of its; `quantile_clipped` builds it that way.
    """

    quantile: Number = number("share of the changes that are not to be cut")
    local_steps: int | None = count("local steps, each of them cut", default=None)

    def __check_init__(self) -> None:
        if is_known(self.quantile) and not 0 < float(self.quantile) < 1:
            raise InvalidInputError(
                f"a bound at the quantile {float(self.quantile):g} of the norms: give "
                "one between 0 and 1, such as 0.5."
            )
        if self.algorithm.channel().coders:
            raise InvalidInputError(
                f"`{self.algorithm.title}` compresses its replies: what clients tell "
                "of their norms would be thinned out or rounded with the rest. Give "
                "clip as a number, or leave it out."
            )
        drift = getattr(self.algorithm, "drift", None)
        if drift == CONTROLS and not any(one.moves for one in self._cut_phases()):
            raise InvalidInputError(
                f"`{self.algorithm.title}` with drift={CONTROLS} learns its controls "
                "from the sums that would be cut. Use drift=anchor, or no clip."
            )

    @property
    def title(self) -> str:
        """The method's own name."""
        return self.algorithm.title

    def parameters(self) -> dict[str, Any]:
        """Return those of the method, and the quantile."""
        own = self.algorithm.parameters()
        if self.local_steps is not None:
            own["local_steps"] = self.local_steps
        return {**own, "clip_quantile": describe(self.quantile)}

    def init_server(self, x: Upper, y: Lower) -> Clipping:
        """Start the method, with no bound known."""
        server = self.algorithm.init_server(x, y)
        kind = jnp.result_type(jax.tree.leaves(x)[0])
        kind = kind if kind.itemsize > 2 else jnp.dtype(jnp.float32)
        cut = self._cut_phases()
        return Clipping(
            server, {one.name: self._unknown(one, server, kind) for one in cut}
        )

    def _cut_phases(self) -> list[Phase]:
        """Return the phases that make steps."""
        every = every_phase(self.algorithm.phases())
        moving = [one for one in every if one.moves]
        slopes = [one for one in every if one.about is None and not one.gathers]
        return moving or slopes

    def _unknown(self, phase: Phase, server: PyTree, kind: Any) -> Bounds:
        blocks = _SLOPES
        if phase.about is not None and not isinstance(phase.down, SeesTurn):
            blocks = len(leaf_numbers(_cuttable(phase.about(phase.down(server)))))
        none = jnp.zeros(blocks, kind)
        return Bounds(none, None if self.local_steps is None else none)

    def init_client(self, x: Upper, y: Lower) -> PyTree:
        """Return what the method keeps on a client."""
        return self.algorithm.init_client(x, y)

    def setup(self) -> Phases:
        """Return the method's own, of which nothing is cut."""
        return mapped(self.algorithm.setup(), _inside)

    def phases(self) -> Phases:
        """Return the method's own, with bounded steps."""
        cut = {one.name for one in self._cut_phases()}

        def change(phase: Phase) -> Phase:
            is_cut = phase.name in cut
            return _Exchange(self, phase).phase() if is_cut else _inside(phase)

        return mapped(self.algorithm.phases(), change)

    def point(self, server: Clipping) -> Pair:
        """Return the method's iterate."""
        return self.algorithm.point(server.server)

    def watched(self, server: Clipping) -> PyTree:
        """Return what the method has watched."""
        return self.algorithm.watched(server.server)

    def events(self, server: Clipping) -> list[str]:
        """Say what the method says."""
        return self.algorithm.events(server.server)


class _Exchange(eqx.Module):
    """One exchange of a method with bounded changes."""

    whole: QuantileClip
    inner: Phase

    def phase(self) -> Phase:
        """Return the wrapped exchange."""
        sees = isinstance(self.inner.down, SeesTurn)
        return replace(
            self.inner,
            down=with_turn(self.down) if sees else self.down,
            local=self.local,
            up=with_turn(self.up),
            about=None if self.inner.about is None else self.about,
            moves=False,
        )

    def down(self, server: Clipping, turn: ServerTurn | None = None) -> Bounded:
        """Say what the method says, and the bounds."""
        say: Any = self.inner.down
        said = say(server.server) if turn is None else say.function(server.server, turn)
        return Bounded(said, server.bounds[self.inner.name])

    def about(self, sent: Bounded) -> Told:
        """Return what is known of a reply: as many are cut as there should be."""
        known: Any = self.inner.about
        q = self.whole.quantile
        usual = jax.tree.map(lambda C: jnp.full_like(C, q.astype(C.dtype)), sent.bounds)
        counted = jax.tree.map(jnp.ones_like, sent.bounds)
        return Told(known(sent.message), Tally(usual, counted))

    def local(self, sent: Bounded, client: PyTree, oracle: Oracle, turn: Turn):
        """Do the method's work, and cut what it changes."""
        message, bounds, about = sent.message, sent.bounds, self.inner.about
        steps = None, None
        if self.whole.local_steps is None:
            client, reply = self.inner.local(message, client, oracle, turn)
        else:
            client, reply, steps = self._walk(sent, client, oracle, turn)
        known = _tree.zeros_like(reply) if about is None else about(message)
        reply, values, counted = _cut(reply, known, bounds.reply)
        tally = Tally(Bounds(values, steps[0]), Bounds(counted, steps[1]))
        return client, Told(reply, tally)

    def _walk(self, sent: Bounded, client: PyTree, oracle: Oracle, turn: Turn):
        """Make the local steps one by one, each of them cut."""
        about, bounds, p = self.inner.about, sent.bounds.step, self.whole.local_steps
        assert about is not None and bounds is not None and p is not None

        def step(carry: tuple[PyTree, PyTree], t: Array):
            message, memory = carry
            one = Turn(turn.key, t, turn.shared)
            memory, reply = self.inner.local(message, memory, oracle, one)
            reply, *told = _cut(reply, about(message), bounds)
            return (combine(reply, message), memory), told

        start = (sent.message, client)
        (message, client), told = jax.lax.scan(step, start, turn.steps(p))
        return client, about(message), [jnp.mean(one, axis=0) for one in told]

    def up(self, server: Clipping, told: Told, turn: ServerTurn) -> Clipping:
        """Take the replies in as the method does, and move the bounds."""
        reply, tally = told.reply, told.tally
        name, q = self.inner.name, self.whole.quantile
        after = jax.tree.map(
            lambda C, value, counted: _followed(C, value, counted, q),
            server.bounds[name],
            tally.values,
            tally.counted,
        )
        state = self.inner.taken_in(server.server, reply, turn)
        return Clipping(state, {**server.bounds, name: after})


def _inside(phase: Phase) -> Phase:
    """Return an exchange as it is, of which nothing is cut."""
    down: Any = phase.down

    def say(server: Clipping, turn: ServerTurn | None = None) -> PyTree:
        if turn is None:
            return down(server.server)
        return down.function(server.server, turn)

    def up(server: Clipping, reply: PyTree, turn: ServerTurn) -> Clipping:
        return replace(server, server=phase.taken_in(server.server, reply, turn))

    sees = isinstance(down, SeesTurn)
    return replace(phase, down=with_turn(say) if sees else say, up=with_turn(up))


def _walks_alone(algorithm: AbstractAlgorithm) -> bool:
    """Say whether local steps can be made one by one: one loop, an iterate back."""
    phases = algorithm.phases()
    if len(phases) != 1 or not isinstance(phases[0], Phase) or not phases[0].moves:
        return False
    server = jax.eval_shape(algorithm.init_server, jnp.zeros(1), jnp.zeros(1))
    alone = isinstance(server, Iterate) and server.control is None
    return alone and getattr(algorithm, "local_steps", None) is not None


def _cuttable(reply: PyTree) -> PyTree:
    """Return what of a reply is cut."""
    return replace(reply, control=None) if isinstance(reply, Iterate) else reply


def _cut(
    reply: PyTree, known: PyTree, bounds: Float[Array, " blocks"]
) -> tuple[PyTree, Array, Array]:
    """Return a reply with bounded changes, and for each block what is told of it."""
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
        # A first norm that is not finite tells nothing; a later one is too long.
        counts = (size > 0) & (jnp.isfinite(value))
        values = values.at[block].set(jnp.where(counts, value, 0))
        counted = counted.at[block].set(counts.astype(C.dtype))
    cut = jax.tree.unflatten(structure, leaves)
    return (combine(cut, reply) if part is not reply else cut), values, counted


def _norm(parts: list[Array]) -> Array:
    """Return the norm of a block, without squaring what is too large for it."""
    largest = reduce(jnp.maximum, [jnp.max(jnp.abs(a), initial=0) for a in parts])
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    squares = [jnp.sum((a / unit) ** 2) for a in parts]
    return unit * jnp.sqrt(reduce(jnp.add, squares))


def _followed(C: Array, value: Array, counted: Array, quantile: Array) -> Array:
    """Return the bounds after an exchange."""
    mean = value / jnp.where(counted > 0, counted, 1)
    rate = jnp.asarray(RATE, C.dtype)
    moved = C * jnp.exp(-rate * (mean - quantile.astype(C.dtype)))
    after = jnp.where(C > 0, moved, jnp.exp(mean))
    return jnp.where(counted > 0, after, C).astype(C.dtype)
