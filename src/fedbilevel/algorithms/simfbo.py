r"""SimFBO: three variables in one exchange, and a server that steps for itself.

Round, with S a cohort of n clients. Client i from (x, y, z), tau local steps:

    D_y = gy_i(x_i, y_i; .),   D_z = hvp_i(x_i, y_i; .)[z_i] - fy_i(x_i, y_i; .)
    D_x = fx_i(x_i, y_i; .) - jvp_i(x_i, y_i; .)[z_i]         own samples for each line
    q_i += D,    y_i -= lr_y D_y,   z_i -= lr_z D_z,   x_i -= lr_x D_x
    send q_i, the sums of the directions
Server:
    q = mean over S of q_i
    y -= gamma_y q_y,   z = Proj_{||z|| <= r}(z - gamma_z q_z),   x -= gamma_x q_x

With `drift` every D is corrected before the step (`_drift.py`):

    controls:  D <- D - c_i + c      c_i the mean of D over the client's last tau steps,
                                     kept there, and c the mean of c_i over all clients,
                                     c <- c + (n/K) (q / tau - c)
    anchor:    D <- D - D(w_0) + c   with the same samples at the received point w_0,
                                     and c the clients' mean of D(w_0)

With `fewest_steps` client i makes tau_i local steps, a number of its own between that
and tau, the same in every round. Then SimFBO leans towards those that make many, and
with `normalized` (ShroFBO, `fedbilevel.algorithms.shrofbo`) it does not:

    h_i = q_i / tau_i,   q = rho mean over S of h_i,   rho = mean over S of tau_i

z is shared, so that the limit is unbiased where clients differ (tau = 1), up to a drift
(tau > 1), of which `drift` leaves nothing. With gamma = lr the server averages local
iterates: that is FedBiO.

Exchanges a round: 1, with dx + 2 dy floats each way, and twice as many down with
controls; 2 with an anchor, with twice as many each way. A normalized reply has one
float more. With a `distance` products are central differences of two gradients of g
each: no second derivative.

Reference: Yang, Xiao, Ji, arXiv 2305.19442 (NeurIPS 2023).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. All coefficients of local steps are 1; tau_i is drawn once, uniformly, and steps
beyond it are computed, but not taken. The cohort's mean is by the weights of the
clients in it, in place of K/n times the sum of shares, which is the same where weights
are equal; rho is that of the cohort. `drift` and `distance` are not in the paper.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Triple, Upper
from fedbilevel.algorithms._auxiliary import by_differences, in_ball, three_directions
from fedbilevel.algorithms._base import (
    AbstractAlgorithm,
    Phase,
    Phases,
    ServerTurn,
    Turn,
    with_turn,
)
from fedbilevel.algorithms._drift import (
    ANCHOR,
    CONTROLS,
    DRIFT,
    Correction,
    anchor,
    first_control,
    own_control,
    renewed_mean,
)
from fedbilevel.algorithms._local import (
    Iterate,
    check_counts,
    check_words,
    evaluate,
    local_steps,
    move,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.schedules import (
    as_optional_number,
    choice,
    count,
    number,
    part,
    word,
)

__all__ = ["SimFBO"]


class Normalized(eqx.Module):
    """The mean direction of a client's local steps, and how many there were."""

    direction: Triple
    steps: Array


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
    drift: str | None = word(
        "how local steps are corrected", DRIFT, default=None, kw_only=True
    )
    fewest_steps: int = count(
        "fewest local steps of a client, where each has a number of its own, up to tau",
        default=0,
        kw_only=True,
    )
    normalized: bool = choice(
        "divide a client's sum by its number of steps", default=False, kw_only=True
    )
    distance: Number | None = part(
        "distance of the points whose gradients' difference stands for a product",
        converter=as_optional_number,
        default=None,
        kw_only=True,
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        check_counts(self, 0, fewest_steps=self.fewest_steps)
        check_words(self)
        if self.fewest_steps > self.local_steps:
            raise InvalidInputError(
                f"`SimFBO(fewest_steps={self.fewest_steps})`: at most local_steps, "
                f"which is {self.local_steps}."
            )
        if self.fewest_steps and self.drift is not None:
            raise InvalidInputError(
                f"`SimFBO(fewest_steps={self.fewest_steps}, drift='{self.drift}')`: "
                "a correction is for equal numbers of steps. Leave out one of the two."
            )

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y, 0)."""
        w = Triple(x, y, _tree.zeros_like(y))
        return Iterate(w, control=first_control(self.drift, w))

    def init_client(self, x: Upper, y: Lower) -> Triple | None:
        """Start with c_i = 0, if there are controls; else clients keep nothing."""
        return own_control(self.drift, Triple(x, y, _tree.zeros_like(y)))

    def phases(self) -> Phases:
        """Return the exchanges of a round."""
        up = with_turn(self.step)
        steps = Phase("local", lambda server: server, self.local, up)
        if self.drift != ANCHOR:
            return (steps,)
        return anchor(self.draw, self.local_steps), steps

    def point(self, server: Iterate) -> Pair:
        """Return the server's x and y."""
        return Pair(server.point.x, server.point.y)

    def draw(self, oracle: Oracle, key: Key) -> Triple:
        """Draw the samples of a step; return the maps D_x, D_y and D_z."""
        return three_directions(by_differences(oracle, self.distance), key)

    def local(self, message: Iterate, c_i: Triple | None, oracle: Oracle, turn: Turn):
        """Make tau_i local steps; return the sum of their directions."""
        steps, tau = Triple(self.lr_x, self.lr_y, self.lr_z), self.steps_of(turn)
        correction = Correction(message.point, message.control, c_i)
        first = turn.steps(self.local_steps)[0]

        def iterate(carry: tuple[Triple, Triple], time: tuple[Any, Key]):
            (w, q), (t, key) = carry, time
            D = evaluate(correction.corrected(self.draw(oracle, key)))(w)
            made = (move(w, steps, D), _tree.add(q, D))
            return _tree.select(t - first < tau, made, carry)

        start = (message.point, _tree.zeros_like(message.point))
        _, q = local_steps(iterate, start, turn, self.local_steps)
        c_i, _ = correction.renewed(q, self.local_steps)
        if not self.normalized:
            return c_i, q
        number = tau.astype(self.gamma_x.dtype)
        return c_i, Normalized(_tree.scale(1 / number, q), number)

    def steps_of(self, turn: Turn) -> Array:
        """Return tau_i, the same in every round."""
        fewest, tau = self.fewest_steps or self.local_steps, self.local_steps
        return jr.randint(turn.spare_keys(1)[0], (), fewest, tau + 1, jnp.int32)

    def step(self, server: Iterate, reply: Any, turn: ServerTurn) -> Iterate:
        """Make the server's step."""
        steps, c = Triple(self.gamma_x, self.gamma_y, self.gamma_z), server.control
        q = _tree.scale(reply.steps, reply.direction) if self.normalized else reply
        if self.drift == CONTROLS:
            # What clients sent tells how their controls changed.
            change = _tree.subtract(_tree.scale(1 / self.local_steps, q), c)
            c = renewed_mean(c, change, turn)
        w = in_ball(move(server.point, steps, q), self.radius)
        return Iterate(w, control=c)
