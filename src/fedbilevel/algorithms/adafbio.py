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
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body; "x <- x + eta (x_tmp - x)" is written as the step that it is. The authors' code of
VR-BiAdam has `coordinatewise`, tau = 0.99, eta = 1, an A and a B that begin at 0, and
sqrt(A + r). With fewer than K participants a client that missed the last round takes
the received point as its previous one. With `own_lower` every client keeps its y, v and
B, and inverts the right Hessian, its own; whether the paper means that was not found.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Turn
from fedbilevel.algorithms._local import (
    Iterate,
    Memory,
    at_time,
    check_counts,
    evaluate,
    hypergradient_and_slope,
    local_steps,
    momentum_weight,
    move,
    no_memory,
    previous_point,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.estimators import Storm
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import (
    Schedule,
    choice,
    count,
    is_known,
    number,
    part,
    schedule,
)

__all__ = ["AdaFBiO"]


class Scaled(eqx.Module):
    """The iterate with its directions, and what they are divided by: A and B."""

    point: Pair
    direction: Pair
    scale: Pair


class AdaFBiO(AbstractAlgorithm):
    """STORM on both levels, steps scaled by what the server has seen of them."""

    reference: ClassVar[str] = "Huang 2022, arXiv 2211.01122"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"
    inverts_locally: ClassVar[bool] = True

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi")
    eta: Schedule = schedule("common step of x and y, or its schedule")
    gamma: Number = number("x moves by gamma eta u / (sqrt(A) + r)", step="upper")
    lam: Number = number("y moves by lam eta v / (B + r)", step="lower")
    c1: Number = number("u forgets by c1 eta^2 a step")
    c2: Number = number("v forgets by c2 eta^2 a step")
    tau: Number = number("what A and B keep in a round", default=0.9)
    r: Number = number("is added to what steps are divided by", default=0.1)
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    coordinatewise: bool = choice("scale every number of y by its own", default=False)
    own_lower: bool = choice("every client keeps a y of its own", default=False)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        if not (is_known(self.tau) and is_known(self.r)):
            return
        if not (0 <= float(self.tau) < 1 and float(self.r) > 0):
            raise InvalidInputError(
                f"`AdaFBiO(tau={float(self.tau):g}, r={float(self.r):g})`: tau must be "
                "at least 0 and below 1, and r above 0, or a step divides by 0."
            )

    def private_blocks(self) -> Pair:
        """Keep y, v and B on their client, if asked to."""
        return Pair(False, self.own_lower)

    def init_server(self, x: Upper, y: Lower) -> Scaled:
        """Start at (x, y), where the scales are measured before the first round."""
        nothing = _tree.zeros_like(Pair(x, y))
        return Scaled(Pair(x, y), nothing, self.seen(nothing))

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without a usable previous point."""
        return no_memory(Pair(x, y))

    def setup(self) -> Phases:
        """Return the exchange that measures the first scales."""

        def up(server: Scaled, mean: Pair) -> Scaled:
            return Scaled(server.point, server.direction, self.seen(mean))

        return (Phase("first_directions", lambda s: s.point, self.first, up),)

    def phases(self) -> Phases:
        """Return the one exchange of a round."""

        def about(sent: Scaled) -> Iterate:
            return Iterate(sent.point, sent.direction)

        def up(server: Scaled, mean: Iterate) -> Scaled:
            scale = self.followed(server.scale, self.seen(mean.direction))
            return Scaled(mean.point, mean.direction, scale)

        return (Phase("local", lambda s: s, self.local, up, about, moves=True),)

    def point(self, server: Scaled) -> Pair:
        """Return the averaged iterate."""
        return server.point

    def step(self, t: Any) -> Pair:
        """Return gamma eta_t and lam eta_t."""
        eta = at_time(self.eta, t, self.gamma)
        return Pair(self.gamma * eta, self.lam * eta)

    def weight(self, t: Any) -> Pair:
        """Return c1 eta_{t-1}^2 and c2 eta_{t-1}^2, and 1 at t = 0."""
        letters = (self.c1, self.c2)
        return Pair(*(momentum_weight(c, self.eta, t, 2) for c in letters))

    def seen(self, direction: Pair) -> Pair:
        """Return u^2, and ||v|| in the place of every leaf of v, or v^2."""
        x = jax.tree.map(jnp.square, direction.x)
        if self.coordinatewise:
            return Pair(x, jax.tree.map(jnp.square, direction.y))
        size = _tree.norm(direction.y)
        return Pair(x, jax.tree.map(lambda leaf: size.astype(leaf.dtype), direction.y))

    def followed(self, scale: Pair, seen: Pair) -> Pair:
        """Return A and B after an average."""

        def follow(old: Array, new: Array) -> Array:
            tau = self.tau.astype(old.dtype)
            return tau * old + (1 - tau) * new

        return jax.tree.map(follow, scale, seen)

    def divided(self, direction: Pair, scale: Pair) -> Pair:
        """Return the directions over A and B."""

        def by_root(d: Array, s: Array) -> Array:
            return d / (jnp.sqrt(s) + self.r.astype(d.dtype))

        def by_size(d: Array, s: Array) -> Array:
            return d / (s + self.r.astype(d.dtype))

        below = by_root if self.coordinatewise else by_size
        return Pair(
            jax.tree.map(by_root, direction.x, scale.x),
            jax.tree.map(below, direction.y, scale.y),
        )

    def first(self, point: Pair, memory: Memory, oracle: Oracle, turn: Turn):
        """Return directions at the start."""
        (key,) = turn.keys(1)
        maps = hypergradient_and_slope(self.hypergradient, oracle, key)
        return memory, evaluate(maps)(point)

    def local(self, sent: Scaled, memory: Memory, oracle: Oracle, turn: Turn):
        """Make p local steps."""

        def iterate(carry: tuple[Pair, Pair, Pair], time: tuple[Any, Key]) -> PyTree:
            (w, d, before), (t, key) = carry, time
            G = evaluate(hypergradient_and_slope(self.hypergradient, oracle, key))
            d = Storm()(G, w, before, d, self.weight(t))
            return move(w, self.step(t), self.divided(d, sent.scale)), d, w

        start = (sent.point, sent.direction, previous_point(sent.point, memory, turn))
        w, d, before = local_steps(iterate, start, turn, self.local_steps)
        return Memory(before, jnp.asarray(turn.index, jnp.int32)), Iterate(w, d)
