r"""Fed-F2SA: local steps along gradients alone, with a penalty in place of a Hessian.

Client k at every local iteration, samples xi, zeta and zeta', lam = 1/nu:

    y_l <- y_l - lr_y (nu fy_k(x, y_l; xi) + gy_k(x, y_l; zeta))
    y_s <- y_s - lr_y gy_k(x, y_s; zeta)
    x   <- x - lr_x (fx_k(x, y_l; xi) + lam (gx_k(x, y_l; zeta') - gx_k(x, y_s; zeta')))
    every p iterations:  x, y_l, y_s <- mean over clients

This is degree 1, whose limit is O(nu) away from the solution. The reported y is y_s,
which is trained at x without a penalty. Higher degrees have other copies of y and
weights (`penalty/_copies.py`). Degree 2 costs the same and is O(nu^2) away:

    y_+- <- y_+- - lr_y (+- nu fy_k(x, y_+-; xi) + gy_k(x, y_+-; zeta))
    x    <- x - lr_x ((fx_k(x, y_+; xi) + fx_k(x, y_-; xi)) / 2
                      + (lam/2) (gx_k(x, y_+; zeta') - gx_k(x, y_-; zeta')))

where (y_+ + y_-)/2 is reported. Orders 3 and 4 have four copies.

No inverse is averaged, so the limit does not change where clients differ (p = 1), up to
a drift of order lr p (p > 1), of which `controls` or an `anchor` leave nothing
(`fedbilevel.algorithms.wrappers.drift`).

Exchanges a round: 1, with dx + 2 dy floats each way (dx + 4 dy from degree 3 on). A
step: two gradients of g for each copy, and two of f for each that has a penalty, which
are the same unless blocks move in turn.

Reference: Kwon, Kwon, Wright, Nowak, arXiv 2301.10945 (ICML 2023), for F2SA;
arXiv 2509.02937 (ICLR 2026) for higher degrees.
Deviations: the federated form is ours. nu is constant. All lines use the old point. The
wrapper `alternating` moves the copies of y, then x, at the client's own fresh values.
Its limit is biased where clients differ, also for p = 1, unless `controls` or an
`anchor` correct it. All copies start at y.
"""

import jax.random as jr

from fedbilevel._blocks import combine
from fedbilevel.algorithms.one_loop import OneLoop
from fedbilevel.algorithms.penalty._copies import NU, OfDegree
from fedbilevel.schedules import Number, count, number, step

__all__ = ["FedF2SA"]


class FedF2SA(OneLoop, OfDegree):
    """Local steps on x and two copies of y by gradients alone, averaged."""

    reference = "Kwon et al. 2023, arXiv 2301.10945; arXiv 2509.02937"
    provenance = "ours: a known method made federated"
    needs_hessian = False

    lr_x: Number = step("upper", "x moves by lr_x h")
    lr_y: Number = step("lower", "copies of y move by lr_y times their slopes")
    nu: Number = number(NU, default=0.01, above=0.0)
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    degree: int = count(
        "power of nu in the bias: 1 to 4; 3 and 4 have four copies of y",
        default=1,
        kw_only=True,
    )

    @property
    def moves(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of x and of all copies."""
        return ("x", *self.scheme.names)

    def in_turn(self):
        """Move the copies together, then x."""
        return (self.scheme.names, ("x",))

    def directions(self, oracle, key, t):
        """Draw xi, zeta and zeta'; return the maps of h and of the copies' slopes."""
        for_xi, for_y, for_x = jr.split(key, 3)
        xi, scheme = oracle.draw_upper(for_xi), self.scheme
        below = scheme.slopes(oracle, self.nu, xi, oracle.draw_lower(for_y))
        above = scheme.slope_of_x(oracle, self.nu, xi, oracle.draw_lower(for_x))
        return combine(above, below)
