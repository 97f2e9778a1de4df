r"""AmIGO: loops of warm-started steps on y and on z, then one step of x.

For every outer iteration, with samples of their own for each line:

    T_in times:  y <- y - lr_y gy(x, y; .)
    N_z times:   z <- z - lr_z (hvp(x, y; .)[z] - fy(x, y; .))
    x <- x - lr_x (fx(x, y; .) - jvp(x, y; .)[z])

z starts where the last outer iteration left it, as y does. With T_in = N_z = 1 it is
FedBiO (`fedbio`) in alternating order.

A round: p outer iterations. On K clients slopes are averaged at every step, which is
right where clients differ: T_in + N_z + 1 exchanges an outer iteration, with (T_in +
N_z) dy + dx floats up; down, to clients that keep what they were sent, as many.

Reference: Arbel, Mairal, arXiv 2111.14580 (ICLR 2022).
Deviations: updates as in a public benchmark; steps are constant. z starts at 0.
"""

from typing import ClassVar

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Triple, Upper
from fedbilevel.algorithms.base import AbstractAlgorithm, Phases, Repeat
from fedbilevel.algorithms.one_machine._path import (
    Path,
    sampled,
    slope_with_z,
    stepped,
    system_slope,
    upper_slope,
)
from fedbilevel.schedules import count, number

__all__ = ["AmIGO"]


class AmIGO(AbstractAlgorithm):
    """Loops of steps on y and on z, warm-started, then a step of x."""

    reference: ClassVar[str] = "Arbel, Mairal 2022, arXiv 2111.14580"
    provenance: ClassVar[str] = "updates read in a public benchmark"
    answers: ClassVar[str] = "single machine"
    pools: ClassVar[bool] = True

    lr_x: Number = number("x moves by lr_x D_x", step="upper")
    lr_y: Number = number("y moves by lr_y D_y", step="lower")
    lr_z: Number = number("z moves by lr_z D_z", step="lower")
    inner_steps: int = count("steps of y for each of x, T_in", default=5, kw_only=True)
    system_steps: int = count("steps of z for each of x, N_z", default=5, kw_only=True)
    local_steps: int = count("steps of x in a round", default=1, kw_only=True)

    def init_server(self, x: Upper, y: Lower) -> Path:
        """Start at (x, y, 0)."""
        return Path(Triple(x, y, _tree.zeros_like(y)))

    def phases(self) -> Phases:
        """Return the outer iterations of a round."""
        below = Repeat(self.inner_steps, (sampled("lower", slope_with_z, self.moved),))
        system = sampled("system", system_slope, self.moved)
        upper = sampled("upper", upper_slope, self.moved)
        order = (below, Repeat(self.system_steps, (system,)), upper)
        return (Repeat(self.local_steps, order),)

    def moved(self, server: Path, D: Triple) -> Path:
        """Move what has a direction."""
        steps = Triple(self.lr_x, self.lr_y, self.lr_z)
        return Path(stepped(server.point, steps, D))
