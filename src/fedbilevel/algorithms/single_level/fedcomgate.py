r"""FedCOMGATE on the lower level at the given x: quantized replies, tracked gradients.

    min_y  1/K sum_k g_k(x, y),   x fixed

Round, in which all clients take part. Client k from y, with its delta_k, zero at first:

    y_k = y;  p times:  y_k <- y_k - lr (gy_k(x, y_k; zeta) - delta_k)
    Delta_k = y - y_k;  send Q(Delta_k)
Server:
    Delta = mean of Q(Delta_k),     y <- y - lr_server Delta
Client k, once it knows the new y:
    delta_k <- delta_k + (Delta_k - Delta) / (p lr)

delta_k takes the client's difference out of its steps, so that with exact oracles and
numbers that are not rounded the limit is the minimizer itself, for any p. Then (bits =
0) it is SCAFFOLD with all clients, at half of its floats.

Exchanges a round: 1, with dy numbers up in one or two bytes each, and dy floats down:
clients infer Delta from the change of y. x is sent once.

Reference: Haddadpour, Kamani, Mokhtari, Mahdavi, arXiv 2007.01154 (AISTATS 2021).
Deviations: read in the authors' program, where Delta_k of the last line is not rounded.
There the client's weight multiplies it before it is rounded, and Delta is rounded once
more before it is sent down. Neither is done here. All clients take part in every round,
whatever the size of a cohort is. Weights are `ClientData.weights`, equal by default.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms.base import AbstractAlgorithm, Phase, Phases, Turn
from fedbilevel.algorithms.parts import Iterate, local_steps, move
from fedbilevel.channels import PLAIN, Channel, Quantize
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, is_known, number

__all__ = ["FedCOMGATE"]


class Tracked(eqx.Module):
    """A client's delta_k, and of its last round: the y it began at, Delta_k, p lr."""

    delta: Lower
    start: Lower
    change: Lower
    length: Array


class FedCOMGATE(AbstractAlgorithm):
    """Local steps on y at the given x, corrected, and sent back quantized."""

    reference = "Haddadpour et al. 2021, arXiv 2007.01154"
    provenance = "updates read in the authors' program"
    answers = "shared y, x fixed"
    allows_private = False

    lr: Number = number("y moves by lr (gy - delta_k)", step="lower")
    lr_server: Number = number("the server's step along the mean move", default=1.0)
    bits: int = count(
        "bits of a number sent to the server; 0 sends floats", default=8, least=0
    )
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        self.channel()  # which checks the bits
        if is_known(self.lr_server) and not float(self.lr_server) > 0:
            raise InvalidInputError(
                "`FedCOMGATE(lr_server=...)` must be above 0: clients learn from what "
                f"y moved by. It is {self.lr_server:.4g}."
            )

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y)."""
        return Iterate(Pair(x, y))

    def init_client(self, x: Upper, y: Lower) -> Tracked:
        """Start with delta_k = 0."""
        zeros = _tree.zeros_like(y)
        return Tracked(zeros, y, zeros, jnp.ones((), self.lr.dtype))

    def channel(self) -> Channel:
        """Round what clients send."""
        return Channel((Quantize(self.bits),)) if self.bits else PLAIN

    def phases(self) -> Phases:
        """Return the one exchange of a round, of all clients."""

        def known(sent: Iterate) -> Iterate:
            return Iterate(Pair(None, sent.point.y))

        exchange = (lambda server: server, self.local, self.step, known)
        return (Phase("local", *exchange, moves=True, everyone=True),)

    def local(self, message: Iterate, kept: Tracked, oracle: Oracle, turn: Turn):
        """Renew delta_k by what y moved by; make p corrected local steps on y."""
        x, y = message.point.x, message.point.y
        mean = _tree.scale(1 / self.lr_server, _tree.subtract(kept.start, y))
        off = _tree.subtract(kept.change, mean)
        delta = _tree.add_scaled(kept.delta, 1 / kept.length, off)

        def iterate(y_k: Lower, time: tuple[Any, Key]) -> Lower:
            _, key = time
            slope = oracle.lower_gradient(x, y_k, oracle.draw_lower(key))
            return move(y_k, self.lr, _tree.subtract(slope, delta))

        y_k = local_steps(iterate, y, turn, self.local_steps)
        length = self.local_steps * self.lr
        kept = Tracked(delta, y, _tree.subtract(y, y_k), length)
        return kept, Iterate(Pair(None, y_k))

    def step(self, server: Iterate, mean: Iterate) -> Iterate:
        """Make the server's step."""
        x, y = server.point.x, server.point.y
        change = _tree.subtract(mean.point.y, y)
        return Iterate(Pair(x, _tree.add_scaled(y, self.lr_server, change)))
