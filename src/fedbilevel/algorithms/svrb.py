r"""SVRB: variance-reduced momentum on both levels, for one lower problem.

    u_t = h(x_t, y_t; b_t) + (1 - alpha eta_{t-1}^2) (u_{t-1} - h(w_{t-1}; b_t))
    v_t = gy(x_t, y_t; .) + (1 - beta eta_{t-1}^2) (v_{t-1} - gy(w_{t-1}; .))
    x_{t+1} = x_t - rho1 eta_t u_t,     y_{t+1} = y_t - rho2 eta_t v_t

with w = (x, y) and one bundle at both points. For many lower problems there is RSVRB
(`fedbilevel.algorithms.rsvrb`).

It is LocalBSGVRM (`fedbilevel.algorithms.local_bsgvrm`) on the rows of all clients, as
MRBO is. From Python it runs on K clients, too, right only for clients that are alike.

Reference: Guo, Hu, Zhang, Yang, arXiv 2105.02266.
Deviations: the abstract was read; the listing is reconstructed, with the series of
LocalBSGVRM for the inverse, which the paper may track instead.
"""

from fedbilevel.algorithms._absence import KEEP
from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM

__all__ = ["SVRB"]

SVRB = Preset(
    LocalBSGVRM,
    summary="Variance-reduced momentum on both levels, on one machine.",
    reference="Guo et al. 2021, arXiv 2105.02266",
    provenance="abstract read; listing reconstructed, unverified",
    answers="single machine",
    parts={"drift": None, "absent": KEEP, "own_lower": False},
    pools=True,
)
