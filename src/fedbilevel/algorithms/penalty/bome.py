r"""BOME: steps on x and y at once, that bring g down as fast as its gap asks for.

For every iteration, y_s a temporary copy that starts at the current y:

    y_s = y;   T times:  y_s <- y_s - alpha gy(x, y_s; zeta_i)
    F = (fx, fy)(x, y; xi),   q = (gx(x, y; zeta) - gx(x, y_s; zeta), gy(x, y; zeta))
    m = max(phi - <F, q>, 0) / (||q||^2 + small),    phi = eta ||q||^2
    x <- x - lr_x (fx + m q_x),   y <- y - lr_y (fy + m q_y)

q is the gradient of g(x, y) - g(x, y_s) with y_s held: without a Hessian, and without a
penalty to choose. Both gx have one sample, so that its noise falls with y - y_s. y is
reported.

F, q and the slope of each of the T steps are means over the clients. The server forms m
of these means, which is exact where clients differ. The mean of the clients' own m is
not.

The answer is as good as y_s: with a quadratic g of curvature h in y, (1 - alpha h)^T of
the distance to its minimum is left, and the second term of the hypergradient is by this
share too short in the limit. There F + m q = 0, so that `small` ends the growth of m at
(eta ||F||^2 / small)^(1/3). Steps are to be below about 2 / (m L), with L the curvature
of g: with longer ones m stays near 2 / (lr L), and x and y wander.

An iteration: T + 2 gradients of g, one of f; T + 1 exchanges, with T dy + 2 (dx + dy)
floats up and dx + (T + 2) dy down.

Reference: Ye, Liu, Wright, Stone, Liu, arXiv 2209.08709 (NeurIPS 2022).
Deviations: the paper has one step for x and y, and for phi also eta times the gap of g
itself. It has no clients and no samples.
"""

from collections.abc import Callable

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Number, Pair, Repeat, Triple, both_samples
from fedbilevel.algorithms.one_machine import _path
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number, step

__all__ = ["BOME"]


class BOME(_path.EachStep):
    """Joint steps of x and y along f, and along g as far as its gap asks for."""

    reference = "Ye et al. 2022, arXiv 2209.08709"
    provenance = "the authors' program read; clients are ours"
    allows_private = False
    moves = ("x", "y", "z")  # z is y_s

    lr_x: Number = step("upper", "x moves by lr_x (fx + m q_x)")
    lr_y: Number = step("lower", "y moves by lr_y (fy + m q_y)")
    alpha: Number = step("auxiliary", "y_s moves by alpha gy")
    inner_steps: int = count("steps of y_s, T", default=10)
    eta: Number = number("share of ||q||^2 that g must fall by", default=0.5, above=0.0)
    small: Number = number("added to ||q||^2", default=1e-8, above=0.0)
    local_steps: int = count(_path.ITERATIONS, default=1, kw_only=True)

    def variables(self, x, y):
        """Start at (x, y), with y_s = y as the third block."""
        return Triple(x, y, y)

    def phases(self):
        """Return the iterations of a round."""
        lower = _path.sampled("lower", slope_of_copy, self.moved())
        step = _path.sampled("step", both_gradients, self.joint)
        return self.repeated(Repeat(self.inner_steps, (lower,)), step)

    def joint(self, server: _path.Path, reply: tuple[Pair, Pair]) -> _path.Path:
        """Move x and y, and let y_s start there."""
        F, q = reply
        size = _tree.dot(q, q)
        phi = jnp.asarray(self.eta, size.dtype) * size
        m = jnp.maximum(phi - _tree.dot(F, q), 0)
        m = m / (size + jnp.asarray(self.small, size.dtype))
        along = _tree.add_scaled(F, m, q)
        w = _path.stepped(server.point, self.step(0), along)
        return _path.Path(Triple(w.x, w.y, w.y))


def slope_of_copy(oracle: Oracle, key: Key) -> Callable[[Triple], Triple]:
    """Draw zeta; return the map of gy at y_s."""
    zeta = oracle.draw_lower(key)
    return lambda w: Triple(None, None, oracle.lower_gradient(w.x, w.z, zeta))


def both_gradients(oracle: Oracle, key: Key) -> Callable[[Triple], tuple[Pair, Pair]]:
    """Draw xi and zeta; return the map of F and q."""
    xi, zeta = both_samples(oracle, key)

    def F_and_q(w: Triple) -> tuple[Pair, Pair]:
        fx, fy = oracle.upper_gradients(w.x, w.y, xi)
        gx, gy = oracle.lower_gradients(w.x, w.y, zeta)
        gx_s, _ = oracle.lower_gradients(w.x, w.z, zeta)
        return Pair(fx, fy), Pair(_tree.subtract(gx, gx_s), gy)

    return F_and_q
