r"""AmIGO: loops of warm-started steps on y and on z, then one step of x.

For every outer iteration, with samples of their own for each line:

    T_in times:  y <- y - lr_y gy(x, y; .)
    N_z times:   z <- z - lr_z (hvp(x, y; .)[z] - fy(x, y; .))
    x <- x - lr_x (fx(x, y; .) - jvp(x, y; .)[z])

z starts where the last outer iteration left it, as y does. With T_in = N_z = 1 it is
FedBiO (`fedbio`) in alternating order.

A round: p outer iterations. On K clients slopes are averaged at every step, which is
right where clients differ: T_in + N_z + 1 exchanges an outer iteration, with (T_in +
N_z) dy + dx floats up, and as many down to clients that keep what they were sent.

Reference: Arbel, Mairal, arXiv 2111.14580 (ICLR 2022).
Deviations: updates as in a public benchmark, which draws one upper sample an outer
iteration: its fy serves all N_z steps, its fx the step of x. Here every step draws its
own. Steps are constant. z starts at 0.
"""

from fedbilevel.algorithms.base import Repeat
from fedbilevel.algorithms.one_machine import _path
from fedbilevel.schedules import count

__all__ = ["AmIGO"]


class AmIGO(_path.WithZ):
    """Loops of steps on y and on z, warm-started, then a step of x."""

    reference = "Arbel, Mairal 2022, arXiv 2111.14580"
    provenance = "updates read in a public benchmark"

    inner_steps: int = count("steps of y for each of x, T_in", default=5, kw_only=True)
    system_steps: int = count("steps of z for each of x, N_z", default=5, kw_only=True)
    local_steps: int = count("steps of x in a round", default=1, kw_only=True)

    def phases(self):
        """Return the outer iterations of a round."""
        lower = _path.sampled("lower", _path.slope, self.moved())
        system = _path.sampled("system", _path.system_slope, self.moved())
        upper = _path.sampled("upper", _path.upper_slope, self.moved())
        loops = Repeat(self.inner_steps, (lower,)), Repeat(self.system_steps, (system,))
        return self.repeated(*loops, upper)
