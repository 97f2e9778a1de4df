r"""Wrappers of the round: averages of x, and compressed replies.

    average   xbar <- xbar + (x - xbar) / (r + 1) after round r: the run continues from
              x, and reports xbar with the current y
    quantize  replies are rounded at random to so many bits, without bias
    top-k     replies are their largest entries; what was not sent is added to the next

Reference: Polyak, Juditsky, SIAM J. Control Optim. 30 (1992), for the average.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from fedbilevel import _tree
from fedbilevel._types import Lower, Pair, Upper
from fedbilevel.algorithms.base import Phase, Phases, ServerTurn, every_phase, with_turn
from fedbilevel.algorithms.wrappers import base
from fedbilevel.channels import PLAIN, Channel, Quantize, TopK
from fedbilevel.schedules import count


class Averaged(base.Inside):
    """The server's state, the mean of x over the rounds, and their number."""

    mean: Pair
    rounds: Int[Array, ""]


class Average(base.AroundServer):
    """A method that reports the mean of x over all rounds, with the current y."""

    def init_server(self, x: Upper, y: Lower) -> Averaged:
        """Start with the mean at x, of no rounds."""
        server = self.algorithm.init_server(x, y)
        return Averaged(server, Pair(x, None), jnp.zeros((), jnp.int32))

    def phases(self) -> Phases:
        """Return the method's own, the last of which ends with the mean."""
        last = every_phase(self.algorithm.phases())[-1].name

        def change(phase: Phase) -> Phase:
            inner = base.inner_phase(phase)

            def up(server: Averaged, reply: PyTree, turn: ServerTurn) -> Averaged:
                return self._renewed(inner.taken_in(server, reply, turn))

            return replace(inner, up=with_turn(up)) if phase.name == last else inner

        return base.mapped(self.algorithm.phases(), change)

    def point(self, server: Any) -> Pair:
        """Return the mean of x, and y."""
        return Pair(server.mean.x, self.algorithm.point(server.server).y)

    def _renewed(self, server: Averaged) -> Averaged:
        here = Pair(self.algorithm.point(server.server).x, None)
        share = 1 / (server.rounds + 1).astype(float)
        change = _tree.subtract(here, server.mean)
        mean = _tree.add_scaled(server.mean, share, change)
        return replace(server, mean=mean, rounds=server.rounds + 1)


class Quantized(base.AbstractWrapper):
    """A method whose replies are rounded at random, without bias."""

    bits: int = count(
        "bits of a number sent to the server; 0 sends floats", default=8, least=0
    )

    def __check_init__(self) -> None:
        self.channel()  # which checks the bits

    def channel(self) -> Channel:
        """Round what clients send."""
        return Channel((Quantize(self.bits),)) if self.bits else PLAIN


class Largest(base.AbstractWrapper):
    """A method whose replies are their largest entries. The others follow later."""

    fraction: float = count("share of the entries that travel up", default=0.1, least=0)

    def __check_init__(self) -> None:
        self.channel()  # which checks the fraction

    def channel(self) -> Channel:
        """Send the largest entries, and the others later."""
        return Channel((TopK(self.fraction),)) if self.fraction else PLAIN
