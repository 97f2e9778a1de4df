r"""FedBiOAcc: STORM on x, y and the linear-system variable z, for a shared y.

With omega, q, nu of FedBiO, sampled afresh for each line, and any schedule a_t, such as
delta/(t_0 + t)^(1/3), client k at local iteration t:

    omega_t = omega(w_t) + (1 - c_omega a_{t-1}^2) (omega_{t-1} - omega(w_{t-1}))
    q_t     = q(w_t)     + (1 - c_q     a_{t-1}^2) (q_{t-1}     - q(w_{t-1}))
    nu_t    = nu(w_t)    + (1 - c_nu    a_{t-1}^2) (nu_{t-1}    - nu(w_{t-1}))
    y <- y - gamma a_t omega_t,   z <- z - tau a_t q_t,   x <- x - eta a_t nu_t
    every p iterations:  x, y, z, omega, q, nu <- mean over clients

where w = (x, y, z) and both points of a line use one sample. First directions by direct
evaluation. Unbiased where clients differ, as FedBiO, and with a linear speed-up in K.

Exchanges a round: 1, with 2 (dx + 2 dy) floats each way. A step costs twice FedBiO's.

Reference: Li, Huang, Huang, arXiv 2302.06701 (NeurIPS 2023).
Deviations: the listing is a reconstruction. The paper's abstract was read, not its
body. The previous point is the client's own, before averaging. All three lines use the
old point. The wrapper `alternating` moves y, then z, then x at the client's fresh
values, and is biased where clients differ, as with FedBiO. z starts at 0, and the
wrapper `ball` bounds it (the paper suggests L0/mu). With fewer than K participants a
client that missed the last round corrects from the received point. The wrapper `absent`
offers two alternatives.
"""

from fedbilevel.algorithms.local._bases import ByLinearSystem
from fedbilevel.estimators import Storm
from fedbilevel.schedules import Number, Schedule, count, schedule, step, weight

__all__ = ["FedBiOAcc"]


class FedBiOAcc(ByLinearSystem):
    """STORM on x, y and z, averaged every p steps."""

    reference = "Li, Huang, Huang 2023, arXiv 2302.06701"
    provenance = "abstract read; listing reconstructed, unverified"
    estimator = Storm()

    a: Schedule = schedule("common step of x, y and z, or its schedule")
    eta: Number = step("upper", "x moves by eta a nu", over="a")
    gamma: Number = step("lower", "y moves by gamma a omega", over="a")
    tau: Number = step("auxiliary", "z moves by tau a q", over="a")
    c_nu: Number = weight("upper", "nu forgets by c_nu a^2", over="a", power=2)
    c_omega: Number = weight("lower", "omega forgets by c_omega a^2", over="a", power=2)
    c_q: Number = weight("auxiliary", "q forgets by c_q a^2", over="a", power=2)
    local_steps: int = count("local steps between two averages, p", kw_only=True)
