r"""MA-SOBA: SOBA with a moving average of the direction of x.

With D_x, D_y, D_z of SOBA (`soba`), one sample for each level,
all at the old point:

    u_t = (1 - alpha a_{t-1}) u_{t-1} + alpha a_{t-1} D_x,      u_0 = D_x
    y <- y - lr_y a_t D_y,   z <- z - lr_z a_t D_z,   x <- x - lr_x a_t u_t

Averaging x alone suffices for the rate of one level, and no third derivative of g need
exist: steps and weight are of one order, T^(-1/2). With alpha = a = 1 it is SOBA.

A step costs SOBA's. On K clients directions are averaged at every iteration (p = 1),
which is right where clients differ, with SOBA's exchanges: u stays on the server.

Reference: Chen, Xiao, Balasubramanian, arXiv 2306.12067 (JMLR 2024).
Deviations: the listing was read in public programs of others, which start at u = 0,
with constant steps and alpha = 0.1. Of the paper the abstract was read.
"""

from fedbilevel import _tree
from fedbilevel.algorithms import Number, ServerTurn, Triple
from fedbilevel.algorithms.one_machine._path import ITERATIONS, Path, WithZ
from fedbilevel.schedules import Schedule, count, schedule, weight

__all__ = ["MASOBA"]


class MASOBA(WithZ):
    """Steps on x, y and z at once; that of x along a moving average."""

    reference = "Chen, Xiao, Balasubramanian 2024, arXiv 2306.12067"
    provenance = "abstract and two programs of others read"

    alpha: Number = weight("upper", "u forgets by alpha a a step", over="a")
    a: Schedule = schedule("common shape of steps and weight over t", default=1.0)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def init_server(self, x, y):
        """Start at (x, y, 0); u is formed at t = 0."""
        u = Triple(_tree.zeros_like(x), None, None)
        return Path(self.variables(x, y), direction=u)

    def taken(self, server: Path, D: Triple, turn: ServerTurn) -> Path:
        """Average the direction of x, and move."""
        weight = self.weight(turn.index).x
        kept = _tree.scale(1 - weight, server.direction.x)
        u = _tree.add_scaled(kept, weight, D.x)
        moved = super().taken(server, Triple(u, D.y, D.z), turn)
        return Path(moved.point, direction=Triple(u, None, None))
