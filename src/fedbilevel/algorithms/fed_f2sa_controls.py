r"""Fed-F2SA-2 whose local steps do not drift: control variates on x and on both copies.

    y_+- <- y_+- - lr_y (d_+- - c_k.+- + c.+-)     d_+- = +- nu fy_k(y_+-) + gy_k(y_+-)
    x    <- x - lr_x (h_k - c_k.x + c.x)           h_k as Fed-F2SA-2 has it
    every p iterations:  x, y_+, y_- <- mean over clients
        c_k <- mean over the p iterations of (h_k, d_+, d_-), kept on the client
        c   <- c + (n/K) mean over the n participants of the changes of c_k

y_- is a minimum of g - nu f in the mean over clients. One client's own g_k - nu f_k may
have none, so that local steps without a correction lead y_- astray: of the methods
without a Hessian this is the one for p > 1 where clients differ. With exact oracles the
limit is that of p = 1, for any p and any cohort.

Exchanges a round: 1, with 2 (dx + 2 dy) floats each way. It is Fed-F2SA
(`fedbilevel.algorithms.fed_f2sa`) with degree=2 and drift=controls.

Reference: Karimireddy et al., arXiv 1910.06378 (SCAFFOLD), for the correction;
arXiv 2509.02937 (F2SA-p), for the steps.
Deviations: the two are put together here, in no paper that is known.
"""

from fedbilevel.algorithms._drift import CONTROLS
from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fed_f2sa import FedF2SA

__all__ = ["FedF2SAControls"]

FedF2SAControls = Preset(
    FedF2SA,
    summary="Fed-F2SA-2 with SCAFFOLD's control variates on x and both copies of y.",
    reference="Karimireddy et al. 2020, arXiv 1910.06378; arXiv 2509.02937",
    provenance="ours: two known methods put together",
    parts={"degree": 2, "drift": CONTROLS},
    letters={"lr_x": "lr_x", "lr_y": "lr_y", "nu": "nu"},
)
