r"""SCAFFOLD on the lower level at the given x: local steps without client drift.

    min_y  1/K sum_k g_k(x, y),   x fixed

Round, with S a cohort of n clients. Client k from y, with its c_k and the server's c:

    y_k = y;  p times:  y_k <- y_k - lr (gy_k(x, y_k; zeta) - c_k + c)
    c_k+ = c_k - c + (y - y_k) / (p lr)                              (option II)
    send y_k and c_k+ - c_k;  keep c_k <- c_k+
Server:
    y <- y + lr_server mean over S of (y_k - y)
    c <- c + (n/K) mean over S of (c_k+ - c_k)

The corrections c - c_k take the clients' differences out of their steps, so that with
exact oracles the limit is the minimizer itself, for any p. With c_k = c = 0 for ever it
is FedAvg.

Exchanges a round: 1, with 2 dy floats each way; x is sent once.

Reference: Karimireddy et al., arXiv 1910.06378 (ICML 2020).
Deviations: none known. Clients are weighted as their data are (`ClientData.weights`),
equally by default.
"""

from typing import Any, ClassVar

import equinox as eqx

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    ServerTurn,
    Turn,
    with_turn,
)
from fedbilevel.algorithms._local import Iterate, check_counts, local_steps, move
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, number

__all__ = ["Scaffold"]


class Controlled(eqx.Module):
    """A point, and the mean c of all clients' control variates."""

    point: Pair
    control: Pair


class Scaffold(AbstractAlgorithm):
    """Local steps on y at the given x, corrected by control variates."""

    reference: ClassVar[str] = "Karimireddy et al. 2020, arXiv 1910.06378"
    provenance: ClassVar[str] = "standard method; updates read in a maintained program"
    answers: ClassVar[str] = "shared y, x fixed"
    allows_private: ClassVar[bool] = False

    lr: Number = number("y moves by lr (gy - c_k + c)", step="lower")
    lr_server: Number = number("the server's step along the mean move", default=1.0)
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)

    def init_server(self, x: Upper, y: Lower) -> Controlled:
        """Start at (x, y) with c = 0."""
        return Controlled(Pair(x, y), Pair(None, _tree.zeros_like(y)))

    def init_client(self, x: Upper, y: Lower) -> Lower:
        """Start with c_k = 0."""
        return _tree.zeros_like(y)

    def phases(self) -> Phases:
        """Return the one exchange of a round."""

        def about(sent: Controlled) -> Iterate:
            unchanged = _tree.zeros_like(sent.control)
            return Iterate(Pair(None, sent.point.y), control=unchanged)

        up = with_turn(self.step)
        return (
            Phase("local", lambda server: server, self.local, up, about, moves=True),
        )

    def point(self, server: Controlled) -> Pair:
        """Return x and the server's y."""
        return server.point

    def local(self, sent: Controlled, c_k: Lower, oracle: Oracle, turn: Turn):
        """Make p corrected local steps on y; renew c_k."""
        x, y, c = sent.point.x, sent.point.y, sent.control.y
        correction = _tree.subtract(c, c_k)

        def iterate(y_k: Lower, time: tuple[Any, Key]) -> Lower:
            _, key = time
            slope = oracle.lower_gradient(x, y_k, oracle.draw_lower(key))
            return move(y_k, self.lr, _tree.add(slope, correction))

        y_k = local_steps(iterate, y, turn, self.local_steps)
        mean_slope = _tree.scale(
            1 / (self.local_steps * self.lr), _tree.subtract(y, y_k)
        )
        change = _tree.subtract(mean_slope, c)  # of c_k
        sent_back = Iterate(Pair(None, y_k), control=Pair(None, change))
        return _tree.add(c_k, change), sent_back

    def step(self, server: Controlled, mean: Iterate, turn: ServerTurn) -> Controlled:
        """Make the server's step."""
        y, c = server.point.y, server.control.y
        y = _tree.add_scaled(y, self.lr_server, _tree.subtract(mean.point.y, y))
        c = _tree.add_scaled(c, turn.share(), mean.control.y)
        return Controlled(Pair(server.point.x, y), Pair(None, c))
