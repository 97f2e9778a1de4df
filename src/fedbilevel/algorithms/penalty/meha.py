r"""MEHA: a single loop without a Hessian, by the Moreau envelope of the lower level.

v(x, y) = min_th g(x, th) + (gamma/2) ||th - y||^2 is at most g(x, y), and equal to it
where y is stationary. Client k at every local iteration:

    th <- th - eta (gy_k(x, th; zeta) + gamma (th - y))
    y  <- y - lr_y (fy_k(x, y; xi) / c_t + gy_k(x, y; zeta) - gamma (y - th))
    x  <- x - lr_x (fx_k(x, y; xi') / c_t + gx_k(x, y; zeta') - gx_k(x, th; zeta'))
    c_t = c0 (t + 1)^power
    every p iterations:  x, y, th <- mean over clients

which are steps along f / c_t + g - v, th tracking the minimum. g may be nonconvex,
where gamma is more than its curvature downwards. The limit is off by about 1/c, so c is
large, or grows. x moves by lr_x / c_t along a direction that is close to a
hypergradient: if steps are given as effective ones, lr_x is c0 times the step of x.
With eta = lr_y both pulls cancel in y - th, which then follows f / c alone from the
first step on, with little noise of zeta. With other steps x first moves in a wrong
direction.

All lines are linear in the clients' functions: with p = 1 the limit where clients
differ is that of one machine, and p > 1 adds a drift of order lr p. th is reported as
y, since it is nearer to the minimum of g: y is held above it by f.

Exchanges a round: 1, with dx + 2 dy floats each way. A step: two gradients of f, four
of g, and no products.

Reference: Liu, Liu, Yao, Zeng, Zhang, arXiv 2405.09927 (ICML 2024); with clients MeFBO.
Deviations: the listing was read in a program of others. There th moves first, then y,
then x, each at fresh values, as with `alternating=True`. Here all three move from the
old point, because a client's own fresh values would bias the limit where clients
differ. The power is 1/4, of a range (0, 1/2) that is from memory. th starts at y.
"""

from typing import Any

import jax.numpy as jnp
import jax.random as jr

from fedbilevel import _tree
from fedbilevel.algorithms import Lower, Number, OneLoop, Pair, Triple, Upper
from fedbilevel.schedules import count, number, step
from fedbilevel.units import OfDistance

__all__ = ["MEHA"]


def _times_c0(value: Any, made: Any) -> Any:
    # Directions are c0 times shorter than a hypergradient, as a measured step sees.
    return value if isinstance(value, OfDistance) else value * made.get("c0", 100.0)


class MEHA(OneLoop):
    """Steps along f / c and the gap of g above its Moreau envelope, averaged."""

    reference = "Liu et al. 2024, arXiv 2405.09927"
    provenance = "a program of others read; the power is unverified"
    moves = ("x", "y", "z")

    lr_x: Number = step(
        "upper",
        "x moves by lr_x (fx / c + gx - gx at th)",
        convert=_times_c0,
        after=("c0",),
    )
    lr_y: Number = step("lower", "y moves by lr_y (fy / c + gy - pull)")
    eta: Number = step("auxiliary", "th moves by eta (gy + pull)")
    c0: Number = number(
        "how much more g weighs than f at t = 0", default=100.0, above=0.0
    )
    power: Number = number("of t + 1, by which c grows", default=0.25)
    gamma: Number = number("strength of the pull of th to y", default=1.0, above=0.0)
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def variables(self, x, y):
        """Start at (x, y), with th = y as the third block."""
        return Triple(x, y, y)

    def in_turn(self):
        """Move th, then y, then x."""
        return (("z",), ("y",), ("x",))

    def point(self, server):
        """Return the averaged x and th."""
        return Pair(server.point.x, server.point.z)

    def directions(self, oracle, key, t):
        """Draw samples for each line; return the maps of D_x, D_y and D_th."""
        c = self.c0 * (jnp.asarray(t, self.c0.dtype) + 1) ** self.power
        *uppers, for_y, for_x = jr.split(key, 4)
        xi_y, xi_x = map(oracle.draw_upper, uppers)
        # One zeta for th and y: their difference, not they, is what x follows.
        zeta_y, zeta_x = map(oracle.draw_lower, (for_y, for_x))

        def pulled(w: Triple, slope: Lower) -> Lower:
            return _tree.add_scaled(slope, self.gamma, _tree.subtract(w.z, w.y))

        def D_th(w: Triple) -> Lower:
            return pulled(w, oracle.lower_gradient(w.x, w.z, zeta_y))

        def D_y(w: Triple) -> Lower:
            _, fy = oracle.upper_gradients(w.x, w.y, xi_y)
            slope = pulled(w, oracle.lower_gradient(w.x, w.y, zeta_y))
            return _tree.add_scaled(slope, 1 / c, fy)

        def D_x(w: Triple) -> Upper:
            fx, _ = oracle.upper_gradients(w.x, w.y, xi_x)
            gx, _ = oracle.lower_gradients(w.x, w.y, zeta_x)
            gx_th, _ = oracle.lower_gradients(w.x, w.z, zeta_x)
            return _tree.add_scaled(_tree.subtract(gx, gx_th), 1 / c, fx)

        return Triple(D_x, D_y, D_th)
