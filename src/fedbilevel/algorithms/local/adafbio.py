r"""AdaFBiO: STORM on both levels, with steps scaled by what the server has seen.

Client k at local iteration t, with ONE bundle b_t and ONE zeta_t used at both points:

    a_t = c1 eta_{t-1}^2,   e_t = c2 eta_{t-1}^2
    u_t = (1 - a_t) (u_{t-1} - h_k(x_{t-1}, y_{t-1}; b_t)) + h_k(x_t, y_t; b_t)
    v_t = (1 - e_t) (v_{t-1} - gy_k(x_{t-1}, y_{t-1}; zeta_t)) + gy_k(x_t, y_t; zeta_t)
    x_{t+1} = x_t - gamma eta_t u_t / (sqrt(A) + r)          coordinate by coordinate
    y_{t+1} = y_t - lam eta_t v_t / (B + r)                  B is one number
    if (t+1) mod p == 0:  u_t, v_t, x_{t+1}, y_{t+1} <- mean over clients, and
        A <- tau A + (1 - tau) u_t^2,     B <- tau B + (1 - tau) ||v_t||

A and B are the server's, sent to all and left alone between two averages: every client
divides by the same numbers, so that the mean of their steps is a step along the mean
direction. They begin with the clients' mean directions at the start, A = u^2 and
B = ||v||. With `coordinatewise` y is scaled as x is, B <- tau B + (1 - tau) v_t^2 and
v_t / (sqrt(B) + r). h_k is the stochastic Neumann hypergradient.

A step is gamma eta at most where a direction is long, and gamma eta / r times as long
as the direction where that is short: for r to infinity, with gamma / r and lam / r
fixed, this is LocalBSGVRM. On the command line gamma and lam follow from `upper_step`
and `lower_step`, times r: x moves by upper_step u where u is far below r, and by less
elsewhere. With a small r the steps are Adam's, and gamma is to be given.

Exchanges a round: 1, with 2 (dx + dy) floats up, and dx + 1 more down (dx + dy if
`coordinatewise`). One exchange of dx + dy floats before the first round. Samples and
oracle calls as LocalBSGVRM. Right for clients whose data are alike, as LocalBSGVRM: a
client inverts its own Hessian.

Reference: Huang, arXiv 2211.01122. With K = 1 it is VR-BiAdam (arXiv 2106.11396).
Deviations: the listing is a reconstruction. The paper's abstract was read, not its
body. "x <- x + eta (x_tmp - x)" is written as the step that it is. The authors' code of
VR-BiAdam has `coordinatewise`, tau = 0.99, eta = 1, an A and a B that begin at 0, and
sqrt(A + r). With fewer than K participants a client that missed the last round takes
the received point as its previous one. With the wrapper `own_lower` every client keeps
its y, v and B, and inverts the right Hessian: its own. It is not known whether the
paper means that.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel.algorithms import Number, Pair, Part, Phase, evaluate
from fedbilevel.algorithms.local._bases import ByHypergradient
from fedbilevel.estimators import Storm
from fedbilevel.schedules import Schedule, choice, count, number, schedule, step, weight

__all__ = ["AdaFBiO"]


# Divided by r at least, a step is no longer than the one that was asked for.
BY_R: dict[str, Any] = {
    "over": "eta",
    "convert": lambda value, made: value * made.get("r", 0.1),
    "after": ("r",),
}


class ServerScale(Part):
    """A and B: the server's averages of what the mean directions were."""

    tau: Any = number("what A and B keep in a round")
    r: Any = number("added to what steps are divided by")
    coordinatewise: bool = choice("scale every number of y by its own", default=False)

    def shared(self, start):
        """Return zeros for A and B."""
        return self.seen(_tree.zeros_like(start.point))

    def setup(self, method, place):
        """Return the exchange that measures the first A and B."""

        def local(point, memory, oracle, turn):
            (key,) = turn.keys(1)
            return memory, evaluate(method.directions(oracle, key, 0))(point)

        def up(server, mean):
            return server.sharing(place, self.seen(mean))

        return (Phase("first_directions", lambda server: server.point, local, up),)

    def begun(self, begin, shared, own):
        """Return A and B."""
        return shared

    def scaled(self, state, d):
        """Return u / (sqrt(A) + r) and v / (B + r), or v / (sqrt(B) + r)."""

        def by(root: Callable, d: PyTree, seen: PyTree) -> PyTree:
            def one(d: Array, s: Array) -> Array:
                return d / (root(s) + self.r.astype(d.dtype))

            return None if d is None else jax.tree.map(one, d, seen)

        below = jnp.sqrt if self.coordinatewise else lambda size: size
        return Pair(by(jnp.sqrt, d.x, state.x), by(below, d.y, state.y))

    def taken(self, shared, answer, server, turn):
        """Return tau A + (1 - tau) u^2, and B likewise."""

        def follow(old: Array, new: Array) -> Array:
            tau = self.tau.astype(old.dtype)
            return tau * old + (1 - tau) * new

        return jax.tree.map(follow, shared, self.seen(server.direction))

    def seen(self, direction: Pair) -> Pair:
        """Return u^2, and ||v|| in the place of every leaf of v, or v^2."""
        x = jax.tree.map(jnp.square, direction.x)
        if self.coordinatewise:
            return Pair(x, jax.tree.map(jnp.square, direction.y))
        size = _tree.norm(direction.y)
        return Pair(x, jax.tree.map(lambda leaf: size.astype(leaf.dtype), direction.y))


class AdaFBiO(ByHypergradient):
    """STORM on both levels, steps scaled by what the server has seen of them."""

    reference = "Huang 2022, arXiv 2211.01122"
    provenance = "abstract read; listing reconstructed, unverified"
    estimator = Storm()

    eta: Schedule = schedule("common step of x and y, or its schedule")
    gamma: Number = step("upper", "x moves by gamma eta u / (sqrt(A) + r)", **BY_R)
    lam: Number = step("lower", "y moves by lam eta v / (B + r)", **BY_R)
    c1: Number = weight("upper", "u forgets by c1 eta^2", over="eta", power=2)
    c2: Number = weight("lower", "v forgets by c2 eta^2", over="eta", power=2)
    tau: Number = number("what A and B keep a round", default=0.9, least=0.0, below=1.0)
    r: Number = number("added to what steps are divided by", default=0.1, above=0.0)
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    coordinatewise: bool = choice("scale every number of y by its own", default=False)

    def parts(self):
        """Divide directions by A and B."""
        return (ServerScale(self.tau, self.r, self.coordinatewise),)
