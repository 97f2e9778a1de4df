r"""STEM on the lower level at the given x: STORM's momentum on clients and server.

    min_y  1/K sum_k g_k(x, y),   x fixed

Client k, with the same sample zeta at both points and w_k its own last y_k:

    d_k <- gy_k(x, y_k; zeta) + (1 - a_t) (d_k - gy_k(x, w_k; zeta)),
    w_k = y_k,     y_k <- y_k - lr eta_t d_k
    every p iterations:  y_k, d_k <- means over clients

with a_t = c eta_{t-1}^2. With the wrapper `first_batch` the first direction is the mean
of B samples. The paper averages y and d and then moves. To move first leads to the same
point. w_k is the point of client k itself before the average. So with exact oracles the
mean of d_k is the mean of the slopes, for any p. Local steps still drift if p > 1.

With a_t = 1 it is FedAvg. On one client it is STORM, whatever p is.

Exchanges a round: 1, with 2 dy floats each way. x is sent once. A step evaluates gy
twice.

Reference: Khanduri et al., arXiv 2106.10435 (NeurIPS 2021).
Deviations: the abstract was read, and a summary of the updates, not the paper's body.
The paper's eta_t is lr eta_t here, its schedule kappa/(w_t + sigma^2 t)^(1/3) any
schedule eta_t. A client that missed a round has no w_k of use: it takes w_k = y_k.
"""

from fedbilevel.algorithms.local._bases import ByLowerSlope
from fedbilevel.estimators import Storm
from fedbilevel.schedules import Number, Schedule, count, schedule, step, weight

__all__ = ["STEM"]


class STEM(ByLowerSlope):
    """STORM on y at the given x, averaged with its directions every p steps."""

    reference = "Khanduri et al. 2021, arXiv 2106.10435"
    provenance = "abstract read; listing reconstructed, unverified"
    estimator = Storm()

    lr: Number = step("lower", "y moves by lr eta_t d", over="eta")
    c: Number = weight("lower", "d forgets by c eta^2 a step", over="eta", power=2)
    eta: Schedule = schedule("shape of the steps over t", default=1.0)
    local_steps: int = count("local steps between two averages, p", kw_only=True)
