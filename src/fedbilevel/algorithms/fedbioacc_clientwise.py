r"""FedBiOAcc for a client-local lower level, averaging before the move (2022).

    min_x  1/K sum_k f_k(x, y_k*(x))   with   y_k*(x) = argmin_y g_k(x, y)

Client k at local iteration t, with one zeta and one bundle b at both points, and
a_t = delta/(t_0 + t)^(1/3) (any schedule):

    omega_t = gy_k(x_t, y_t; zeta)
              + (1 - c_omega a_{t-1}^2) (omega_{t-1} - gy_k(x_{t-1}, y_{t-1}; zeta))
    nu_t    = h_k(x_t, y_t; b)
              + (1 - c_nu a_{t-1}^2) (nu_{t-1} - h_k(x_{t-1}, y_{t-1}; b))
    every p iterations:  nu_t, x_t <- mean over clients
    y_{t+1} = y_t - gamma a_t omega_t,     x_{t+1} = x_t - eta a_t nu_t

y and omega are never sent. Averaging before the move makes x_{t+1} the same as
averaging after it, but the next correction starts from the averaged x_t, where the
averaged nu_t was not evaluated; `fedbioacc-local` corrects from the client's own.

Exchanges a round: 1, with 2 dx floats each way. With K = 1 this is MRBO.

Reference: Li, Huang, Huang, arXiv 2205.01608.
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. What is sent is (x_{t+1}, nu_t) instead of (x_t, nu_t); the averaged x_t follows
from their means. With fewer than K participants a client that missed the last round
corrects from the received point.
"""

from typing import Any, ClassVar

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._local import (
    Iterate,
    Memory,
    at_time,
    averaged,
    check_counts,
    evaluate,
    hypergradient_and_slope,
    local_steps,
    momentum_weight,
    move,
    no_memory,
    previous_point,
)
from fedbilevel.estimators import Storm
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, count, number, part, schedule

__all__ = ["FedBiOAccClientwise"]


class FedBiOAccClientwise(AbstractAlgorithm):
    """STORM, x and its direction averaged before the move, y kept on its client."""

    reference: ClassVar[str] = "Li, Huang, Huang 2022, arXiv 2205.01608"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"
    answers: ClassVar[str] = "own y per client"

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi_k")
    a: Schedule = schedule("common step of x and y, or its schedule")
    eta: Number = number("x moves by eta a nu", step="upper")
    gamma: Number = number("y moves by gamma a omega", step="lower")
    c_nu: Number = number("nu forgets by c_nu a^2 a step")
    c_omega: Number = number("omega forgets by c_omega a^2 a step")
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)

    def private_blocks(self) -> Pair:
        """Keep y and omega on their client."""
        return Pair(False, True)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y); directions are formed on the clients at t = 0."""
        return Iterate(Pair(x, y), _tree.zeros_like(Pair(x, y)))

    def init_client(self, x: Upper, y: Lower) -> Memory:
        """Start without a usable previous point."""
        return no_memory(Pair(x, y))

    def phases(self) -> Phases:
        """Return the one exchange of a round."""
        return (averaged(self.local),)

    def point(self, server: Iterate) -> Pair:
        """Return the averaged x, and y."""
        return server.point

    def step(self, t: Any) -> Pair:
        """Return eta a_t and gamma a_t."""
        a = at_time(self.a, t, self.eta)
        return Pair(self.eta * a, self.gamma * a)

    def weight(self, t: Any) -> Pair:
        """Return c a_{t-1}^2 for each level, and 1 at t = 0."""
        return Pair(
            momentum_weight(self.c_nu, self.a, t, 2),
            momentum_weight(self.c_omega, self.a, t, 2),
        )

    def local(self, message: Iterate, memory: Memory, oracle: Oracle, turn: Turn):
        """Make p local steps."""

        def iterate(carry: tuple[Pair, Pair, Pair], time: tuple[Any, Key]):
            (w, d, before), (t, key) = carry, time
            G = evaluate(hypergradient_and_slope(self.hypergradient, oracle, key))
            d = Storm()(G, w, before, d, self.weight(t))
            return move(w, self.step(t), d), d, w

        w, d = message.point, message.direction
        # The averaged x_t, from which x_{t+1} = x_t - eta a_t nu_t was made.
        last = jnp.maximum(jnp.asarray(turn.index) * self.local_steps - 1, 0)
        x = _tree.add_scaled(w.x, self.step(last).x, d.x)
        corrected = Memory(Pair(x, memory.evaluated.y), memory.index)
        start = (w, d, previous_point(w, corrected, turn))
        w, d, before = local_steps(iterate, start, turn, self.local_steps)
        return Memory(before, jnp.asarray(turn.index, jnp.int32)), Iterate(w, d)
