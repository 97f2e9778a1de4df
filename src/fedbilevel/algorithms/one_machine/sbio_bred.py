r"""SBiO-BreD: one lower step and one mirror step of x at once, with an l1 term.

    v = gy(x_t, y_t; zeta),   u = h(x_t, y_t; b)
    y <- y - lr_y b_t v
    x <- argmin_x <u, x> + l1 ||x||_1 + D_psi(x, x_t) / lr_x        (`_mirror.py`)

h is one random term of the Neumann series, Q times as long. b_t is any schedule, for
the steps of y alone. If psi = ||x||^2 / 2 and l1 = 0, x <- x - lr_x u.

On K clients u and v are averaged at every iteration, each client inverting its own
Hessian: right only for clients that are alike. 1 exchange an iteration, with dx + dy
floats each way.

Reference: Huang, Li, Gao, Huang, arXiv 2107.12301 (NeurIPS 2022).
Deviations: h is the l1 norm, x is not constrained. The measured upper loss omits l1.
"""

from fedbilevel.algorithms import Number, Pair, ServerTurn
from fedbilevel.algorithms.one_machine._mirror import L1, PSI, PSIS, SQUARE, Mirrored
from fedbilevel.algorithms.one_machine._path import ITERATIONS, ByBundle, Path, stepped
from fedbilevel.hypergradient import RandomNeumann
from fedbilevel.schedules import Schedule, count, number, schedule, step, word

__all__ = ["SBiOBreD"]


class SBiOBreD(Mirrored, ByBundle):
    """A lower step and a mirror step of x at once."""

    reference = "Huang et al. 2022, arXiv 2107.12301"
    provenance = "listing read in the paper"
    rule = RandomNeumann

    lr_x: Number = step("upper", "step of x, gamma")
    lr_y: Number = step("lower", "y moves by lr_y b v", over="b")
    b: Schedule = schedule("shape of y's steps over t, eta", default=1.0)
    l1: Number = number(L1, default=0.0)
    psi: str = word(PSI, PSIS, default=SQUARE, kw_only=True)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def taken(self, server: Path, D: Pair, turn: ServerTurn) -> Path:
        """Move y, and make the mirror step of x."""
        w = stepped(server.point, self.step(turn.index), Pair(None, D.y))
        return self.mirrored(server, w, D.x)
