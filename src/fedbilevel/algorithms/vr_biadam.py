r"""VR-BiAdam: STORM on both levels, and steps scaled by their second moments.

With one bundle b and one zeta at both points, and weights alpha and beta (1 at t = 0):

    u_t = h(w_t; b) + (1 - alpha) (u_{t-1} - h(w_{t-1}; b))
    v_t = gy(w_t; zeta) + (1 - beta) (v_{t-1} - gy(w_{t-1}; zeta))
    x <- x - lr_x a_t u / A,   y <- y - lr_y a_t v / B

with w = (x, y), and A and B of BiAdam (`fedbilevel.algorithms.biadam`), of which it is
the variant corrected=true. Oracle calls: twice BiAdam's. What is said there of K
clients holds; where directions were last formed is sent, too.

Reference: Huang, Li, Huang, arXiv 2106.11396.
Deviations: those of BiAdam; the paper's weights follow c eta_t^2, here they are
constant.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.biadam import BiAdam

__all__ = ["VRBiAdam"]

VRBiAdam = Preset(
    BiAdam,
    summary="STORM on both levels, with adaptive steps.",
    reference="Huang, Li, Huang 2021, arXiv 2106.11396",
    provenance="abstract and a co-author's program read, presumably",
    answers="single machine",
    parts={"corrected": True},
    pools=True,
)
