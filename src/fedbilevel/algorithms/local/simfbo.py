r"""SimFBO: three variables in one exchange, and a server that steps for itself.

Round, with S a cohort of n clients. Client i from (x, y, z), tau local steps:

    D_y = gy_i(x_i, y_i; .),   D_z = hvp_i(x_i, y_i; .)[z_i] - fy_i(x_i, y_i; .)
    D_x = fx_i(x_i, y_i; .) - jvp_i(x_i, y_i; .)[z_i]         own samples for each line
    q_i += D,    y_i -= lr_y D_y,   z_i -= lr_z D_z,   x_i -= lr_x D_x
    send q_i, the sums of the directions
Server:
    q = mean over S of q_i
    y -= gamma_y q_y,   z = Proj_{||z|| <= r}(z - gamma_z q_z),   x -= gamma_x q_x

With `fewest_steps` client i makes tau_i local steps, a number of its own between that
and tau, the same in every round. Then SimFBO leans towards those that make many, and
with `normalized` (ShroFBO) it does not:

    h_i = q_i / tau_i,   q = rho mean over S of h_i,   rho = mean over S of tau_i

z is shared, so that the limit is unbiased where clients differ (tau = 1), up to a drift
(tau > 1), of which `controls` or an `anchor` leave nothing. With gamma = lr the server
averages local iterates: that is FedBiO. Controls follow from the sums that are sent:
c <- c + (n/K) (q / tau - c).

Exchanges a round: 1, with dx + 2 dy floats each way, and twice as many down with
controls. A normalized reply has one float more.

Reference: Yang, Xiao, Ji, arXiv 2305.19442 (NeurIPS 2023).
Deviations: the listing is a reconstruction. The paper's abstract was read, not its
body. All coefficients of local steps are 1. tau_i is drawn once, uniformly, and steps
beyond it are computed, but not taken. The cohort's mean is by the weights of the
clients in it, in place of K/n times the sum of shares. The two are the same where
weights are equal. rho is that of the cohort.
"""

import equinox as eqx
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Number, Triple
from fedbilevel.algorithms.local._bases import ByLinearSystem
from fedbilevel.algorithms.parts import Iterate, OwnNumber, move, own_number
from fedbilevel.errors import InvalidInputError
from fedbilevel.schedules import choice, count, step

__all__ = ["SimFBO"]


class Normalized(eqx.Module):
    """The mean direction of a client's local steps, and how many there were."""

    direction: Triple
    steps: Array


class SimFBO(ByLinearSystem):
    """Local steps on x, y and z; the server steps along their summed directions."""

    reference = "Yang, Xiao, Ji 2023, arXiv 2305.19442"
    provenance = "abstract read; listing reconstructed, unverified"
    sums = True
    returns_point = False

    lr_x: Number = step("upper", "local step of x")
    lr_y: Number = step("lower", "local step of y")
    lr_z: Number = step("auxiliary", "local step of z")
    gamma_x: Number = step("upper", "the server's step of x along the sum")
    gamma_y: Number = step("lower", "the server's step of y along the sum")
    gamma_z: Number = step("auxiliary", "the server's step of z along the sum")
    local_steps: int = count("local steps of a round, tau", kw_only=True)
    fewest_steps: int = count(
        "fewest local steps of a client, where each has a number of its own, up to tau",
        default=0,
        least=0,
        kw_only=True,
    )
    normalized: bool = choice(
        "divide a client's sum by its number of steps", default=False, kw_only=True
    )

    def __check_init__(self) -> None:
        if self.fewest_steps > self.local_steps:
            raise InvalidInputError(
                f"`{type(self).__name__}(fewest_steps={self.fewest_steps})`: at most "
                f"local_steps, which is {self.local_steps}."
            )

    def parts(self):
        """Let clients stop after tau_i steps, where they differ."""
        fewest = self.fewest_steps
        return (OwnNumber(fewest, self.local_steps),) if fewest else ()

    def sent(self, end, total, turn):
        """Return q_i, or h_i and tau_i."""
        if not self.normalized:
            return total
        tau = own_number(turn, self.fewest_steps or self.local_steps, self.local_steps)
        number = tau.astype(self.gamma_x.dtype)
        return Normalized(_tree.scale(1 / number, total), number)

    def received(self, server, mean):
        """Make the server's step along q."""
        q = _tree.scale(mean.steps, mean.direction) if self.normalized else mean
        steps = Triple(self.gamma_x, self.gamma_y, self.gamma_z)
        w = move(server.point, steps, q)
        return Iterate(w), _tree.scale(1 / self.local_steps, q)
