r"""FedAvg on the lower level at the given x: the baseline without tuning.

    min_y  1/K sum_k g_k(x, y),   x fixed

Client k, every p iterations averaged:

    y <- y - lr gy_k(x, y; zeta)
    every p iterations:  y <- mean over clients

With a constant step and p > 1 the limit is off where clients differ: for
g_k = (h_k/2)(y - m_k)^2 it is sum_k a_k m_k / sum_k a_k with a_k = 1 - (1 - lr h_k)^p.

Exchanges a round: 1, with dy floats each way. x is sent once.

Reference: McMahan et al., arXiv 1602.05629; local SGD: arXiv 1805.09767.
Deviations: clients are weighted as their data are (`ClientData.weights`), equally by
default, not by their number of rows.
"""

from fedbilevel.algorithms.local._bases import ByLowerSlope
from fedbilevel.schedules import Number, count, step

__all__ = ["FedAvg"]


class FedAvg(ByLowerSlope):
    """Local gradient steps on y at the given x, averaged every p steps."""

    reference = "McMahan et al. 2017, arXiv 1602.05629"
    provenance = "standard method, from memory"

    lr: Number = step("lower", "y moves by lr gy")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
