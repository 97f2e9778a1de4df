r"""FSLA: one step of y, of z and of x in turn, with STORM on x alone.

At every iteration, with samples of their own for each line, at fresh values:

    y <- y - lr_y a_t gy(x, y; .)
    z <- z - lr_z a_t (hvp(x, y; .)[z] - fy(x, y; .))
    u_t = D_x(w_t; s_t) + (1 - alpha a_{t-1}) (u_{t-1} - D_x(w_{t-1}; s_t)),  u_0 = D_x
    x <- x - lr_x a_t u_t

with D_x = fx - jvp[z], one sample s_t at both points, w_t = (x, y, z) as they are when
the third line is reached, and w_{t-1} as they were one iteration before. In the
benchmark that was read a_t falls as (t + 1)^(-1/2). With alpha = a = 1 it is FedBiO
(`fedbio`) in alternating order.

A step: two upper gradients and cross products more than FedBiO. On K clients each line
is averaged, which is right where clients differ: 3 exchanges an iteration, with 2 dy +
dx floats up, and 2 (dx + 2 dy) down to clients that keep what they were sent. The point
at which the last u was evaluated is sent, too.

Reference: Li, Gu, Huang, arXiv 2112.04660 (AAAI 2022).
Deviations: updates as in a public benchmark, whose first direction starts from zeros.
Here it is evaluated. z starts at 0.
"""

from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._types import Number, Triple
from fedbilevel.algorithms.base import ServerTurn, with_turn
from fedbilevel.algorithms.directions import with_z
from fedbilevel.algorithms.one_machine._path import (
    ITERATIONS,
    Path,
    WithShape,
    differences,
    sampled,
    slope,
    stepped,
    system_slope,
    upper_slope,
)
from fedbilevel.algorithms.parts import momentum_weight
from fedbilevel.schedules import Schedule, count, schedule, weight

__all__ = ["FSLA"]


class FSLA(WithShape):
    """Steps of y, z and x in turn; that of x along a STORM direction."""

    reference: ClassVar[str] = "Li, Gu, Huang 2022, arXiv 2112.04660"
    provenance: ClassVar[str] = "updates read in a public benchmark"

    alpha: Number = weight("upper", "u forgets by alpha a a step", over="a")
    a: Schedule = schedule("common shape of steps and weight over t", default=1.0)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def init_server(self, x, y):
        """Start at (x, y, 0); u is formed at t = 0."""
        w = with_z(x, y)
        return Path(w, previous=w, direction=Triple(_tree.zeros_like(x), None, None))

    def phases(self):
        """Return the iterations of a round."""
        lower = sampled("lower", slope, self.moved())
        system = sampled("system", system_slope, self.moved())
        up = with_turn(self.upper_step)
        upper = differences("upper", upper_slope, up, self.kept)
        return self.repeated(lower, system, upper)

    def kept(self, t: Any) -> Triple:
        """Return what u keeps of itself: nothing at t = 0."""
        return Triple(1 - momentum_weight(self.alpha, self.a, t, 1), None, None)

    def upper_step(self, server: Path, fresh: Triple, turn: ServerTurn) -> Path:
        """Correct u, and move x."""
        kept = self.kept(turn.index).x
        u = Triple(_tree.add_scaled(fresh.x, kept, server.direction.x), None, None)
        w = stepped(server.point, self.step(turn.index), u)
        return Path(w, previous=server.point, direction=u)
