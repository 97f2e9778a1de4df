r"""LocalBSGM: local bilevel stochastic gradient with momentum.

Client k at local iteration t, with bundle b_t = {xi, zeta_0..zeta_Q} and zeta_t, all
independent (algorithm 1 of the paper; need alpha eta < 1 and beta eta < 1):

    u_t = (1 - alpha eta) u_{t-1} + alpha eta h_k(x_t, y_t; b_t)
    v_t = (1 - beta eta)  v_{t-1} + beta eta  grad_y g_k(x_t, y_t; zeta_t)
    x_{t+1} = x_t - rho1 eta u_t,     y_{t+1} = y_t - rho2 eta v_t
    if (t+1) mod p == 0:  u_t, v_t, x_{t+1}, y_{t+1} <- mean over clients

with u_0 = h_k(x_0, y_0; b_0), v_0 = grad_y g_k(x_0, y_0; zeta_0), and h_k the
stochastic Neumann hypergradient on the client's own Hessian
(`fedbilevel.hypergradient.Neumann`). With `drift` the samples G of both lines, h_k and
grad_y g_k, are corrected before they are averaged into u and v (`_drift.py`):

    controls:  G <- G - c_k + c      c_k the mean of G over the client's last p steps,
                                     kept there, and c the mean of c_k over all clients
    anchor:    G <- G - G(w_0) + c   at the received w_0, c the clients' mean of G(w_0)

Exchanges a round: 1, with 2 (dx + dy) floats each way, and 3 (dx + dy) with controls; 2
with an anchor, and as many floats. Samples a step: Q + 3.
Right for clients whose data are alike; where they differ, the mean of the clients'
inverse Hessians is not the inverse of the mean, and the limit is biased. `drift` makes
it that of p = 1, and no better.

Readings: the printed sync averages u_{t+1}, which does not exist yet; it is u_t. Both
hyper-gradients are taken at (x_t, y_t). The start y_0 is arbitrary. p = 1 is allowed.
Deviations: with a schedule in place of the constant eta, the weight at t uses
eta_{t-1}, as in LocalBSGVRM. With fewer than K participants the received u, v, x, y
replace the client's own. `drift` is not in the paper.
"""

from functools import partial
from typing import Any, ClassVar

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._drift import (
    DRIFT,
    Correction,
    corrected_rounds,
    first_control,
    own_control,
)
from fedbilevel.algorithms._founding import (
    check_letters,
    effective_values,
    from_effective,
    warm_start,
)
from fedbilevel.algorithms._local import (
    Iterate,
    at_time,
    check_counts,
    check_words,
    evaluate,
    hypergradient_and_slope,
    local_steps,
    momentum_weight,
    move,
)
from fedbilevel.estimators import MovingAverage
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, count, number, part, schedule, word

__all__ = ["LocalBSGM"]


class LocalBSGM(AbstractAlgorithm):
    """Moving averages of hypergradient and lower gradient, averaged every p steps."""

    reference: ClassVar[str] = "Gao 2022, arXiv 2204.13299, Algorithm 1"
    provenance: ClassVar[str] = "listing read in the paper"
    inverts_locally: ClassVar[bool] = True

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi")
    eta: Schedule = schedule("common step of x and y, or its schedule")
    alpha: Number = number("u forgets by alpha eta a step")
    beta: Number = number("v forgets by beta eta a step")
    rho1: Number = number("x moves by rho1 eta u", step="upper")
    rho2: Number = number("y moves by rho2 eta v", step="lower")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
    warm_start: int = count("lower steps before the first round", default=0)
    drift: str | None = word(
        "how local steps are corrected", DRIFT, default=None, kw_only=True
    )

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        check_counts(self, 0, warm_start=self.warm_start)
        check_letters(self, power=1)
        check_words(self)

    @classmethod
    def effective(
        cls, hypergradient: AbstractHypergradient, *, eta: Any = 1.0, **values: Any
    ) -> "LocalBSGM":
        """Build from upper_step, lower_step, upper_weight and lower_weight at t = 0.

        x moves by upper_step * u, and u keeps 1 - upper_weight of its memory.
        """
        return from_effective(cls, 1, hypergradient, eta=eta, **values)

    def effective_values(self, t: int = 0) -> dict[str, float]:
        """Return the effective steps and weights at iteration t."""
        return effective_values(self.step(t), self.weight(max(t, 1)))

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y); directions are formed on the clients at t = 0."""
        control = first_control(self.drift, Pair(x, y))
        return Iterate(Pair(x, y), _tree.zeros_like(Pair(x, y)), control)

    def init_client(self, x: Upper, y: Lower) -> Pair | None:
        """Start with c_k = 0, if there are controls; else clients keep nothing."""
        return own_control(self.drift, Pair(x, y))

    def setup(self) -> Phases:
        """Return the optional warm start of the lower level."""
        first = self.step(0).y
        return (warm_start(self.warm_start, first),) if self.warm_start else ()

    def phases(self) -> Phases:
        """Return the exchanges of a round."""
        draw = partial(hypergradient_and_slope, self.hypergradient)
        return corrected_rounds(self.local, self.drift, draw, self.local_steps)

    def point(self, server: Iterate) -> Pair:
        """Return the averaged iterate."""
        return server.point

    def step(self, t: Any) -> Pair:
        """Return rho1 eta_t and rho2 eta_t."""
        eta = at_time(self.eta, t, self.rho1)
        return Pair(self.rho1 * eta, self.rho2 * eta)

    def weight(self, t: Any) -> Pair:
        """Return alpha eta_{t-1} and beta eta_{t-1}; both are 1 at t = 0."""
        u = momentum_weight(self.alpha, self.eta, t, 1)
        v = momentum_weight(self.beta, self.eta, t, 1)
        return Pair(u, v)

    def local(self, message: Iterate, c_k: Pair | None, oracle: Oracle, turn: Turn):
        """Make p local steps."""
        correction = Correction(message.point, message.control, c_k)

        def iterate(carry: tuple[Pair, Pair, Pair | None], time: tuple[Any, Key]):
            (w, d, total), (t, key) = carry, time
            maps = hypergradient_and_slope(self.hypergradient, oracle, key)
            average = (evaluate(correction.corrected(maps)), w, None, d, self.weight(t))
            d, sample = correction.filtered(MovingAverage(), *average)
            return move(w, self.step(t), d), d, correction.summed(total, sample)

        start = (message.point, message.direction, correction.no_sum())
        w, d, total = local_steps(iterate, start, turn, self.local_steps)
        c_k, change = correction.renewed(total, self.local_steps)
        return c_k, Iterate(w, d, change)
