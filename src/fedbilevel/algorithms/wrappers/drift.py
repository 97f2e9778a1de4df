r"""Corrections that keep local steps of clients that differ from drifting apart.

A method of one loop moves along samples G_k(w; s) of its directions. Corrected, all
clients move along the mean direction of where they start together:

    controls (SCAFFOLD):  G_k(w; s) - c_k + c
        c_k <- mean over the p local steps of G_k(w_t; s_t), kept on its client
        c   <- c + (n/K) mean over the cohort of the changes of c_k,  so c = mean c_k
    anchor (FedMSA, FedNest):  G_k(w; s) - G_k(w_0; s) + c
        c   <- mean over a cohort of G_k(w_0; s), from p samples each, at the point w_0
               that all receive, in an exchange of its own before the local steps

A correction is made to the samples, before an estimator filters them, so that it takes
out of moving averages and of STORM what each step adds of the client's own. With exact
oracles all clients stay where the mean direction vanishes, for any p.

Controls cost memory, c_k, and as many floats as a point has, each way. The anchor costs
one more exchange and evaluation, and clients keep nothing: it suits those that come
once, or lose what they kept (an old c_k that is lost stays in c). Neither cures a bias
of the direction itself: where clients invert their own Hessians, the mean of the
hypergradients is not the hypergradient, and the limit is as biased as with p = 1.

References: Karimireddy et al., arXiv 1910.06378 (option II: c_k is a mean of sampled
directions), and Tarzanagh et al., arXiv 2306.01648 (FedMSA, whose recursion starts anew
from the last local point, where this one returns to w_0).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._types import Key
from fedbilevel.algorithms.base import Phase, Turn
from fedbilevel.algorithms.parts import Iterate, Memory, Part, evaluate
from fedbilevel.problem import Oracle
from fedbilevel.schedules import number


class Controls(Part):
    """Control variates: every sample is corrected by - c_k + c."""

    sums: ClassVar[bool] = True
    corrects: ClassVar[bool] = True

    def settings(self):
        """Return the option."""
        return {"drift": "controls"}

    def shared(self, start):
        """Start with c = 0."""
        return _tree.zeros_like(start.point)

    def own(self, w):
        """Start with c_k = 0."""
        return _tree.zeros_like(w)

    def begun(self, begin, shared, own):
        """Return c and c_k."""
        return shared, own

    def corrected(self, state, maps):
        """Return G - c_k + c."""
        c, c_k = state
        return jax.tree.map(_shifted, maps, _tree.subtract(c, c_k))

    def answer(self, shared, mean):
        """Return the change of c_k: samples are corrected, so c is to be taken off."""
        return _tree.subtract(mean, shared)

    def ended(self, state, answer):
        """Keep c_k after its change."""
        return _tree.add(state[1], answer), answer

    def known(self, shared):
        """Expect no change."""
        return _tree.zeros_like(shared)

    def taken(self, shared, answer, server, turn):
        """Return c + (n/K) mean change."""
        return _tree.add_scaled(shared, turn.share(), answer)

    def forgotten(self, shared):
        """Clients start with c_k = 0 again, and so must c."""
        return _tree.zeros_like(shared)


class Anchor(Part):
    """Every sample is corrected by its value at the received point, and their mean."""

    corrects: ClassVar[bool] = True

    def settings(self):
        """Return the option."""
        return {"drift": "anchor"}

    def shared(self, start):
        """Return zeros for c."""
        return _tree.zeros_like(start.point)

    def before(self, method, place):
        """Return the exchange that takes the mean direction at the server's point."""
        p = method.local_steps

        def local(w: PyTree, client: Memory, oracle: Oracle, turn: Turn):
            moving = method.moving(w)

            def add(total: PyTree, time: tuple[Array, Key]) -> tuple[PyTree, None]:
                t, key = time
                maps = method.moving(method.directions(oracle, key, t))
                return _tree.add(total, evaluate(maps)(w)), None

            times = (turn.steps(p), turn.keys(p))
            total, _ = jax.lax.scan(add, _tree.zeros_like(moving), times)
            return client, _tree.scale(1 / p, total)

        def up(server: Iterate, mean: PyTree) -> Iterate:
            return server.sharing(place, mean)

        return (Phase("anchor", lambda server: server.point, local, up),)

    def begun(self, begin, shared, own):
        """Return c and w_0."""
        return shared, begin.message.point

    def corrected(self, state, maps):
        """Return G - G(w_0) + c."""
        c, start = state
        return jax.tree.map(_shifted, maps, _tree.subtract(c, evaluate(maps)(start)))


class Proximal(Part):
    """A pull back to the received point: G + mu (w - w_0)."""

    mu: Any = number("how strongly a client is drawn back to y", default=0.1, least=0.0)

    def begun(self, begin, shared, own):
        """Return w_0."""
        return begin.message.point

    def corrected(self, state, maps):
        """Return G + mu (w - w_0)."""

        def pulled(name: str, G: Callable) -> Callable:
            def at(w: Any) -> PyTree:
                pull = _tree.subtract(getattr(w, name), getattr(state, name))
                return _tree.add_scaled(G(w), self.mu, pull)

            return at

        found = {n: pulled(n, G) for n, G in vars(maps).items() if G is not None}
        return replace(maps, **found)


def _shifted(G: Callable, shift: PyTree) -> Callable:
    return lambda w: _tree.add(G(w), shift)
