r"""Corrections of local steps where clients differ, and where some were absent.

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

STORM's server sends a direction d that others have formed. A client that took part in
the last turn corrects it from its own last point v, before averaging:

    d_1 = G(w; s) + (1 - a) (d - G(v; s))

One that missed it has no such point on the averaged path. It may

    keep:     take v = w: the correction vanishes, and d remains but for a of it
    correct:  take for v where the last participants evaluated d in the mean, which
              follows from what is received: v = w + step d, each block as it was when
              the direction was formed (exact for the mean of their local steps)
    forget:   take v = w and forget as much of d as in the steps it missed: after m of
              them 1 - (1 - a)^(1 + m) takes the place of a at the first step

Where all take part the three are one. Nothing more is sent or kept.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import Key
from fedbilevel.algorithms.base import Phase, Turn
from fedbilevel.algorithms.parts import Iterate, Memory, Part, evaluate, move, only
from fedbilevel.problem import Oracle
from fedbilevel.schedules import number, word

KEEP, CORRECT, FORGET = ABSENT = ("keep", "correct", "forget")


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


def use_of_memory() -> Any:
    """Declare the choice between the three."""
    meaning = "what one that missed rounds does with the memory it receives"
    return word(meaning, ABSENT, default=KEEP)


class Absent(Part):
    """The use of a received direction by a client that missed rounds."""

    absent: str = use_of_memory()

    def begun(self, begin, shared, own):
        """Return the first iteration, and how many steps were missed."""
        if self.absent != FORGET or begin.memory.index is None:
            return None
        p, turn = begin.method.local_steps, begin.turn
        last = jnp.maximum(begin.memory.index, -1)
        missed = p * (jnp.asarray(turn.index, jnp.int32) - 1 - last)
        return turn.steps(p)[0], missed

    def previous(self, begin, seen, fallback):
        """Return where the last participants stood in the mean, if asked to."""
        if self.absent != CORRECT:
            return seen, fallback
        method, message = begin.method, begin.message
        t = begin.turn.steps(method.local_steps)[0]
        w = method.moving(message.point)
        steps = method.moving(method.step(jnp.maximum(t - 1, 0)))
        stood = move(w, jax.tree.map(jnp.negative, steps), message.direction)
        points = []
        for group in method.order():
            points.append(stood)
            # Those that follow were evaluated after this group had moved.
            stood = combine(only(w, group), stood)
        return seen, _tree.select(t > 0, tuple(points), fallback)

    def weights(self, state, weights, t):
        """Return the weights, at the first step of a turn those of all missed steps."""
        if state is None:
            return weights
        first, missed = state
        late = (t == first) & (missed > 0)

        def one(a: Array) -> Array:
            kept = (1 - a) ** (1 + missed).astype(a.dtype)
            return jnp.where(late, 1 - kept, a)

        return jax.tree.map(one, weights)
