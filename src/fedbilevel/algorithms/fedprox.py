r"""FedProx on the lower level at the given x: local steps that are held back.

    min_y  1/K sum_k g_k(x, y),   x fixed

Round, with S a cohort of clients. Client k from y, p steps on g_k + (mu/2) ||. - y||^2:

    y_k = y;  p times:  y_k <- y_k - lr (gy_k(x, y_k; zeta) + mu (y_k - y))
Server:
    y <- mean over S of y_k

A larger mu keeps clients nearer to y, and makes them slower. It lessens the drift, and
does not end it: for g_k = (h_k/2)(y - m_k)^2 the limit is sum_k a_k m_k / sum_k a_k
with a_k = h_k / (h_k + mu) (1 - (1 - lr (h_k + mu))^p). With mu = 0 it is FedAvg.

Exchanges a round: 1, with dy floats each way; x is sent once.

Reference: Li et al., arXiv 1812.06127 (MLSys 2020).
Deviations: a client's problem is solved by p steps of one length, whatever their
accuracy. Clients are weighted as their data are (`ClientData.weights`), equally by
default.
"""

from typing import Any, ClassVar

import equinox as eqx

from fedbilevel import _tree
from fedbilevel._blocks import combine
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Turn
from fedbilevel.algorithms._level import without_x
from fedbilevel.algorithms._local import Iterate, check_counts, local_steps, move
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, is_known, number

__all__ = ["FedProx"]


class Anchor(eqx.Module):
    """A point that all local steps of a round are drawn back to.

    It is no `Iterate`: a local step cannot go on from another one as from a message.
    """

    point: Pair


class FedProx(AbstractAlgorithm):
    """Local steps on y at the given x, drawn back to where they began."""

    reference: ClassVar[str] = "Li et al. 2020, arXiv 1812.06127"
    provenance: ClassVar[str] = "standard method; maintained programs are known"
    answers: ClassVar[str] = "shared y, x fixed"

    lr: Number = number("y moves by lr (gy + mu (y_k - y))", step="lower")
    mu: Number = number("how strongly a client is drawn back to y", default=0.1)
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        if is_known(self.mu) and not float(self.mu) >= 0:
            raise InvalidInputError(
                f"`FedProx(mu=...)` must not be below 0, got {self.mu:.4g}."
            )

    def init_server(self, x: Upper, y: Lower) -> Anchor:
        """Start at (x, y)."""
        return Anchor(Pair(x, y))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients keep nothing between rounds."""

    def phases(self) -> Phases:
        """Return the one exchange of a round; x is not sent back."""

        def up(server: Anchor, mean: Iterate) -> Anchor:
            return Anchor(combine(mean.point, server.point))

        return (Phase("local", lambda s: s, self.local, up, without_x, moves=True),)

    def point(self, server: Anchor) -> Pair:
        """Return x and the averaged y."""
        return server.point

    def local(self, message: Anchor, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps on y, drawn back to it."""
        x, y = message.point.x, message.point.y

        def iterate(y_k: Lower, time: tuple[Any, Key]) -> Lower:
            _, key = time
            slope = oracle.lower_gradient(x, y_k, oracle.draw_lower(key))
            pull = _tree.subtract(y_k, y)
            return move(y_k, self.lr, _tree.add_scaled(slope, self.mu, pull))

        y_k = local_steps(iterate, y, turn, self.local_steps)
        return client, Iterate(Pair(None, y_k))
