r"""FedAvgM on the lower level at the given x: FedAvg with momentum on the server.

    min_y  1/K sum_k g_k(x, y),   x fixed

Round, with S a cohort of clients. Client k from y:

    y_k = y;  p times:  y_k <- y_k - lr gy_k(x, y_k; zeta)
Server, which keeps v:
    Delta = y - mean over S of y_k
    v <- beta v + Delta,     y <- y - lr_server v

With beta = 0 and lr_server = 1 it is FedAvg, and its limit is FedAvg's for any beta.

Exchanges a round: 1, with dy floats each way; x is sent once and v never.

Reference: Hsu, Qi, Brown, arXiv 1909.06335.
Deviations: none known. From Python `ServerOptimizer(FedAvg(...), optax.sgd(lr_server,
momentum=beta))` is the same; here nothing is needed but a name. Clients are weighted as
their data are (`ClientData.weights`), equally by default.
"""

from typing import ClassVar

from fedbilevel import _tree
from fedbilevel._types import Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Turn
from fedbilevel.algorithms._level import descended, without_x
from fedbilevel.algorithms._local import Iterate, check_counts
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, is_known, number

__all__ = ["FedAvgM"]


class FedAvgM(AbstractAlgorithm):
    """Local steps on y at the given x; the server moves with momentum."""

    reference: ClassVar[str] = "Hsu, Qi, Brown 2019, arXiv 1909.06335"
    provenance: ClassVar[str] = "standard method; maintained programs are known"
    answers: ClassVar[str] = "shared y, x fixed"

    lr: Number = number("y moves by lr gy on a client", step="lower")
    beta: Number = number("v keeps beta of itself a round", default=0.9)
    lr_server: Number = number("the server's step along v", default=1.0)
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        if is_known(self.beta) and not 0 <= float(self.beta) < 1:
            raise InvalidInputError(
                f"`FedAvgM(beta=...)` must be in [0, 1), got {self.beta:.4g}."
            )

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y) with v = 0."""
        return Iterate(Pair(x, y), Pair(None, _tree.zeros_like(y)))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients keep nothing between rounds."""

    def phases(self) -> Phases:
        """Return the one exchange of a round; v stays on the server."""
        return (Phase("local", _sent, self.local, self.step, without_x, moves=True),)

    def point(self, server: Iterate) -> Pair:
        """Return x and the server's y."""
        return server.point

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps on y."""
        return client, descended(message, self.lr, oracle, turn, self.local_steps)

    def step(self, server: Iterate, mean: Iterate) -> Iterate:
        """Make the server's step."""
        y = Pair(None, server.point.y)
        change = _tree.subtract(y, mean.point)
        v = _tree.add_scaled(change, self.beta, server.direction)
        y = _tree.add_scaled(y, -self.lr_server, v)
        return Iterate(Pair(server.point.x, y.y), v)


def _sent(server: Iterate) -> Iterate:
    return Iterate(server.point)
