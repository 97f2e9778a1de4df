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

from typing import ClassVar

from fedbilevel._types import Number, Pair
from fedbilevel.algorithms.base import ServerTurn, with_turn
from fedbilevel.algorithms.one_machine._mirror import L1, PSI, PSIS, SQUARE, Mirrored
from fedbilevel.algorithms.one_machine._path import (
    ITERATIONS,
    Path,
    both_directions,
    sampled,
    stepped,
)
from fedbilevel.algorithms.parts import at_time
from fedbilevel.hypergradient import AbstractHypergradient, RandomNeumann
from fedbilevel.schedules import Schedule, count, number, part, schedule, step, word

__all__ = ["SBiOBreD"]


class SBiOBreD(Mirrored):
    """A lower step and a mirror step of x at once."""

    reference: ClassVar[str] = "Huang et al. 2022, arXiv 2107.12301"
    provenance: ClassVar[str] = "listing read in the paper"
    rule: ClassVar[type[AbstractHypergradient]] = RandomNeumann

    hypergradient: AbstractHypergradient = part("the estimate of grad Phi")
    lr_x: Number = number("step of x, gamma", step="upper")
    lr_y: Number = step("lower", "y moves by lr_y b v", over="b")
    b: Schedule = schedule("shape of y's steps over t, eta", default=1.0)
    l1: Number = number(L1, default=0.0)
    psi: str = word(PSI, PSIS, default=SQUARE, kw_only=True)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)

    def phases(self):
        """Return the iterations of a round."""
        draw = both_directions(self.hypergradient)
        return self.repeated(sampled("step", draw, with_turn(self.both_steps)))

    def both_steps(self, server: Path, d: Pair, turn: ServerTurn) -> Path:
        """Move y, and make the mirror step of x."""
        lr_y = self.lr_y * at_time(self.b, turn.index, self.lr_y)
        w = stepped(server.point, Pair(None, lr_y), Pair(None, d.y))
        return self.mirrored(server, w, d.x)
