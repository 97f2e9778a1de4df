r"""A run that explodes goes back, and goes on by shorter steps.

The server keeps what it carried 10 to 20 rounds ago. Where half of the replies of a
round are not finite, or x or y suddenly goes a hundred times as far as ever before, it
takes that up again, halves the steps of the lower level and quarters those of x: an x
too fast for y and z is the other reason why runs explode, and halving all steps alike
would not cure that.

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
from fedbilevel._types import Pair

__all__ = ["MOST", "Guard"]

MOST = 30  # times that steps are halved before a run is given up
_EVERY = 10  # rounds between two kept states
_MANY = 0.5  # of the replies of a round
_FAR = 100.0  # times as far as ever before
_CREEP = 1.05  # by which the farthest may grow in a round, and still be usual


class Guard(eqx.Module):
    """What to go back to, what is usual, and what has happened.

    `older` and `recent` are kept states, `usual` how far x and y have gone from the
    recent one, `trouble` the share of replies of this round that were not finite,
    `replaced` counts the rounds that left a reply out, `halvings` how often steps were
    halved, after which `rounds`.
    """

    older: PyTree
    recent: PyTree
    usual: Float[Array, " 2"]
    trouble: Float[Array, ""]
    replaced: Int[Array, ""]
    halvings: Int[Array, ""]
    rounds: Int[Array, " most"]

    @staticmethod
    def of(state: PyTree) -> "Guard":
        """Begin with nothing usual."""
        none, rounds = jnp.zeros((), jnp.int32), jnp.zeros(MOST, jnp.int32)
        usual, trouble = jnp.zeros(2, jnp.float32), jnp.zeros((), jnp.float32)
        return Guard(state, state, usual, trouble, none, none, rounds)

    def judged(self, state: PyTree, moved: Pair, index: Any) -> tuple[PyTree, "Guard"]:
        """Return the state to go on from after a round, and what to remember.

        `moved` is how far x and y are from the recent state, None what does not count.
        """
        index = jnp.asarray(index, jnp.int32)
        far = jnp.stack([_size(moved.x), _size(moved.y)]).astype(self.usual.dtype)
        settled = index >= _EVERY
        exploded = settled & jnp.any((far > _FAR * self.usual) & (self.usual > 0))
        bad = exploded | (self.trouble >= _MANY) | ~_tree.all_finite(state)
        bad &= self.halvings < MOST
        state = _tree.select(bad, self.older, state)
        return state, self._after(state, far, settled, bad, index)

    def _after(
        self,
        state: PyTree,
        far: Array,
        settled: Array,
        bad: Bool[Array, ""],
        index: Array,
    ) -> "Guard":
        usual = jnp.where(
            settled & (self.usual > 0), jnp.minimum(far, _CREEP * self.usual), far
        )
        due = (index % _EVERY == _EVERY - 1) & ~bad
        recent = _tree.select(due | bad, state, self.recent)
        place = jnp.minimum(self.halvings, MOST - 1)
        return Guard(
            _tree.select(due, self.recent, self.older),
            recent,
            jnp.where(bad, self.usual, jnp.maximum(self.usual, usual)),
            jnp.zeros_like(self.trouble),
            self.replaced + (self.trouble > 0).astype(jnp.int32),
            self.halvings + bad.astype(jnp.int32),
            jnp.where(bad, self.rounds.at[place].set(index + 1), self.rounds),
        )

    def told(self) -> list[str]:
        """Say in words what happened."""
        told = [
            f"after round {int(when)} the run exploded: it went back by 10 to 20 "
            "rounds, and on with half the steps, and a quarter of those of x"
            for when in self.rounds[: int(self.halvings)]
        ]
        if int(self.replaced):
            told.append(
                f"in {int(self.replaced)} rounds replies that were not finite were "
                "left out"
            )
        return told


def _size(block: PyTree) -> Array:
    return _tree.norm(block) if block is not None else jnp.zeros(())
