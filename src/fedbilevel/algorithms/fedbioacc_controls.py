r"""FedBiOAcc whose local steps do not drift: STORM on corrected samples of x, y and z.

Client k at local iteration t, with omega, q, nu of FedBiO as G, for each block:

    G~(w)  = G(w) - c_k + c                               the same sample at both points
    d_t    = G~(w_t) + (1 - c_d a_{t-1}^2) (d_{t-1} - G~(w_{t-1}))
    w_{t+1} = w_t - step a_t d_t
    every p iterations:  w, d <- mean over clients
        c_k <- mean over the p iterations of G(w_t), kept on the client
        c   <- c + (n/K) mean over the n participants of the changes of c_k

What enters d of one client's own, c_d a^2 a step, is corrected, and so is what d
remembers of others where few take part.

Exchanges a round: 1, with 3 (dx + 2 dy) floats each way. It is FedBiOAcc
(`fedbilevel.algorithms.fedbioacc`) with drift=controls.

Reference: Karimireddy et al., arXiv 1910.06378 (SCAFFOLD), for the correction; Li,
Huang, Huang, arXiv 2302.06701, for the steps.
Deviations: the two are put together here, in no paper that is known. A client that
loses c_k starts at 0 again, and its old one stays in c.
"""

from fedbilevel.algorithms._drift import CONTROLS
from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fedbioacc import FedBiOAcc

__all__ = ["FedBiOAccControls"]

FedBiOAccControls = Preset(
    FedBiOAcc,
    summary="FedBiOAcc with SCAFFOLD's control variates on x, y and z.",
    reference="Karimireddy et al. 2020, arXiv 1910.06378; arXiv 2302.06701",
    provenance="ours: two known methods put together",
    parts={"drift": CONTROLS},
)
