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
dx floats up; down, to clients that keep what they were sent, 2 (dx + 2 dy): where the
last u was evaluated is sent, too.

Reference: Li, Gu, Huang, arXiv 2112.04660 (AAAI 2022).
Deviations: updates as in a public benchmark, whose first direction starts from zeros;
here it is evaluated. z starts at 0.
"""

from dataclasses import replace
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
    kept_differences,
    sampled,
    slope_with_z,
    stepped,
    system_slope,
    upper_slope,
)
from fedbilevel.schedules import Schedule, count, number, schedule, weight

__all__ = ["FSLA"]


class FSLA(AbstractAlgorithm):
    """Steps of y, z and x in turn; that of x along a STORM direction."""

    reference: ClassVar[str] = "Li, Gu, Huang 2022, arXiv 2112.04660"
    provenance: ClassVar[str] = "updates read in a public benchmark"
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
        w = Triple(x, y, _tree.zeros_like(y))
        u = Triple(_tree.zeros_like(x), None, None)
        return Path(w, previous=w, direction=u)

    def phases(self) -> Phases:
        """Return the iterations of a round."""
        lower = sampled("lower", slope_with_z, with_turn(self.moved))
        system = sampled("system", system_slope, with_turn(self.moved))
        up = with_turn(self.upper_step)
        upper = kept_differences("upper", upper_slope, self.kept, up)
        return (Repeat(self.local_steps, (lower, system, upper)),)

    def kept(self, t: Any) -> Triple:
        """Return what u keeps of itself: nothing at t = 0."""
        weight = momentum_weight(self.alpha, self.a, t, 1)
        return Triple(1 - weight, None, None)

    def moved(self, server: Path, D: Triple, turn: ServerTurn) -> Path:
        """Move what has a direction."""
        a = at_time(self.a, turn.index, self.lr_x)
        steps = Triple(self.lr_x * a, self.lr_y * a, self.lr_z * a)
        return replace(server, point=stepped(server.point, steps, D))

    def upper_step(self, server: Path, fresh: Triple, turn: ServerTurn) -> Path:
        """Correct u, and move x."""
        kept = self.kept(turn.index).x
        u = Triple(_tree.add_scaled(fresh.x, kept, server.direction.x), None, None)
        moved = self.moved(server, u, turn)
        return Path(moved.point, previous=server.point, direction=u)
