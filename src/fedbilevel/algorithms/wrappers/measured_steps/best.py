"""The best point that was measured, among those whose y is solved as well as others.

A point takes the place of the best one if its upper loss is lower, or if the lower
level is solved better there by a factor of 2: before y is near y*(x) the upper loss
says little of x, and of a minimax problem it rises while y is on its way.
"""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedbilevel import _tree
from fedbilevel._types import Pair

_SOLVED = 0.5  # of the slope of the lower level at the best point
_ALIKE = 0.01  # of the descent to the best point


class Best(eqx.Module):
    """A point, its round, upper loss and lower slope, and the loss measured first."""

    point: Pair
    round: Int[Array, ""]
    loss: Float[Array, ""]
    slope: Float[Array, ""]
    first: Float[Array, ""]

    @staticmethod
    def of(point: Pair) -> "Best":
        """Begin with nothing measured."""
        most = jnp.full((), jnp.inf, jnp.float32)
        return Best(point, jnp.zeros((), jnp.int32), most, most, most)

    def seen(self, point: Pair, columns: dict[str, Array], done: Array) -> "Best":
        """Return the better of this and what was measured after so many rounds."""
        loss = jnp.asarray(columns["upper_loss"], jnp.float32)
        slope = jnp.asarray(columns["lower_gradient_norm"], jnp.float32)
        first = jnp.where(jnp.isfinite(self.first), self.first, loss)
        here = Best(point, jnp.asarray(done, jnp.int32), loss, slope, first)
        is_better = (loss < self.loss) | (slope < _SOLVED * self.slope)
        is_better &= jnp.isfinite(loss)
        return _tree.select(is_better, here, replace(self, first=first))

    def is_better_than(self, loss: float) -> bool:
        """Say whether it is clearly better than the point with this loss."""
        best, first = float(self.loss), float(self.first)
        return not loss <= best + _ALIKE * max(first - best, 0)
