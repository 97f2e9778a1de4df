r"""Momentum for y and z while they keep moving in one direction.

Steps of a share of 1/L1 take some L1/mu of them along the direction that curves least,
and x has to wait for that. With v_r where a block, y or z, is after round r, and u_r
where the next one begins (Nesterov's steps, begun anew as in arXiv 1204.3982):

    m_r = v_r - v_(r-1)
    u_r = v_r + t/(t + 3) m_r
    t   = 0 where (v_r - u_(r-1))'m_r < 0 or the agreement is below 0.9, else t + 1

so that some sqrt(L1/mu) steps do, and mu need not be known. The agreement is the usual
cosine between m_r and m_(r-1), of the last 50 rounds or so. Where batches or cohorts
make moves differ it is far below 0.9, u_r is v_r, and the method follows its listing.
After a rollback, all of this begins anew.
"""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedbilevel import _tree
from fedbilevel._types import AbstractBlocks, Lower, Triple

_AGREE, _NEWEST = 0.9, 0.02  # of a cosine, and the weight of the newest one


class _Block(eqx.Module):
    """The state of one block: its agreement, and t."""

    agreement: Array
    rounds: Array

    def factor(self) -> Array:
        """Return t/(t + 3)."""
        return self.rounds / (self.rounds + 3)


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
        new = _Block(none, none)
        return Momentum(here, _tree.zeros_like(here), (new, new))

    def speed(self) -> Array:
        """Return how many times as fast as without it y may be."""
        return 1 + self.known[0].rounds / 3

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
    cosine = _tree.cosine(move, last).astype(jnp.float32)
    agreement = known.agreement + _NEWEST * (cosine - known.agreement)
    # From u_(r-1), which was v_(r-1) and a share of the move before.
    gone = _tree.add_scaled(move, -known.factor(), last)
    goes_on = (agreement > _AGREE) & (_tree.dot(gone, move) >= 0)
    after = _Block(agreement, jnp.where(goes_on, known.rounds + 1, 0))
    return _tree.add_scaled(here, after.factor(), move), move, after
