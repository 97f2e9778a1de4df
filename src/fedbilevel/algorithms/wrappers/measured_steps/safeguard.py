r"""A run that explodes goes back, and goes on by shorter steps.

The server keeps what it carried some 10 rounds ago, in a calm round. Where half of the
replies of a round are not finite, or y goes a hundred times as far as in the first
rounds and farther than its own size (whatever explodes takes y along), it takes that up
again, halves the steps of the lower level and quarters those of x: an x too fast for y
and z is the other reason why runs explode, and halving all steps alike would not cure
that. Steps in units of the curvature are seldom the reason; they are shortened less.

Where the stride of x is measured and x turns round (`dog_stride.py`), that stride is
limited; if x had got to where all is much steeper than at its start, the run begins
anew. So it does if it diverges there while y and z may have momentum (`momentum.py`),
which makes an x that is too fast diverge before it turns. How far y goes counts in
units of how fast momentum makes it.

Clients send one number, whether their reply was finite, and what was known of a reply
in its place where it was not: such a client is left out of the round. Less than half of
them cannot turn a run back, so that no single one can hold it up. All of it is a part
of the server's state, so that a run can be resumed, replayed and deployed as any other.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from fedbilevel import _tree
from fedbilevel._evaluation import apart
from fedbilevel._types import Lower
from fedbilevel.algorithms.one_loop import when

MOST = 30  # times that a run goes back before it is given up
_EVERY = 10  # rounds between two kept states
_MANY = 0.5  # of the replies of a round
_FAR, _CALM = 100.0, 10.0  # times as far as in the first rounds
_GROWTH = 2.0  # by which the usual may grow in one of the first rounds
EXPLODED, TURNED, ANEW, UNFIT, TOO_FAST = range(5)
_TOLD = {
    EXPLODED: "the run exploded in round {now}: it went back to where it was after "
    "round {back}, and on with half the steps, and a quarter of that of x",
    TURNED: "x turned round in round {now}, too fast for y: its step became a quarter "
    "of what it was",
    ANEW: "x turned round in round {now}, too fast for y: the run began anew, with a "
    "quarter of the step that x had",
    TOO_FAST: "the run exploded in round {now}, x being too fast for y: it began anew, "
    "with a quarter of the step that x had",
    UNFIT: "theta did not fit any more in round {now}: it was larger than 1/L1, where "
    "its series need not converge; theta=auto follows L1",
}


class Turned(NamedTuple):
    """Whether x turned round, whether it was lost then, and a state to begin anew.

    An x that is `too_fast` is the reason of an explosion, and not y's own steps.
    """

    turned: Bool[Array, ""]
    lost: Bool[Array, ""]
    too_fast: Bool[Array, ""]
    start: PyTree


class Move(NamedTuple):
    """The y of a state, that of the recent one, and how fast momentum makes it."""

    y: Lower
    before: Lower
    speed: Any


class _Verdict(NamedTuple):
    """What a round was: bad, or one in which x turned or fled; and if it is kept."""

    bad: Bool[Array, ""]
    turned: Bool[Array, ""]
    fled: Bool[Array, ""]
    anew: Bool[Array, ""]
    due: Bool[Array, ""]


# A function of its own in the program: every leaf of a state is chosen by it.
@jax.jit
def _verdict(
    bad: Array,
    seen: tuple[Array, Array, Array],
    due: Array,
    happened: Array,
    returns: Array,
) -> _Verdict:
    """Return what a round was, as far as the run is not given up."""
    turned, lost, too_fast = seen
    bad &= returns < MOST
    turned = turned & ~bad & (happened - returns < MOST)
    fled = bad & too_fast
    bad &= ~fled
    anew = fled | (turned & lost & (returns < MOST))
    return _Verdict(bad, turned, fled, anew, due & ~(bad | anew))


class Guard(eqx.Module):
    """What to go back to, what is usual, and what has happened.

    `first` is what the server carried at the start, where a run may begin anew.
    `states` are two kept ones, one after the other, and `kept` the rounds after which
    they stood: the recent one is that of the later round, and the other is written over
    next. Where the rounds are the same, so are the states. `usual` is how far y went
    from the recent one in the first rounds, `trouble` the share
    of replies of this round that were not finite. `replaced` counts the rounds that
    left a reply out, `halvings` how often steps were halved, `returns` how often the
    run went back; of all that `happened`, `rounds` has what, when, and back to where.
    `unfit` is the first round whose L1 was too large for a theta that was given, or 0.
    """

    first: PyTree
    states: PyTree
    kept: Int[Array, " 2"]
    usual: Float[Array, ""]
    trouble: Float[Array, ""]
    replaced: Int[Array, ""]
    halvings: Int[Array, ""]
    returns: Int[Array, ""]
    happened: Int[Array, ""]
    rounds: Int[Array, "places 3"]
    unfit: Int[Array, ""]

    @staticmethod
    def of(state: PyTree, first: PyTree) -> "Guard":
        """Begin with nothing usual."""
        none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        kept, rounds = jnp.zeros(2, jnp.int32), jnp.zeros((2 * MOST, 3), jnp.int32)
        counts = (none, none, none, none)
        return Guard(first, _twice(state), kept, zero, zero, *counts, rounds, none)

    def recent(self) -> PyTree:
        """Return the kept state of the later round."""
        return _entry(self.states, jnp.argmax(self.kept))

    def at(self, state: PyTree, first: PyTree) -> "Guard":
        """Return the same with the state that a first round begins from."""
        return replace(self, first=first, states=_twice(state))

    def judged(
        self, state: PyTree, move: Move, turn: Turned, index: Any
    ) -> tuple[PyTree, "Guard"]:
        """Return the state to go on from after a round, and what to remember."""
        index = jnp.asarray(index, jnp.int32)
        far = _size(_tree.subtract(move.y, move.before)) / move.speed
        too_far = (self.usual > 0) & (far > _FAR * self.usual)
        broken = (self.trouble >= _MANY) | ~_tree.all_finite(state)
        calm = (index < _EVERY) | (far <= _CALM * self.usual)
        due = (index % _EVERY == _EVERY - 1) & calm

        def looked_at() -> tuple[PyTree, Guard]:
            bad = broken | (too_far & (far > _size(move.before) / move.speed))
            seen = (turn.turned, turn.lost, turn.too_fast)
            with apart():
                verdict = _verdict(bad, seen, due, self.happened, self.returns)
            quiet = self._quiet(far, verdict.bad | verdict.anew, index)
            return quiet._changed(state, turn.start, verdict, index)

        # Most rounds end here: nothing of the states, which may be large, is copied.
        return when(
            too_far | broken | turn.turned | due,
            looked_at,
            lambda: (state, self._quiet(far, jnp.zeros((), bool), index)),
        )

    def _quiet(self, far: Array, returned: Array, index: Array) -> "Guard":
        """Return what to remember of any round: what is usual, who was left out."""
        grown = jnp.where(index < _EVERY, _GROWTH * self.usual, self.usual)
        usual = jnp.where(self.usual > 0, jnp.minimum(far, grown), far)
        return replace(
            self,
            usual=jnp.where(returned, self.usual, jnp.maximum(self.usual, usual)),
            trouble=jnp.zeros_like(self.trouble),
            replaced=self.replaced + (self.trouble > 0).astype(jnp.int32),
        )

    def _changed(
        self, state: PyTree, start: PyTree, verdict: "_Verdict", index: Array
    ) -> tuple[PyTree, "Guard"]:
        """Return the state to go on from, and what to remember of it.

        In a calm round that is due it is the state, after a return where that led.
        """
        bad, turned, fled, anew, due = verdict
        recent = jnp.argmax(self.kept)
        older = 1 - recent
        back = _entry(self.states, older)
        state = _tree.select(anew, start, _tree.select(bad, back, state))
        place = jnp.arange(2, dtype=recent.dtype)
        # A return makes both of them the same again.
        written = anew | (place == jnp.where(bad, recent, older)) & (bad | due)
        stood = jnp.where(anew, 0, jnp.where(bad, self.kept[older], index + 1))
        after = replace(
            self,
            states=jax.tree.map(partial(_overwritten, written), self.states, state),
            kept=jnp.where(written, stood, self.kept),
            halvings=self.halvings + bad.astype(jnp.int32),
            returns=self.returns + (bad | anew).astype(jnp.int32),
        )
        what = jnp.where(bad, EXPLODED, jnp.where(anew, ANEW, TURNED))
        what = jnp.where(fled, TOO_FAST, what)
        noted = after._noted(bad | anew | turned, what, index + 1, self.kept[older])
        return state, noted

    def _noted(
        self, happened: Bool[Array, ""], what: Array, now: Array, back: Array
    ) -> "Guard":
        entry = jnp.stack([what.astype(jnp.int32), now, back])
        rounds = jnp.where(
            happened, self.rounds.at[self.happened].set(entry), self.rounds
        )
        count = self.happened + happened.astype(jnp.int32)
        return replace(self, happened=count, rounds=rounds)

    def watched(self, is_too_large: Bool[Array, ""], index: Any) -> "Guard":
        """Return what to remember of a theta that may have been too large."""
        now = jnp.asarray(index, jnp.int32) + 1
        return replace(
            self, unfit=jnp.where(is_too_large & (self.unfit == 0), now, self.unfit)
        )

    def told(self, times: int = 1) -> list[str]:
        """Say in words what happened, in order; a round was judged so many times."""
        listed = self.rounds[: int(self.happened)].tolist()
        if int(self.unfit):
            listed = sorted(
                [[UNFIT, int(self.unfit), 0], *listed], key=lambda one: one[1]
            )
        told = [
            _TOLD[what].format(now=(now - 1) // times + 1, back=back // times)
            for what, now, back in listed
        ]
        if int(self.replaced):
            told.append(
                f"in {int(self.replaced)} rounds replies that were not finite were "
                "left out"
            )
        return told


def _twice(state: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)


def _entry(states: PyTree, place: Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[place], states)


def _overwritten(written: Bool[Array, " 2"], states: Array, state: Array) -> Array:
    flags = written.reshape(2, *[1] * state.ndim)
    return jnp.where(flags, state, states)


def _size(block: Lower) -> Array:
    return _tree.norm(block).astype(jnp.float32)
