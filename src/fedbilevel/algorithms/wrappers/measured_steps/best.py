"""The best point that was measured: the one with the least upper loss.

Of a minimax problem, and of one whose y begins too well, the upper loss rises from the
start while y comes to y*(x), and the first point would be the best. Where the loss did
not fall first, and the lower level is solved much better in the end, the last point is
the result.
"""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedbilevel import _tree
from fedbilevel._types import Pair
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import UNKNOWN

_SOLVED = 0.5  # of the slope of the lower level that was measured first
_ALIKE = 0.01  # of the descent to the best point
_FELL = 0.05  # of the rise after it


class Best(eqx.Module):
    """A point, its round and upper loss, and the loss and slope measured first."""

    point: Pair
    round: Int[Array, ""]
    loss: Float[Array, ""]
    first: Float[Array, ""]
    slope: Float[Array, ""]

    @staticmethod
    def of(point: Pair) -> "Best":
        """Begin with nothing measured."""
        most = jnp.full((), UNKNOWN, jnp.float32)
        return Best(point, jnp.zeros((), jnp.int32), most, most, most)

    def seen(self, point: Pair, columns: dict[str, Array], done: Array) -> "Best":
        """Return the better of this and what was measured after so many rounds.

        Sites of a federation may measure the loss alone, or nothing.
        """
        if "upper_loss" not in columns:
            return self
        loss = jnp.asarray(columns["upper_loss"], jnp.float32)
        slope = jnp.asarray(columns.get("lower_gradient_norm", UNKNOWN), jnp.float32)
        new = self.first == UNKNOWN
        known = replace(
            self,
            first=jnp.where(new & jnp.isfinite(loss), loss, self.first),
            slope=jnp.where(new & jnp.isfinite(slope), slope, self.slope),
        )
        here = replace(
            known, point=point, round=jnp.asarray(done, jnp.int32), loss=loss
        )
        return _tree.select(loss < self.loss, here, known)

    def is_better_than(self, loss: float, slope: float) -> bool:
        """Say whether it is clearly better than the last point, of this loss."""
        best, first = float(self.loss), float(self.first)
        if loss <= best + _ALIKE * max(first - best, 0):
            return False
        fell = not first - best <= _FELL * (loss - best)
        return fell or not slope < _SOLVED * float(self.slope)
