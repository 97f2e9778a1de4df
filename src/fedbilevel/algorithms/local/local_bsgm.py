r"""LocalBSGM: local bilevel stochastic gradient with momentum.

Client k at local iteration t, with bundle b_t = {xi, zeta_0..zeta_Q} and zeta_t, all
independent (algorithm 1 of the paper; need alpha eta < 1 and beta eta < 1):

    u_t = (1 - alpha eta) u_{t-1} + alpha eta h_k(x_t, y_t; b_t)
    v_t = (1 - beta eta)  v_{t-1} + beta eta  grad_y g_k(x_t, y_t; zeta_t)
    x_{t+1} = x_t - rho1 eta u_t,     y_{t+1} = y_t - rho2 eta v_t
    if (t+1) mod p == 0:  u_t, v_t, x_{t+1}, y_{t+1} <- mean over clients

with u_0 = h_k(x_0, y_0; b_0), v_0 = grad_y g_k(x_0, y_0; zeta_0), and h_k the
stochastic Neumann hypergradient on the client's own Hessian
(`fedbilevel.hypergradient.Neumann`).

Exchanges a round: 1, with 2 (dx + dy) floats each way. Samples a step: Q + 3.
Right for clients whose data are alike. Where they differ, the mean of the clients'
inverse Hessians is not the inverse of the mean, and the limit is biased. With controls
or an anchor (`fedbilevel.algorithms.wrappers`) it is the limit of p = 1, no better.

Readings: the printed sync averages u_{t+1}, which does not exist yet. Here it is u_t.
Both hypergradients are taken at (x_t, y_t). The start y_0 is arbitrary. p = 1 is
allowed.
Deviations: with a schedule in place of the constant eta, the weight at t uses
eta_{t-1}, as in LocalBSGVRM. With fewer than K participants the received u, v, x, y
replace the client's own.
"""

from fedbilevel.algorithms.local._bases import Founding
from fedbilevel.estimators import MovingAverage
from fedbilevel.schedules import Number, Schedule, count, schedule, step, weight

__all__ = ["LocalBSGM"]


class LocalBSGM(Founding):
    """Moving averages of hypergradient and lower gradient, averaged every p steps."""

    reference = "Gao 2022, arXiv 2204.13299, Algorithm 1"
    provenance = "listing read in the paper"
    estimator = MovingAverage()

    eta: Schedule = schedule("common step of x and y, or its schedule")
    alpha: Number = weight("upper", "u forgets by alpha eta a step", over="eta")
    beta: Number = weight("lower", "v forgets by beta eta a step", over="eta")
    rho1: Number = step("upper", "x moves by rho1 eta u", over="eta")
    rho2: Number = step("lower", "y moves by rho2 eta v", over="eta")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
