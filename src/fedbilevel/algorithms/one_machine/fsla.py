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

from fedbilevel import _tree
from fedbilevel.algorithms import Number, Triple
from fedbilevel.algorithms.one_machine import _path
from fedbilevel.schedules import Schedule, count, schedule, weight

__all__ = ["FSLA"]


class FSLA(_path.WithZ):
    """Steps of y, z and x in turn; that of x along a STORM direction."""

    reference = "Li, Gu, Huang 2022, arXiv 2112.04660"
    provenance = "updates read in a public benchmark"

    alpha: Number = weight("upper", "u forgets by alpha a a step", over="a")
    a: Schedule = schedule("common shape of steps and weight over t", default=1.0)
    local_steps: int = count(_path.ITERATIONS, default=1, kw_only=True)

    def init_server(self, x, y):
        """Start at (x, y, 0); u is formed at t = 0."""
        w, u = self.variables(x, y), Triple(_tree.zeros_like(x), None, None)
        return _path.Path(w, previous=w, direction=u)

    def phases(self):
        """Return the iterations of a round."""
        lower = _path.sampled("lower", _path.slope, self.moved())
        system = _path.sampled("system", _path.system_slope, self.moved())
        upper = _path.recursive(
            "upper", _path.upper_slope, self.remembered, self.kept, ("x",)
        )
        return self.repeated(lower, system, upper)
