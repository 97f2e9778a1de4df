"""What methods of one loop share: the blocks that move, and their directions."""

from typing import Any, ClassVar

from fedbilevel.algorithms.directions import (
    hypergradient_and_slope,
    lower_slope,
    three_directions,
    with_z,
)
from fedbilevel.algorithms.one_loop import OneLoop
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.schedules import part


class ByHypergradient(OneLoop):
    """Moves x along the client's own hypergradient, y along its lower slope."""

    inverts_locally: ClassVar[bool] = True

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi")

    def directions(self, oracle, key, t):
        """Return h_k(.; b_t) and gy_k(.; zeta_t)."""
        return hypergradient_and_slope(self.hypergradient, oracle, key)


class ByLinearSystem(OneLoop):
    """Moves x, y and the linear-system variable z, which starts at 0."""

    moves: ClassVar[Any] = ("x", "y", "z")

    def variables(self, x, y):
        """Start at (x, y, 0)."""
        return with_z(x, y)

    def directions(self, oracle, key, t):
        """Return the maps nu, omega and q."""
        return three_directions(oracle, key)


class ByLowerSlope(OneLoop):
    """Moves y alone, along its lower slope, at the x that is given."""

    answers: ClassVar[str] = "shared y, x fixed"
    moves: ClassVar[Any] = ("y",)

    def directions(self, oracle, key, t):
        """Return gy_k(.; zeta)."""
        return lower_slope(oracle, key)
