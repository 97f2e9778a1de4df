r"""FedBiO whose local steps do not drift: control variates on x, y and z.

Client k at every local iteration, with omega, q, nu of FedBiO:

    y <- y - lr_y (omega - c_k.y + c.y),   z <- z - lr_z (q - c_k.z + c.z)
    x <- x - lr_x (nu - c_k.x + c.x)
    every p iterations:  x, y, z <- mean over clients
        c_k <- mean over the p iterations of (nu, omega, q), kept on the client
        c   <- c + (n/K) mean over the n participants of the changes of c_k

With exact oracles the limit is that of p = 1, for any p and any cohort: on the task
two-client x = 1.000000 with p = 10, where FedBiO stops at 0.99695.

Exchanges a round: 1, with 2 (dx + 2 dy) floats each way. It is FedBiO
(`fedbilevel.algorithms.fedbio`) with drift=controls.

Reference: Karimireddy et al., arXiv 1910.06378 (SCAFFOLD), for the correction; Li,
Huang, Huang, arXiv 2302.06701, for the steps.
Deviations: the two are put together here, in no paper that is known. A client that
loses c_k starts at 0 again, and its old one stays in c.
"""

from fedbilevel.algorithms._drift import CONTROLS
from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fedbio import FedBiO

__all__ = ["FedBiOControls"]

FedBiOControls = Preset(
    FedBiO,
    summary="FedBiO with SCAFFOLD's control variates on x, y and z.",
    reference="Karimireddy et al. 2020, arXiv 1910.06378; arXiv 2302.06701",
    provenance="ours: two known methods put together",
    parts={"drift": CONTROLS},
    letters={"lr_x": "lr_x", "lr_y": "lr_y", "lr_z": "lr_z"},
)
