r"""RSVRB: variance-reduced momentum with many lower problems, a few of them at a time.

Block k has a lower problem of its own; in every round only the blocks drawn by
`--participants` move. With w_k = (x, y_k), for each of them:

    u_k = h_k(w_k; b) + (1 - alpha eta_{t-1}^2) (u - h_k(w_k before; b))
    v_k = gy_k(w_k; .) + (1 - beta eta_{t-1}^2) (v_k - gy_k(w_k before; .))
    x <- x - rho1 eta_t u_k,   y_k <- y_k - rho2 eta_t v_k;    x, u <- mean over blocks

A block that is not drawn keeps its y_k and v_k. With one block it is SVRB.

A block is a client here, so that it is FedBiOAcc-Local
(`fedbilevel.algorithms.fedbioacc_local`), LocalBSGVRM with a y of its own for every
client: x, u <- mean over those that took part.

Reference: Guo, Hu, Zhang, Yang, arXiv 2105.02266.
Deviations: the abstract was read; the listing is reconstructed. Blocks run at once, not
on one machine in turn, and corrections are not scaled by their number.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM

__all__ = ["RSVRB"]

RSVRB = Preset(
    LocalBSGVRM,
    summary="Variance-reduced momentum with a lower problem in every block.",
    reference="Guo et al. 2021, arXiv 2105.02266",
    provenance="abstract read; listing reconstructed, unverified",
    answers="own y, of each block",
    parts={"own_lower": True, "drift": None},
)
