r"""A run that explodes goes back, and goes on by shorter steps.

The server keeps what it carried some 10 rounds ago, in a calm round. Where half of the
replies of a round are not finite, or y goes a hundred times as far as in the first
rounds and farther than its own size (whatever explodes takes y along), it takes that up
again, halves the steps of the lower level and quarters those of x: an x too fast for y
and z is the other reason why runs explode, and halving all steps alike would not cure
that. Steps in units of the curvature are seldom the reason; they are shortened less.

Clients send one number, whether their reply was finite, and what was known of a reply
in its place where it was not: such a client is left out of the round. Less than half of
them cannot turn a run back, so that no single one can hold it up. All of it is a part
of the server's state, so that a run can be resumed, replayed and deployed as any other.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from fedbilevel import _tree
from fedbilevel._types import Lower

__all__ = ["MOST", "Guard"]

MOST = 30  # times that steps are halved before a run is given up
_EVERY = 10  # rounds between two kept states
_MANY = 0.5  # of the replies of a round
_FAR, _CALM = 100.0, 10.0  # times as far as in the first rounds
_GROWTH = 2.0  # by which the usual may grow in one of the first rounds


class Guard(eqx.Module):
    """What to go back to, what is usual, and what has happened.

    `older` and `recent` are kept states, `kept` the rounds after which they stood,
    `usual` how far y went from the recent one in the first rounds, `trouble` the share
    of replies of this round that were not finite. `replaced` counts the rounds that
    left a reply out, `halvings` how often steps were halved; `rounds` has when that
    was, and where the run went back to.
    """

    older: PyTree
    recent: PyTree
    kept: Int[Array, " 2"]
    usual: Float[Array, ""]
    trouble: Float[Array, ""]
    replaced: Int[Array, ""]
    halvings: Int[Array, ""]
    rounds: Int[Array, "most 2"]

    @staticmethod
    def of(state: PyTree) -> "Guard":
        """Begin with nothing usual."""
        none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        kept, rounds = jnp.zeros(2, jnp.int32), jnp.zeros((MOST, 2), jnp.int32)
        return Guard(state, state, kept, zero, zero, none, none, rounds)

    def judged(
        self, state: PyTree, y: Lower, before: Lower, index: Any
    ) -> tuple[PyTree, "Guard"]:
        """Return the state to go on from after a round, and what to remember.

        `y` is that of the state, `before` that of the recent one.
        """
        index = jnp.asarray(index, jnp.int32)
        far = _size(_tree.subtract(y, before))
        most = jnp.maximum(_FAR * self.usual, _size(before))
        exploded = (self.usual > 0) & (far > most)
        bad = exploded | (self.trouble >= _MANY) | ~_tree.all_finite(state)
        bad &= self.halvings < MOST
        state = _tree.select(bad, self.older, state)
        return state, self._after(state, far, bad, index)

    def _after(
        self, state: PyTree, far: Array, bad: Bool[Array, ""], index: Array
    ) -> "Guard":
        early = index < _EVERY
        grown = jnp.where(early, _GROWTH * self.usual, self.usual)
        usual = jnp.where(self.usual > 0, jnp.minimum(far, grown), far)
        calm = early | (far <= _CALM * self.usual)
        due = (index % _EVERY == _EVERY - 1) & calm & ~bad
        now, (older, recent) = index + 1, self.kept
        place = jnp.minimum(self.halvings, MOST - 1)
        happened = self.rounds.at[place].set(jnp.stack([now, older]))
        return Guard(
            _tree.select(due, self.recent, self.older),
            _tree.select(due | bad, state, self.recent),
            jnp.stack(
                [
                    jnp.where(due, recent, older),
                    jnp.where(due, now, jnp.where(bad, older, recent)),
                ]
            ),
            jnp.where(bad, self.usual, jnp.maximum(self.usual, usual)),
            jnp.zeros_like(self.trouble),
            self.replaced + (self.trouble > 0).astype(jnp.int32),
            self.halvings + bad.astype(jnp.int32),
            jnp.where(bad, happened, self.rounds),
        )

    def told(self) -> list[str]:
        """Say in words what happened."""
        told = [
            f"the run exploded in round {when}: it went back to where it was after "
            f"round {back}, and on with half the steps, and a quarter of that of x"
            for when, back in self.rounds[: int(self.halvings)].tolist()
        ]
        if int(self.replaced):
            told.append(
                f"in {int(self.replaced)} rounds replies that were not finite were "
                "left out"
            )
        return told


def _size(block: Lower) -> Array:
    return _tree.norm(block).astype(jnp.float32)
