r"""SimFBO: three variables in one exchange, and a server that steps for itself.

Round, with S a cohort of n clients. Client i from (x, y, z), tau local steps:

    D_y = gy_i(x_i, y_i; .),   D_z = hvp_i(x_i, y_i; .)[z_i] - fy_i(x_i, y_i; .)
    D_x = fx_i(x_i, y_i; .) - jvp_i(x_i, y_i; .)[z_i]         own samples for each line
    q_i += D,    y_i -= lr_y D_y,   z_i -= lr_z D_z,   x_i -= lr_x D_x
    send q_i, the sums of the directions
Server:
    q = mean over S of q_i
    y -= gamma_y q_y,   z = Proj_{||z|| <= r}(z - gamma_z q_z),   x -= gamma_x q_x

z is shared, so that the limit is unbiased where clients differ (tau = 1), up to a drift
(tau > 1). With gamma = lr the server averages local iterates: that is FedBiO.

Exchanges a round: 1, with dx + 2 dy floats each way.

Reference: Yang, Xiao, Ji, arXiv 2305.19442 (NeurIPS 2023).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. tau is the same on all clients, and all coefficients of local steps are 1. The
cohort's mean is by the weights of the clients in it, in place of K/n times the sum of
shares, which is the same where weights are equal.
"""

from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Triple, Upper
from fedbilevel.algorithms._auxiliary import in_ball, three_directions
from fedbilevel.algorithms._base import AbstractAlgorithm, Phase, Phases, Turn
from fedbilevel.algorithms._local import check_counts, evaluate, local_steps, move
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_optional_number, count, number, part

__all__ = ["SimFBO"]


class SimFBO(AbstractAlgorithm):
    """Local steps on x, y and z; the server steps along their summed directions."""

    reference: ClassVar[str] = "Yang, Xiao, Ji 2023, arXiv 2305.19442"
    provenance: ClassVar[str] = "abstract read; listing reconstructed, unverified"

    lr_x: Number = number("local step of x", step="upper")
    lr_y: Number = number("local step of y", step="lower")
    lr_z: Number = number("local step of z", step="lower")
    gamma_x: Number = number(
        "the server's step of x along the sum of directions", step="upper"
    )
    gamma_y: Number = number(
        "the server's step of y along the sum of directions", step="lower"
    )
    gamma_z: Number = number(
        "the server's step of z along the sum of directions", step="lower"
    )
    local_steps: int = count("local steps of a round, tau", kw_only=True)
    radius: Number | None = part(
        "bound of ||z||, r", converter=as_optional_number, default=None, kw_only=True
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)

    def init_server(self, x: Upper, y: Lower) -> Triple:
        """Start at (x, y, 0)."""
        return Triple(x, y, _tree.zeros_like(y))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients are stateless."""

    def phases(self) -> Phases:
        """Return the one exchange of a round."""
        return (Phase("local", lambda server: server, self.local, self.step),)

    def point(self, server: Triple) -> Pair:
        """Return the server's x and y."""
        return Pair(server.x, server.y)

    def local(self, w: Triple, client: None, oracle: Oracle, turn: Turn):
        """Make tau local steps; return the sum of their directions."""
        steps = Triple(self.lr_x, self.lr_y, self.lr_z)

        def iterate(carry: tuple[Triple, Triple], time: tuple[Any, Key]):
            (w, q), (_, key) = carry, time
            D = evaluate(three_directions(oracle, key))(w)
            return move(w, steps, D), _tree.add(q, D)

        start = (w, _tree.zeros_like(w))
        return client, local_steps(iterate, start, turn, self.local_steps)[1]

    def step(self, w: Triple, q: Triple) -> Triple:
        """Make the server's step."""
        steps = Triple(self.gamma_x, self.gamma_y, self.gamma_z)
        return in_ball(move(w, steps, q), self.radius)
