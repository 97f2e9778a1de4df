r"""Control variates: what keeps local steps of clients that differ from drifting apart.

A method of one loop walks along samples G_k(w; s) of its directions. Corrected, all
clients walk along the mean direction of where they start together:

    controls (SCAFFOLD's idea):  G_k(w; s) - c_k + c
        c_k <- mean over the p local steps of G_k(w_t; s_t), kept on its client
        c   <- c + (n/K) mean over the cohort of the changes of c_k,  so c = mean c_k
    anchor (FedMSA's and FedNest's):  G_k(w; s) - G_k(w_0; s) + c
        c   <- mean over a cohort of G_k(w_0; s), from p samples each, at the point w_0
               that all receive, in an exchange of its own before the local steps

A correction is made to the samples, before an estimator filters them, so that it takes
out of moving averages and of STORM what each step adds of the client's own. With exact
oracles all clients stay where the mean direction vanishes, for any p.

Controls cost memory, c_k, and as many floats as a point has, each way. The anchor costs
one more exchange and evaluation, and clients keep nothing: it suits those that come
once, or lose what they kept (an old c_k that is lost stays in c).

Neither cures a bias of the direction itself: where clients invert their own Hessians,
the mean of the hypergradients is not the hypergradient, and the limit is as biased as
with p = 1.

References: Karimireddy et al., arXiv 1910.06378 (option II: c_k is a mean of sampled
directions); Tarzanagh et al., arXiv 2306.01648 (FedMSA, whose recursion starts anew
from the last local point, where this one returns to w_0).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel._types import Key
from fedbilevel.algorithms._base import Phase, Phases, ServerTurn, Turn, with_turn
from fedbilevel.algorithms._local import Iterate, averaged, evaluate
from fedbilevel.estimators import AbstractEstimator
from fedbilevel.problem import Oracle

__all__ = [
    "ANCHOR",
    "CONTROLS",
    "DRIFT",
    "Correction",
    "anchor",
    "corrected_rounds",
    "first_control",
    "forgotten",
    "own_control",
    "renewed_mean",
]

CONTROLS, ANCHOR = "controls", "anchor"
DRIFT = (CONTROLS, ANCHOR)
Draw = Callable[[Oracle, Key], Any]  # of the maps G_k(.; s), one for each block


def first_control(drift: str | None, point: PyTree) -> Any:
    """Return c at the start: zeros, None where nothing is corrected."""
    return None if drift is None else _tree.zeros_like(point)


def own_control(drift: str | None, point: PyTree) -> Any:
    """Return c_k at the start: zeros, None where clients keep no controls."""
    return _tree.zeros_like(point) if drift == CONTROLS else None


def forgotten(server: Any) -> Any:
    """Return a server's state for clients that lose what they kept: c is 0 again.

    It may be inside of what wrappers carry beside it.
    """

    def corrects(node: Any) -> bool:
        return getattr(node, "control", None) is not None

    def anew(node: Any) -> Any:
        if not corrects(node):
            return node
        return replace(node, control=_tree.zeros_like(node.control))

    return jax.tree.map(anew, server, is_leaf=corrects)


class Correction(eqx.Module):
    """What one client does about drift in one turn; nothing where c is None.

    `start` is the point that all received, c the server's control, c_k this client's.
    """

    start: PyTree
    c: PyTree
    c_k: PyTree

    def corrected(self, maps: Any) -> Any:
        """Return the maps G_k(.; s) with a correction, the same at every w."""
        if self.c is None:
            return maps
        own = evaluate(maps)(self.start) if self.c_k is None else self.c_k
        return jax.tree.map(_moved_by, maps, _tree.subtract(self.c, own))

    def no_sum(self) -> PyTree:
        """Return the sum of no samples, if this client has a control to renew."""
        return None if self.c_k is None else _tree.zeros_like(self.c_k)

    def summed(self, total: PyTree, *samples: PyTree) -> PyTree:
        """Add the corrected samples of a step, given block by block or at once."""
        return None if total is None else _tree.add(total, eqx.combine(*samples))

    def filtered(
        self, estimator: AbstractEstimator, G: Callable, *rest: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the direction of an estimator, and the sample where that is summed."""
        if self.c_k is None:
            return estimator(G, *rest), None
        w, before, d, weight = rest
        # With weight 1 every estimator returns its sample.
        twice = (lambda w: _twice(G(w)), w, before, _twice(d), (weight, 1.0))
        return estimator(*twice)

    def renewed(self, total: PyTree, steps: int) -> tuple[PyTree, PyTree]:
        """Return the next c_k, and how it changed."""
        if self.c_k is None:
            return None, None
        # The samples were corrected: their mean is that of G_k, less c_k, plus c.
        change = _tree.subtract(_tree.scale(1 / steps, total), self.c)
        return _tree.add(self.c_k, change), change


def _moved_by(G: Callable, correction: PyTree) -> Callable:
    return lambda w: _tree.add(G(w), correction)


def _twice(tree: PyTree) -> tuple[PyTree, PyTree]:
    return tree, tree


def corrected_rounds(local: Callable, drift: str | None, draw: Draw, p: int) -> Phases:
    """Return the exchanges of a round: local steps, then the mean of what moved."""
    if drift is None:
        return (averaged(local),)
    if drift == ANCHOR:
        moving = averaged(local, lambda sent: replace(sent, control=None))
        return anchor(draw, p), moving

    def about(sent: Iterate) -> Iterate:
        return replace(sent, control=_tree.zeros_like(sent.control))

    def up(server: Iterate, mean: Iterate, turn: ServerTurn) -> Iterate:
        return replace(mean, control=renewed_mean(server.control, mean.control, turn))

    every = (lambda server: server, local, with_turn(up), about)
    return (Phase("local", *every, moves=True),)


def renewed_mean(c: PyTree, change: PyTree, turn: ServerTurn) -> PyTree:
    """Return c after the mean change of the controls of those who took part."""
    return _tree.add_scaled(c, turn.share(), change)


def anchor(draw: Draw, p: int) -> Phase:
    """Return the exchange that takes the mean direction at the server's point."""

    def local(w: PyTree, client: Any, oracle: Oracle, turn: Turn):
        def add(total: PyTree, key: Key) -> tuple[PyTree, None]:
            return _tree.add(total, evaluate(draw(oracle, key))(w)), None

        total, _ = jax.lax.scan(add, _tree.zeros_like(w), turn.keys(p))
        return client, _tree.scale(1 / p, total)

    def up(server: Iterate, mean: PyTree) -> Iterate:
        return replace(server, control=mean)

    return Phase("anchor", lambda server: server.point, local, up)
