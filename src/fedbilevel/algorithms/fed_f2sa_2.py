r"""Fed-F2SA-2: two copies of y, one on either side, and a bias of nu squared.

    y_+- <- y_+- - lr_y (+- nu fy_k(x, y_+-; xi) + gy_k(x, y_+-; zeta))
    x    <- x - lr_x ((fx_k(x, y_+; xi) + fx_k(x, y_-; xi)) / 2
                      + (lam/2) (gx_k(x, y_+; zeta') - gx_k(x, y_-; zeta')))
    every p iterations:  x, y_+, y_- <- mean over clients

with lam = 1/nu; (y_+ + y_-)/2 is reported. It costs what Fed-F2SA costs, and its limit
is O(nu^2) from the solution in place of O(nu): on the task two-client 1.001252 with
nu = 0.1 and 1.000013 with nu = 0.01, where Fed-F2SA ends at 0.975610 and 0.997506.
y_- has a minimum only where g curves more than nu f; a run looks at that before it
starts.

Exchanges a round: 1, with dx + 2 dy floats each way. It is Fed-F2SA
(`fedbilevel.algorithms.fed_f2sa`) with degree=2.

Reference: arXiv 2509.02937 (ICLR 2026), for the differences (F2SA-p with p = 2).
Deviations: the federated form is ours.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fed_f2sa import FedF2SA

__all__ = ["FedF2SA2"]

FedF2SA2 = Preset(
    FedF2SA,
    summary="Local steps by gradients alone, with central differences of the penalty.",
    reference="F2SA-p, arXiv 2509.02937, with p = 2",
    provenance="ours: a known method made federated",
    parts={"degree": 2},
    letters={"lr_x": "lr_x", "lr_y": "lr_y", "nu": "nu"},
)
