r"""FedBiO with momentum on x: federated MA-SOBA.

With omega, q, nu of FedBiO (`fedbio`), sampled afresh for
each line, all at the old point, client k at local iteration t:

    u_t = (1 - alpha a_{t-1}) u_{t-1} + alpha a_{t-1} nu,      u_0 = nu
    y <- y - lr_y a_t omega,   z <- z - lr_z a_t q,   x <- x - lr_x a_t u_t
    every p iterations:  x, y, z, u <- mean over clients

u is averaged with the point that it moves, so that clients keep nothing, and an absent
client continues from the mean. It is unbiased where clients differ, as FedBiO. With
alpha = a = 1 it is FedBiO. At p = 1 on one client it is MA-SOBA (`ma-soba`) with
samples of its own for each line. a_t is any schedule.

Exchanges a round: 1, with 2 dx + 2 dy floats each way. A step costs FedBiO's.

Reference: Chen, Xiao, Balasubramanian, arXiv 2306.12067 (MA-SOBA, JMLR 2024), for the
average; Li, Huang, Huang, arXiv 2302.06701, for the local steps.
Deviations: the two are put together here, in no paper that is known. z starts at 0.
"""

from fedbilevel._types import Number, Triple
from fedbilevel.algorithms.local._bases import ByLinearSystem
from fedbilevel.estimators import MovingAverage, Plain
from fedbilevel.schedules import Schedule, count, schedule, step, weight

__all__ = ["FedBiOMomentum"]


class FedBiOMomentum(ByLinearSystem):
    """Local steps on x, y and z, that of x along a moving average."""

    reference = "Chen et al. 2024, arXiv 2306.12067; arXiv 2302.06701"
    provenance = "ours: two known methods put together"
    estimator = Triple(MovingAverage(), Plain(), Plain())

    lr_x: Number = step("upper", "x moves by lr_x a u", over="a")
    lr_y: Number = step("lower", "y moves by lr_y a omega", over="a")
    lr_z: Number = step("auxiliary", "z moves by lr_z a q", over="a")
    alpha: Number = weight("upper", "u forgets by alpha a a step", over="a")
    a: Schedule = schedule("common shape of steps and weight over t", default=1.0)
    local_steps: int = count("local steps between two averages, p", kw_only=True)
