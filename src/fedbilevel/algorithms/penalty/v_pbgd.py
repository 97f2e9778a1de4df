r"""V-PBGD: a penalty on how far g is from its minimum, and a joint step of x and y.

Minimizes f(x, y) + gam (g(x, y) - min_w g(x, w)). At every iteration, with samples xi
and zeta, c = min(1/gam, 1), and gradients of g(x, w) in x alone:

    T_in times:  w <- w - lr_w gy(x, w; .)
    y <- y - lr_y c (fy(x, y; xi) + gam gy(x, y; zeta))            at the old point, as
    x <- x - lr_x c (fx(x, y; xi) + gam (gx(x, y; zeta) - gx(x, w; zeta)))

gam may rise from gam / `rise` to gam in its first `rise` iterations. w is reported: y
is trained on f, too. The limit is that of F2SA (`fedbilevel.algorithms.presets`) with
1/nu = gam: it is F2SA with y_l moved together with x, and w for y_s. As w is a step
ahead of y, gam multiplies what x moved in between: x must be slow, and c sees to it.

A step: T_in + 3 gradients of g and one of f. On K clients slopes are averaged at every
step, which is right where clients differ: T_in + 1 exchanges an iteration, with
(T_in + 1) dy + dx floats up.

Reference: Shen, Chen, arXiv 2302.05185 (ICML 2023; Mathematical Programming 2025).
Deviations: updates as in the authors' program. One lower sample serves y and w in the
step of x.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Number, Repeat, Turn, both_samples, evaluate
from fedbilevel.algorithms.one_machine._path import OneMachine, at_point, sampled
from fedbilevel.algorithms.penalty._copies import Copied, Copies
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number, step

__all__ = ["VPBGD"]


class VPBGD(OneMachine, Copied):
    """Lower steps on w, then a joint step of x and y with a penalty on g(y) - g(w)."""

    reference = "Shen, Chen 2023, arXiv 2302.05185"
    provenance = "the authors' program read"
    needs_hessian = False

    lr_x: Number = number("step of x", step="upper")
    lr_y: Number = number("step of y", step="lower")
    lr_w: Number = step("lower", "step of w")
    gam: Number = number("penalty", default=10.0, above=0.0)
    inner_steps: int = count("steps of w for each of x, T_in", default=1, kw_only=True)
    rise: int = count(
        "steps of x in which gam rises to its value", default=1, kw_only=True
    )
    local_steps: int = count("steps of x in a round", default=1, kw_only=True)

    def phases(self):
        """Return the iterations of a round."""
        below = Repeat(self.inner_steps, (sampled("lower", slope_of_w, self.moved()),))
        return self.repeated(below, at_point("step", self.joint, self.moved()))

    def step(self, t):
        """Return the steps of x, w and y."""
        return Copies(self.lr_x, self.lr_w, self.lr_y)

    def gam_at(self, t: Any) -> Array:
        """Return gam_t."""
        share = (jnp.asarray(t, self.gam.dtype) + 1) / self.rise
        return self.gam * jnp.minimum(share, 1)

    def joint(self, w: Copies, client: None, oracle: Oracle, turn: Turn):
        """Return the directions of x and y."""
        gam, samples = self.gam_at(turn.index), both_samples(oracle, turn.keys(1)[0])
        c, nu = jnp.minimum(1 / gam, 1), 1 / gam
        h = evaluate(self.scheme.slope_of_x(oracle, nu, *samples))(w).x
        # The slope of a copy is (fy + gam gy) / gam.
        slope = self.scheme.slopes(oracle, nu, *samples).z(w)
        return client, Copies(_tree.scale(c, h), None, _tree.scale(c * gam, slope))


def slope_of_w(oracle: Oracle, key: Key) -> Any:
    """Draw zeta; return the map of gy(x, w)."""
    zeta = oracle.draw_lower(key)
    return lambda w: Copies(None, oracle.lower_gradient(w.x, w.y, zeta), None)
