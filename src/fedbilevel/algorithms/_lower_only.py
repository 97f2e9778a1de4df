"""What the methods that leave x where it is share: local steps on y alone."""

from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float

from fedbilevel._types import Key, Pair
from fedbilevel.algorithms._parts import lower_slope
from fedbilevel.algorithms._single_loop import AbstractSingleLoop, Directions, Order
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_number

__all__ = ["AbstractLowerOnly"]


class AbstractLowerOnly(AbstractSingleLoop):
    """Steps of length `lr` on y at the given x."""

    answers: ClassVar[str] = "shared y, x fixed"

    lr: Float[Array, "..."] = eqx.field(converter=as_number)

    def order(self) -> Order:
        """Return y alone."""
        return (("y",),)

    def directions(self, oracle: Oracle, key: Key) -> Directions:
        """Draw zeta; return grad_y g_k with it."""
        return lower_slope(oracle, key)

    def step(self, t: Any) -> Pair:
        """Return the step of y."""
        del t
        return Pair(None, self.lr)
