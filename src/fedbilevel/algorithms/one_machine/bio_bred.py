r"""BiO-BreD: unrolled lower steps, then a mirror step of x with an l1 term.

For every outer iteration, from the y of the last one (a warm start):

    y^0 = y;   T times:  y^{i+1} = y^i - lr_y gy(x, y^i; zeta_i)
    u = d/dx f(x, y^T(x); xi),  through all T steps;    y <- y^T
    x <- argmin_x <u, x> + l1 ||x||_1 + D_psi(x, x_t) / lr_x        (`_mirror.py`)

with psi = ||x||^2 / 2, or one that follows the squares of u. With psi = ||x||^2 / 2 and
l1 = 0 the last line is x <- x - lr_x u.

A round: p outer iterations. On K clients u and y are averaged at every one of them,
each client unrolling steps of its own: right only for clients that are alike. 1
exchange an outer iteration, with dx + dy floats each way.

Reference: Huang, Li, Gao, Huang, arXiv 2107.12301 (NeurIPS 2022).
Deviations: the paper's method is deterministic. This one is with
`Sampling(batch=None)`, and otherwise draws samples. h is the l1 norm. x is not
constrained. The measured upper loss omits l1.
"""

from typing import Any

import jax

from fedbilevel import _tree
from fedbilevel.algorithms import Lower, Number, Pair, Turn
from fedbilevel.algorithms.one_machine._mirror import L1, PSI, PSIS, SQUARE, Mirrored
from fedbilevel.algorithms.one_machine._path import Path, at_point
from fedbilevel.hypergradient import Unrolled
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import count, number, word

__all__ = ["BiOBreD"]


class BiOBreD(Mirrored):
    """Unrolled lower steps, then a mirror step of x."""

    reference = "Huang et al. 2022, arXiv 2107.12301"
    provenance = "listing read in the paper"

    lr_x: Number = number("step of x, gamma", step="upper")
    lr_y: Number = number("step of y, lambda", step="lower")
    l1: Number = number(L1, default=0.0)
    inner_steps: int = count("lower steps for each step of x, T", default=5)
    psi: str = word(PSI, PSIS, default=SQUARE, kw_only=True)
    local_steps: int = count("steps of x in a round", default=1, kw_only=True)

    def check(self, curvature: float, client: int) -> None:
        """Raise if the lower steps move away from the minimum."""
        Unrolled(self.inner_steps, self.lr_y).check(curvature, client)

    def phases(self):
        """Return the outer iterations of a round."""
        return self.repeated(at_point("step", self.local, self.both_steps))

    def local(self, w: Pair, client: Any, oracle: Oracle, turn: Turn):
        """Return u, and how far y moves."""
        rule = Unrolled(self.inner_steps, self.lr_y)
        xi, zetas = rule.draw(oracle, turn.keys(1)[0])

        def descend(y: Lower, zeta: Batch) -> tuple[Lower, None]:
            slope = oracle.lower_gradient(w.x, y, zeta)
            return _tree.add_scaled(y, -self.lr_y, slope), None

        u = rule(oracle, w.x, w.y, (xi, zetas))
        y, _ = jax.lax.scan(descend, w.y, zetas)
        return client, Pair(u, _tree.subtract(y, w.y))

    def both_steps(self, server: Path, reply: Pair) -> Path:
        """Take y, and make the mirror step of x."""
        w = Pair(server.point.x, _tree.add(server.point.y, reply.y))
        return self.mirrored(server, w, reply.x)
