r"""Compressed local SGD with error feedback on the lower level at the given x.

    min_y  1/K sum_k g_k(x, y),   x fixed

Round, with S a cohort of clients. Client k from y, with its e_k, zero at first:

    y_k = y;  p times:  y_k <- y_k - lr gy_k(x, y_k; zeta)
    send c_k = C(y_k - y + e_k);  keep e_k <- y_k - y + e_k - c_k
Server:
    y <- y + mean over S of c_k

C keeps a fraction of the entries, the largest (`fedbilevel.TopK`). What was not sent is
added to what comes next, so that all that was sent and all that is left add up to all
moves, in every entry. With fraction = 1 it is FedAvg.

Exchanges a round: 1, with a fraction of dy numbers up, and their places, and dy floats
down; x is sent once.

Reference: Gao, Xu, Huang, AAAI 2021; Basu et al., arXiv 1906.02735 (Qsparse-local-SGD).
Deviations: a summary of the updates was read, no listing. Local steps have no momentum,
and what the server sends is not compressed. Clients are weighted as their data are
(`ClientData.weights`), equally by default.
"""

from typing import ClassVar

from fedbilevel._types import Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._level import descended, without_x
from fedbilevel.algorithms._local import Iterate, averaged, check_counts
from fedbilevel.channels import Channel, TopK
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number

__all__ = ["CompressedLocalSGD"]


class CompressedLocalSGD(AbstractAlgorithm):
    """Local steps on y at the given x, of which the largest entries are sent."""

    reference: ClassVar[str] = "Gao, Xu, Huang 2021 (AAAI); cf. arXiv 1906.02735"
    provenance: ClassVar[str] = "a summary of its updates read"
    answers: ClassVar[str] = "shared y, x fixed"

    lr: Number = number("y moves by lr gy", step="lower")
    fraction: float = count("share of the entries that travel up", default=0.1)
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        self.channel()  # which checks the fraction

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y)."""
        return Iterate(Pair(x, y))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: what was not sent yet is kept by the channel."""

    def channel(self) -> Channel:
        """Send the largest entries, and the others later."""
        return Channel((TopK(self.fraction),))

    def phases(self) -> Phases:
        """Return the one exchange of a round; x is not sent back."""
        return (averaged(self.local, without_x),)

    def point(self, server: Iterate) -> Pair:
        """Return x and the server's y."""
        return server.point

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps on y."""
        return client, descended(message, self.lr, oracle, turn, self.local_steps)
