r"""STEM on the lower level at the given x: STORM's momentum on clients and server.

    min_y  1/K sum_k g_k(x, y),   x fixed

Client k, with the same sample zeta at both points and w_k its own last y_k:

    d_k <- gy_k(x, y_k; zeta) + (1 - a_t) (d_k - gy_k(x, w_k; zeta)),
    w_k = y_k,     y_k <- y_k - lr eta_t d_k
    every p iterations:  y_k, d_k <- means over clients

with a_t = c eta_{t-1}^2; the first direction is the mean of B samples. To average y and
d and then to move, as the paper does, leads to the same point as to average what moved.
w_k is where client k itself was before the average: then the mean of d_k is the mean of
the slopes where oracles are exact, for any p. Local steps still drift where p > 1.

With a_t = 1 it is FedAvg; on one client it is STORM, whatever p is.

Exchanges a round: 1, with 2 dy floats each way; x is sent once. A step evaluates gy
twice.

Reference: Khanduri et al., arXiv 2106.10435 (NeurIPS 2021).
Deviations: the abstract was read, and a summary of the updates, not the paper's body.
The paper's eta_t is lr eta_t here, its schedule kappa/(w_t + sigma^2 t)^(1/3) any
schedule eta_t. A client that missed a round has no w_k of use: it takes w_k = y_k.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._local import (
    Iterate,
    Memory,
    at_time,
    averaged,
    check_counts,
    first_batch,
    local_steps,
    momentum_weight,
    move,
    no_memory,
    previous_point,
)
from fedbilevel.estimators import Storm
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, count, number, schedule

__all__ = ["STEM"]


class STEM(AbstractAlgorithm):
    """STORM on y at the given x, averaged with its directions every p steps."""

    reference: ClassVar[str] = "Khanduri et al. 2021, arXiv 2106.10435"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"
    answers: ClassVar[str] = "shared y, x fixed"

    lr: Number = number("y moves by lr eta_t d", step="lower")
    c: Number = number("d forgets by c eta^2 a step")
    eta: Schedule = schedule("shape of the steps over t", default=1.0)
    first_batch: int = count("samples of the first direction, B", default=1)
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps, first_batch=self.first_batch)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y); directions are formed on the clients at t = 0."""
        return Iterate(Pair(x, y), Pair(None, _tree.zeros_like(y)))

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without a usable previous point."""
        return no_memory(y)

    def phases(self) -> Phases:
        """Return the one exchange of a round; x is not sent back."""

        def without_x(sent: Iterate) -> Iterate:
            return Iterate(Pair(None, sent.point.y), sent.direction)

        return (averaged(self.local, without_x),)

    def point(self, server: Iterate) -> Pair:
        """Return x and the averaged y."""
        return server.point

    def step(self, t: Any) -> Array:
        """Return lr eta_t."""
        return self.lr * at_time(self.eta, t, self.lr)

    def weight(self, t: Any) -> Array:
        """Return a = c eta_{t-1}^2; 1/B at t = 0."""
        return momentum_weight(self.c, self.eta, t, 2, self.first_batch)

    def local(self, message: Iterate, memory: Memory, oracle: Oracle, turn: Turn):
        """Make p local steps on y."""
        x, y = message.point.x, message.point.y

        def G(key: Key):
            zeta = oracle.draw_lower(key)
            return lambda y: oracle.lower_gradient(x, y, zeta)

        def iterate(carry: tuple[Lower, Lower, Lower], time: tuple[Any, Key]):
            (y, d, before), (t, key) = carry, time
            d = Storm()(G(key), y, before, d, self.weight(t))
            return move(y, self.step(t), d), d, y

        d = first_batch(G, y, message.direction.y, turn, self.first_batch)
        start = (y, d, previous_point(y, memory, turn))
        y, d, before = local_steps(iterate, start, turn, self.local_steps)
        index = jnp.asarray(turn.index, jnp.int32)
        return Memory(before, index), Iterate(Pair(None, y), Pair(None, d))
