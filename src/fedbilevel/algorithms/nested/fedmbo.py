r"""FedMBO: minibatch steps below, and chains of Hessians handed from client to client.

For every round, with S a fresh cohort of n clients in each exchange:

    T_in times (1 exchange each):  y -= lr_y mean_{i in S} gy_i(x, y; zeta_i)
    chains j = 1..n (1 exchange):  r_j, fx_j = fy_{s(j)}(x, y; xi), fx_{s(j)}(x, y; xi)
    m = 1..N' (1 exchange each):   r_j <- r_j - theta hvp_{s(j)}(x, y; zeta)[r_j]
    last (1 exchange):             h_j = fx_j - N theta jvp_{s(j)}(x, y; zeta)[r_j]
    x -= lr_x mean_j h_j

s(j) is a client drawn anew for every chain and exchange, N' is uniform on {0..N-1}. The
chains are not averaged between factors, so that they are n independent estimates, each
with Hessians of many clients: unbiased where clients differ, and the variance falls as
1/n. `random_length=False` takes N factors and the whole sum, theta sum_{m=0..N} r_m.

Exchanges a round: T_in + N' + 2. Floats a client and round, up: (T_in + 1 + N') dy +
2 dx; down, to clients that keep what they were sent: (T_in + 1 + N') dy + dx.

Reference: Huang, Zhang, Ji, arXiv 2302.05412 (ICML 2023).
Deviations: the listing is a reconstruction. The paper's abstract was read, not its
body. There are as many chains as participants, and the server assigns them at random:
within an exchange all clients have different chains. A chain that was not answered
waits, and one that was never started, or not in the last exchange, does not count.
Chains come to every client equally often, whatever its weight.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PyTree

from fedbilevel import _tree
from fedbilevel.algorithms import Key, Lower, Number, Pair, Upper, base
from fedbilevel.algorithms.nested._nest import factor_by, slope_of_g
from fedbilevel.algorithms.one_machine._path import sampled
from fedbilevel.algorithms.parts import move, stacked_zeros
from fedbilevel.hypergradient._base import check_step
from fedbilevel.problem import Oracle
from fedbilevel.problem.every_client import summed
from fedbilevel.schedules import choice, count, number

__all__ = ["FedMBO"]


class Chains(base.Pointed):
    """A point, and of each chain fx, the last term, the sum, and whether it lives."""

    point: Pair
    fx: Upper
    r: Lower
    total: Lower
    alive: Float[Array, " chains"]


class FedMBO(base.AbstractAlgorithm):
    """Federated minibatch steps below, unaveraged chains of Hessians above."""

    reference = "Huang, Zhang, Ji 2023, arXiv 2302.05412"
    provenance = "abstract read; listing reconstructed, unverified"
    allows_private = False
    counts_clients = True

    lr_x: Number = number("x moves by lr_x h", step="upper", kw_only=True)
    lr_y: Number = number("y moves by lr_y gy", step="lower", kw_only=True)
    theta: Number = number("step of the series, below 1/L1", step="lower", kw_only=True)
    terms: int = count("terms of the series, N", kw_only=True)
    chains: int = count("chains, as many as participants, n", kw_only=True)
    inner_rounds: int = count("lower steps in a round, T_in", kw_only=True, default=5)
    random_length: bool = choice(
        "draw the number of factors, and let the last term stand for the sum",
        default=True,
        kw_only=True,
    )

    def check(self, curvature: float, client: int) -> None:
        """Raise if theta is too large for the series."""
        check_step("FedMBO", "theta", self.theta, curvature, client)

    def init_server(self, x, y):
        """Start at (x, y), without chains."""
        fx, r = (stacked_zeros(level, self.chains) for level in (x, y))
        return Chains(Pair(x, y), fx, r, r, jnp.zeros(self.chains))

    def phases(self):
        """Return the lower steps, the chains, and the upper step."""
        factors, inverse = self.terms, "total"
        if self.random_length:
            factors, inverse = self.terms - 1, "r"
        lower = sampled("lower", slope_of_g, self.lower_step)
        start = sampled("chain_start", slopes, self.begin, gathers=True)
        sent, up = self.dealt("r"), base.with_turn(self.longer)
        factor = factor_by(lambda: self.theta)
        hop = base.Phase("hop", sent, factor, up, lambda sent: sent[1], gathers=True)
        sent, up = self.dealt(inverse), base.with_turn(self.upper_step)
        last = base.Phase("last_hop", sent, crossed, up, gathers=True)
        hops = base.Repeat(factors, (hop,), random=self.random_length)
        return (base.Repeat(self.inner_rounds, (lower,)), start, hops, last)

    def lower_step(self, server: Chains, gy: Lower) -> Chains:
        """Move y."""
        y = move(server.point.y, self.lr_y, gy)
        return replace(server, point=Pair(server.point.x, y))

    def begin(self, server: Chains, gathered: base.Gathered) -> Chains:
        """Begin a chain in every place that answered."""
        first, came = gathered.replies, gathered.weights > 0
        alive = came.astype(server.alive.dtype)
        return Chains(server.point, first.x, first.y, first.y, alive)

    def order(self, turn: base.ServerTurn) -> Array:
        """Draw which chain each place gets."""
        return jr.permutation(turn.shared, self.chains)

    def dealt(self, name: str) -> Any:
        """Send the point, and to each participant this of another chain."""

        def down(server: Chains, turn: base.ServerTurn) -> tuple[Pair, base.Each]:
            chains = _taken(getattr(server, name), self.order(turn))
            return server.point, base.Each(chains)

        return base.with_turn(down)

    def longer(
        self, server: Chains, gathered: base.Gathered, turn: base.ServerTurn
    ) -> Chains:
        """Put the chains back in their order; those not answered wait."""
        order = self.order(turn)

        def put(old: Array, new: Array) -> Array:
            flags = turn.present.reshape((-1,) + (1,) * (new.ndim - 1))
            return old.at[order].set(jnp.where(flags, new, old[order]))

        sums = _tree.add(_taken(server.total, order), gathered.replies)
        r = jax.tree.map(put, server.r, gathered.replies)
        return replace(server, r=r, total=jax.tree.map(put, server.total, sums))

    def upper_step(
        self, server: Chains, gathered: base.Gathered, turn: base.ServerTurn
    ) -> Chains:
        """Move x along the mean of the chains' hypergradients."""
        order = self.order(turn)
        counts = jnp.where(turn.present, server.alive[order], 0)
        share = counts / jnp.maximum(jnp.sum(counts), 1)
        scale = self.terms * self.theta if self.random_length else self.theta
        h = _tree.add_scaled(_taken(server.fx, order), -scale, gathered.replies)
        x = move(server.point.x, self.lr_x, summed(h, share))
        return replace(server, point=Pair(x, server.point.y))


def slopes(oracle: Oracle, key: Key) -> Any:
    """Draw xi; return the map of fx and fy, with which a chain begins."""
    xi = oracle.draw_upper(key)
    return lambda w: Pair(*oracle.upper_gradients(w.x, w.y, xi))


def crossed(message: tuple[Pair, Lower], client: None, oracle: Oracle, turn: base.Turn):
    """Return jvp[z]."""
    point, z = message
    zeta = oracle.draw_lower(turn.keys(1)[0])
    return client, oracle.cross_product(point.x, point.y, z, zeta)


def _taken(tree: PyTree, order: Array) -> PyTree:
    """Return the chains in another order."""
    return jax.tree.map(lambda leaf: leaf[order], tree)
