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
with constant steps and alpha = 0.1; of the paper the abstract was read.
"""

from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Triple, Upper
from fedbilevel.algorithms.base import (
    AbstractAlgorithm,
    Phases,
    Repeat,
    ServerTurn,
    with_turn,
)
from fedbilevel.algorithms.one_loop import at_time, momentum_weight
from fedbilevel.algorithms.one_machine._path import (
    ITERATIONS,
    Path,
    all_directions,
    sampled,
    stepped,
)
from fedbilevel.schedules import Schedule, count, number, schedule, weight

__all__ = ["MASOBA"]


class MASOBA(AbstractAlgorithm):
    """Steps on x, y and z at once; that of x along a moving average."""

    reference: ClassVar[str] = "Chen, Xiao, Balasubramanian 2024, arXiv 2306.12067"
    provenance: ClassVar[str] = "abstract and two programs of others read"
    answers: ClassVar[str] = "single machine"
    pools: ClassVar[bool] = True

    lr_x: Number = number("x moves by lr_x a u", step="upper")
    lr_y: Number = number("y moves by lr_y a D_y", step="lower")
    lr_z: Number = number("z moves by lr_z a D_z", step="lower")
    alpha: Number = weight("upper", "u forgets by alpha a a step", over="a")
    a: Schedule = schedule("common shape of steps and weight over t", default=1.0)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start at (x, y, 0); u is formed at t = 0."""
        u = Triple(_tree.zeros_like(x), None, None)
        return Path(Triple(x, y, _tree.zeros_like(y)), direction=u)

    def phases(self) -> Phases:
        """Return the iterations of a round."""
        step = sampled("step", all_directions, with_turn(self.moved))
        return (Repeat(self.local_steps, (step,)),)

    def step(self, t: Any) -> Triple:
        """Return the steps of x, y and z."""
        a = at_time(self.a, t, self.lr_x)
        return Triple(self.lr_x * a, self.lr_y * a, self.lr_z * a)

    def moved(self, server: Path, D: Triple, turn: ServerTurn) -> Path:
        """Average the direction of x, and move."""
        weight = momentum_weight(self.alpha, self.a, turn.index, 1)
        kept = _tree.scale(1 - weight, server.direction.x)
        u = _tree.add_scaled(kept, weight, D.x)
        w = stepped(server.point, self.step(turn.index), Triple(u, D.y, D.z))
        return Path(w, direction=Triple(u, None, None))
