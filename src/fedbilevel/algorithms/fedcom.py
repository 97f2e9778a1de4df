r"""FedCOM on the lower level at the given x: FedAvg with quantized replies.

    min_y  1/K sum_k g_k(x, y),   x fixed

Round, with S a cohort of clients. Client k from y:

    y_k = y;  p times:  y_k <- y_k - lr gy_k(x, y_k; zeta)
    send Q(y_k - y), each number in so many bits
Server:
    y <- y + lr_server mean over S of Q(y_k - y)

Q rounds at random, without bias, to levels between plus and minus the largest number of
a reply (`fedbilevel.Quantize`). With lr_server = 1 it is FedPAQ
(`fedbilevel.algorithms.fedpaq`), with bits = 0, where nothing is rounded, FedAvg.

Exchanges a round: 1, with dy numbers up in one or two bytes each, and dy floats down; x
is sent once.

Reference: Haddadpour, Kamani, Mokhtari, Mahdavi, arXiv 2007.01154 (AISTATS 2021).
Deviations: the levels are those of `Quantize`; the paper asks of Q that it is unbiased.
Clients are weighted as their data are (`ClientData.weights`), equally by default.
"""

from typing import ClassVar

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Turn
from fedbilevel.algorithms._level import descended, quantized, without_x
from fedbilevel.algorithms._local import Iterate, check_counts
from fedbilevel.channels import Channel
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number

__all__ = ["FedCOM"]


class FedCOM(AbstractAlgorithm):
    """Local steps on y at the given x, sent back quantized; a step of the server."""

    reference: ClassVar[str] = "Haddadpour et al. 2021, arXiv 2007.01154"
    provenance: ClassVar[str] = "standard method; a program of the authors read"
    answers: ClassVar[str] = "shared y, x fixed"

    lr: Number = number("y moves by lr gy on a client", step="lower")
    lr_server: Number = number("the server's step along the mean move", default=1.0)
    bits: int = count("bits of a number on its way up; 0 sends floats", default=8)
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        self.channel()  # which checks the bits

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y)."""
        return Iterate(Pair(x, y))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients keep nothing between rounds."""

    def channel(self) -> Channel:
        """Round what clients send."""
        return quantized(self.bits)

    def phases(self) -> Phases:
        """Return the one exchange of a round; x is not sent back."""
        return (
            Phase("local", lambda s: s, self.local, self.step, without_x, moves=True),
        )

    def point(self, server: Iterate) -> Pair:
        """Return x and the server's y."""
        return server.point

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps on y."""
        return client, descended(message, self.lr, oracle, turn, self.local_steps)

    def step(self, server: Iterate, mean: Iterate) -> Iterate:
        """Make the server's step."""
        y = Pair(None, server.point.y)
        change = _tree.subtract(mean.point, y)
        y = _tree.add_scaled(y, self.lr_server, change)
        return Iterate(combine(y, server.point))
