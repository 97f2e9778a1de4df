r"""ASBiO-BreD: SPIDER on both levels, with a mirror step of x and an l1 term.

    u_t, v_t = means of B samples of h(w_t; b), gy(w_t; zeta)          if t mod q = 0
    u_t = u_{t-1} + h(w_t; b) - h(w_{t-1}; b)                          else,
    v_t = v_{t-1} + gy(w_t; zeta) - gy(w_{t-1}; zeta)
    y <- y - lr_y v_t
    x <- argmin_x <u_t, x> + l1 ||x||_1 + D_psi(x, x_t) / lr_x         (`_mirror.py`)

with w = (x, y) and one bundle at both points, its random length among it: h is one
random term of the Neumann series, Q times as long. A round is one period. With q = 1
and B = 1 it is SBiO-BreD (`sbio-bred`).

On K clients u and v are averaged at every iteration, each client inverting its own
Hessian: right only for clients that are alike. q exchanges a round, with dx + dy floats
up each, and as many down with a large batch. Other exchanges send twice as many down,
for both points.

Reference: Huang, Li, Gao, Huang, arXiv 2107.12301 (NeurIPS 2022).
Deviations: h is the l1 norm, x is not constrained, steps of y are constant. The
measured upper loss omits l1.
"""

from fedbilevel.algorithms import Number, Pair, Repeat, ServerTurn
from fedbilevel.algorithms.one_machine import _path
from fedbilevel.algorithms.one_machine._mirror import L1, PSI, PSIS, SQUARE, Mirrored
from fedbilevel.hypergradient import RandomNeumann
from fedbilevel.schedules import count, number, step, word

__all__ = ["ASBiOBreD"]


class ASBiOBreD(Mirrored, _path.Recursive, _path.ByBundle):
    """SPIDER on both levels, with a mirror step of x."""

    reference = "Huang et al. 2022, arXiv 2107.12301"
    provenance = "listing read in the paper"
    rule = RandomNeumann

    lr_x: Number = step("upper", "step of x, gamma")
    lr_y: Number = step("lower", "y moves by lr_y v")
    l1: Number = number(L1, default=0.0)
    period: int = count("iterations from one large batch to the next, q", default=10)
    large_batch: int = count("batches of the run in a large one, B", default=10)
    psi: str = word(PSI, PSIS, default=SQUARE, kw_only=True)

    def phases(self):
        """Return the iteration with a large batch, and those after it."""
        large, step = self.exchanges()
        return large, Repeat(self.period - 1, (step,))

    def remembered(self, server: _path.Path, d: Pair, turn: ServerTurn) -> _path.Path:
        """Move y, and make the mirror step of x."""
        w = _path.stepped(server.point, self.step(turn.index), Pair(None, d.y))
        return self.mirrored(server, w, d.x, previous=server.point, direction=d)
