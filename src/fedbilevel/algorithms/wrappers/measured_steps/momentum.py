r"""Momentum for y and z while they keep moving in one direction.

Steps of a share of 1/L1 take some L1/mu of them along the direction that curves least,
and x has to wait for that. With v_r where a block, y or z, is after round r, and u_r
where the next one begins (Nesterov's steps, begun anew as in arXiv 1204.3982):

    m_r = v_r - v_(r-1),   s_r = v_r - u_(r-1)       the move, and the steps in it
    a_r = a_(r-1) + max(1/r, 1/50) (cos(s_r, m_(r-1)) - a_(r-1))
    u_r = v_r + min(t/(t + 3), c) m_r,               c = 1 if a_r > 0.9, else a_r
    t   = 0 where s_r'm_r < 0, a_r <= 0.5 or r <= 10, else t + 1

so that some sqrt(L1/mu) steps do, and mu need not be known. The agreement a_r is how
alike steps are from round to round. Where batches or cohorts make them differ it is far
below 0.5, u_r is v_r, and the method follows its listing. Between, steps repeat
themselves some 1/(1 - a_r) times, and momentum of more than that would add up noise.
After a rollback, all of this begins anew.
"""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedbilevel import _tree
from fedbilevel._types import AbstractBlocks, Lower, Triple

_BEGUN, _NEWEST = 10, 0.02  # rounds without momentum, and the least weight of a cosine
_AGREE, _FULLY = 0.5, 0.9  # of the mean cosine


class _Block(eqx.Module):
    """The state of one block: its agreement, the rounds in it, and t."""

    agreement: Array
    seen: Array
    rounds: Array

    def factor(self) -> Array:
        """Return min(t/(t + 3), c)."""
        free = self.agreement > _FULLY
        most = jnp.where(free, 1.0, jnp.maximum(self.agreement, 0.0))
        return jnp.minimum(self.rounds / (self.rounds + 3), most)

    def after(self, cosine: Array, ahead: Bool[Array, ""]) -> "_Block":
        """Take in the cosine of a round, and whether its steps went along its move."""
        seen = self.seen + 1
        weight = jnp.maximum(1 / seen, _NEWEST)
        agreement = self.agreement + weight * (cosine - self.agreement)
        goes_on = (agreement > _AGREE) & (seen > _BEGUN) & ahead
        return _Block(agreement, seen, jnp.where(goes_on, self.rounds + 1, 0))


class Momentum(eqx.Module):
    """Where y and z came to in the last round, by what moves, and what is known."""

    reached: Triple
    move: Triple
    known: tuple[_Block, _Block]

    @staticmethod
    def of(point: AbstractBlocks | None) -> "Momentum | None":
        """Begin without momentum. Return None for a method without y and z."""
        if not isinstance(point, Triple):
            return None
        here, none = Triple(None, point.y, point.z), jnp.zeros((), jnp.float32)
        new = _Block(none, none, none)
        return Momentum(here, _tree.zeros_like(here), (new, new))

    def speed(self) -> Array:
        """Return how many times as fast as without it y may be."""
        factor = self.known[0].factor()
        return 1 / (1 - factor)

    def pushed(
        self, at: Triple, returned: Bool[Array, ""]
    ) -> tuple[Triple, "Momentum"]:
        """Return u_r after v_r, which is `at`, and what to remember.

        A run that returned to an earlier state is left there.
        """
        parts = (at.y, at.z), (self.reached.y, self.reached.z)
        moved = map(_pushed, *parts, (self.move.y, self.move.z), self.known)
        (y, move_y, of_y), (z, move_z, of_z) = moved
        reached, move = Triple(None, at.y, at.z), Triple(None, move_y, move_z)
        fresh = Momentum(reached, *_tree.zeros_like((move, self.known)))
        after = Momentum(reached, move, (of_y, of_z))
        point = _tree.select(returned, at, replace(at, y=y, z=z))
        return point, _tree.select(returned, fresh, after)


def _pushed(
    here: Lower, before: Lower, last: Lower, known: _Block
) -> tuple[Lower, Lower, _Block]:
    """Return u_r of one block, m_r, and what is known of it."""
    move = _tree.subtract(here, before)
    # From u_(r-1), which was v_(r-1) and a share of the move before.
    steps = _tree.add_scaled(move, -known.factor(), last)
    cosine = _tree.cosine(steps, last).astype(jnp.float32)
    after = known.after(cosine, _tree.dot(steps, move) >= 0)
    return _tree.add_scaled(here, after.factor(), move), move, after
