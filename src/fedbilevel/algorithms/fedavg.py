r"""FedAvg on the lower level at the given x: what one does who does not tune.

    min_y  1/K sum_k g_k(x, y),   x fixed

Client k, every p iterations averaged:

    y <- y - lr gy_k(x, y; zeta)
    every p iterations:  y <- mean over clients

With a constant step and p > 1 the limit is off where clients differ: for
g_k = (h_k/2)(y - m_k)^2 it is sum_k a_k m_k / sum_k a_k with a_k = 1 - (1 - lr h_k)^p.

Exchanges a round: 1, with dy floats each way; x is sent once.

Reference: McMahan et al., arXiv 1602.05629; local SGD: arXiv 1805.09767.
Deviations: clients are weighted as their data are (`ClientData.weights`), equally by
default, not by their number of rows.
"""

from typing import ClassVar

from fedbilevel._types import Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._level import descended, without_x
from fedbilevel.algorithms._local import Iterate, averaged, check_counts
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number

__all__ = ["FedAvg"]


class FedAvg(AbstractAlgorithm):
    """Local gradient steps on y at the given x, averaged every p steps."""

    reference: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    provenance: ClassVar[str] = "standard method, from memory"
    answers: ClassVar[str] = "shared y, x fixed"

    lr: Number = number("y moves by lr gy", step="lower")
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y)."""
        return Iterate(Pair(x, y))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients keep nothing between rounds."""

    def phases(self) -> Phases:
        """Return the one exchange of a round; x is not sent back."""
        return (averaged(self.local, without_x),)

    def point(self, server: Iterate) -> Pair:
        """Return x and the averaged y."""
        return server.point

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps on y."""
        return client, descended(message, self.lr, oracle, turn, self.local_steps)
