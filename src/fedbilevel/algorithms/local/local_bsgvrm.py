r"""LocalBSGVRM: local bilevel stochastic gradient with variance-reduced momentum.

Client k at local iteration t, with ONE bundle b_t = {xi, zeta_0..zeta_Q} and ONE zeta_t
used at both points (algorithm 2 of the paper; need alpha eta^2 < 1 and beta eta^2 < 1):

    a = alpha eta_{t-1}^2,   c = beta eta_{t-1}^2
    u_t = (1 - a) (u_{t-1} - h_k(x_{t-1}, y_{t-1}; b_t)) + h_k(x_t, y_t; b_t)
    v_t = (1 - c) (v_{t-1} - gy_k(x_{t-1}, y_{t-1}; zeta_t)) + gy_k(x_t, y_t; zeta_t)
    x_{t+1} = x_t - rho1 eta_t u_t,     y_{t+1} = y_t - rho2 eta_t v_t
    if (t+1) mod p == 0:  u_t, v_t, x_{t+1}, y_{t+1} <- mean over clients

where u_0 and v_0 are means over B independent bundles at (x_0, y_0): that is the
wrapper `first_batch`, B = 1 without it. The previous point is the client's own, before
averaging: only then does mean_k u_t track mean_k h_k exactly when oracles are exact.

Exchanges a round: 1, with 2 (dx + dy) floats each way. Samples a step: Q + 3. Oracle
calls: twice LocalBSGM's. Right for clients whose data are alike, as LocalBSGM.

Readings: u_t, not the printed u_{t+1}, is averaged. The start (x_0, y_0) is arbitrary.
"LocalBSGVR" in the paper's abstract is this algorithm. p = 1 is allowed.
Deviations: at t = 0 the two points coincide, which costs one evaluation more than the
listing and changes nothing. With fewer than K participants, a client that missed the
last round takes the received point as its previous one (momentum without correction).
The wrapper `absent` offers two alternatives.
"""

from fedbilevel.algorithms.local._bases import Founding
from fedbilevel.estimators import Storm
from fedbilevel.schedules import Number, Schedule, count, schedule, step, weight

__all__ = ["LocalBSGVRM"]


class LocalBSGVRM(Founding):
    """STORM on hypergradient and lower gradient, averaged every p steps."""

    reference = "Gao 2022, arXiv 2204.13299, Algorithm 2"
    provenance = "listing read in the paper"
    estimator = Storm()

    eta: Schedule = schedule("common step of x and y, or its schedule")
    alpha: Number = weight("upper", "u forgets by alpha eta^2", over="eta", power=2)
    beta: Number = weight("lower", "v forgets by beta eta^2", over="eta", power=2)
    rho1: Number = step("upper", "x moves by rho1 eta u", over="eta")
    rho2: Number = step("lower", "y moves by rho2 eta v", over="eta")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
