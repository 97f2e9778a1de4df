r"""BVR-L-SGD on the lower level at the given x: an anchor, and one client's iterate.

    min_y  1/K sum_k g_k(x, y),   x fixed

Round, with S a cohort of clients:

    anchor:  v = mean over S of the mean of B samples of gy_k(x, y; .)
    client k from y, with the same sample zeta at both points:
        y_k = w_k = y,  v_k = v;  p times:
            v_k <- v_k + gy_k(x, y_k; zeta) - gy_k(x, w_k; zeta)
            w_k = y_k,    y_k <- y_k - lr v_k
    server:  y <- y_k of one client k of S, drawn at random

The first difference is zero: a client begins along the anchor, and corrects it by how
its own slope changes (SARAH). Its error is the difference of the clients' Hessians
times the distance it went. It vanishes near the minimizer, so there is no drift in
the limit. One iterate is as good as their mean and has no mean's bias where g_k is not
convex.

Exchanges a round: 2, with dy floats up each, and dy and 2 dy floats down. x is sent
once. A local step evaluates gy twice, the anchor B times.

Reference: Murata, Suzuki, arXiv 2102.03198 (ICML 2021).
Deviations: the abstract was read, and the updates in a public catalogue. There every
round begins with a large batch, as it does here. Clients are drawn, and weighted in the
anchor, as their data are (`ClientData.weights`), equally by default.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Lower, Number, Pair, Upper, base
from fedbilevel.algorithms.one_machine._path import sampled, slope
from fedbilevel.algorithms.parts import Iterate, local_steps, move
from fedbilevel.estimators import Storm
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number

__all__ = ["BVRLSGD"]


class BVRLSGD(base.AbstractAlgorithm):
    """SARAH on y at the given x from the mean slope; one client's y is kept."""

    reference = "Murata, Suzuki 2021, arXiv 2102.03198"
    provenance = "abstract and a catalogue of others read"
    answers = "shared y, x fixed"
    allows_private = False

    lr: Number = number("y moves by lr v", step="lower")
    large_batch: int = count("samples of a client's slope at the anchor, B", default=10)
    local_steps: int = count("local steps of a round, p", kw_only=True)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y). The first round forms v."""
        return Iterate(Pair(x, y), Pair(None, _tree.zeros_like(y)))

    def phases(self) -> base.Phases:
        """Return the exchange of slopes, and the local steps with one client's end."""

        def anchored(server: Iterate, v: Pair) -> Iterate:
            return Iterate(server.point, v)

        anchor = sampled("anchor", slope, anchored, self.large_batch)
        up, known = base.with_turn(self.picked), lambda sent: Pair(None, sent.point.y)
        local = base.Phase("local", lambda s: s, self.local, up, known, gathers=True)
        return anchor, local

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: base.Turn):
        """Make p local steps on y, from the anchor's v."""
        x, y = message.point.x, message.point.y
        forgets = jnp.zeros_like(self.lr)  # nothing: STORM is SARAH then

        def iterate(carry: tuple[Lower, Lower, Lower], time: tuple[Any, Key]):
            (y_k, v, before), (_, key) = carry, time
            zeta = oracle.draw_lower(key)
            v, _ = Storm()(
                lambda y: oracle.lower_gradient(x, y, zeta), y_k, before, v, forgets
            )
            return move(y_k, self.lr, v), v, y_k

        start = (y, message.direction.y, y)
        y_k, _, _ = local_steps(iterate, start, turn, self.local_steps)
        return client, Pair(None, y_k)

    def picked(
        self, server: Iterate, gathered: base.Gathered, turn: base.ServerTurn
    ) -> Iterate:
        """Continue from the y of one client that took part."""
        one = jr.categorical(turn.shared, jnp.log(gathered.weights))
        y = jax.tree.map(lambda leaf: leaf[one], gathered.replies.y)
        return Iterate(Pair(server.point.x, y), server.direction)
