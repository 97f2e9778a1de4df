r"""SOBA: plain steps on x, y and the linear-system variable z, on one machine.

At every iteration, with one lower sample zeta and one upper sample xi:

    D_y = gy(x, y; zeta),   D_z = hvp(x, y; zeta)[z] - fy(x, y; xi)
    D_x = fx(x, y; xi) - jvp(x, y; zeta)[z]
    y <- y - lr_y a_t D_y,   z <- z - lr_z a_t D_z,   x <- x - lr_x a_t D_x

all three from the old point. a_t is any schedule; the paper's steps fall as T^(-2/5)
(y and z) and T^(-3/5) (x), and its code's as (t + 1)^(-1/2).

A step: one gradient of each level, one Hessian and one cross product. On K clients the
directions are averaged at every iteration (p = 1), which is right where clients differ:
1 exchange an iteration, with dx + 2 dy floats each way. That is FedBiO
(`fedbio`) at p = 1, with one sample for each level.

Reference: Dagreou, Ablin, Vaiter, Moreau, arXiv 2201.13409 (NeurIPS 2022).
Deviations: z has the opposite sign of the authors' code, and starts at 0.
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
from fedbilevel.algorithms.one_loop import at_time
from fedbilevel.algorithms.one_machine._path import (
    ITERATIONS,
    Path,
    all_directions,
    sampled,
    stepped,
)
from fedbilevel.schedules import Schedule, count, number, schedule

__all__ = ["SOBA"]


class SOBA(AbstractAlgorithm):
    """Plain steps on x, y and z, all at once."""

    reference: ClassVar[str] = "Dagreou et al. 2022, arXiv 2201.13409"
    provenance: ClassVar[str] = "listing read in the paper"
    answers: ClassVar[str] = "single machine"
    pools: ClassVar[bool] = True

    lr_x: Number = number("x moves by lr_x a D_x", step="upper")
    lr_y: Number = number("y moves by lr_y a D_y", step="lower")
    lr_z: Number = number("z moves by lr_z a D_z", step="lower")
    a: Schedule = schedule("common shape of the steps over t", default=1.0)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start at (x, y, 0)."""
        return Path(Triple(x, y, _tree.zeros_like(y)))

    def phases(self) -> Phases:
        """Return the iterations of a round."""
        step = sampled("step", all_directions, with_turn(self.moved))
        return (Repeat(self.local_steps, (step,)),)

    def step(self, t: Any) -> Triple:
        """Return the steps of x, y and z."""
        a = at_time(self.a, t, self.lr_x)
        return Triple(self.lr_x * a, self.lr_y * a, self.lr_z * a)

    def moved(self, server: Path, D: Triple, turn: ServerTurn) -> Path:
        """Move x, y and z along D."""
        return Path(stepped(server.point, self.step(turn.index), D))
