r"""MemFBO: SimFBO without second derivatives, by differences of gradients.

SimFBO's steps (`fedbilevel.algorithms.simfbo`) with products by central differences, on
one batch zeta each, at d = distance / ||z||:

    D_y = gy(x, y; .)
    D_z = (gy(x, y + d z; zeta) - gy(x, y - d z; zeta)) / (2 d) - fy(x, y; .)
    D_x = fx(x, y; .) - (gx(x, y + d z; zeta) - gx(x, y - d z; zeta)) / (2 d)

Fully single loop, all variables at once, gradients only: what the paper's abstract
tells. The error of a product is of order distance^2, and none where g is quadratic.

Exchanges a round: 1, with dx + 2 dy floats each way. A step: two upper and five lower
gradients, of which two are of x.

Reference: MemFBO, AAAI 2025, doi 10.1609/aaai.v39i21.34355.
Deviations: this is one of the two constructions that fit the abstract, and the updates
of the paper, whose body was not read, may be others. Where steps are measured (`auto`),
the measurement of the curvature takes Hessian products; plain numbers need none.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.simfbo import SimFBO

__all__ = ["MemFBO"]

MemFBO = Preset(
    SimFBO,
    summary="SimFBO without second derivatives, by differences of gradients.",
    reference="AAAI 2025, doi 10.1609/aaai.v39i21.34355; arXiv 2305.19442",
    provenance="abstract read; listing reconstructed, unverified",
    parts={"distance": 1e-2},
    letters={
        "lr_x": "lr_x",
        "lr_y": "lr_y",
        "lr_z": "lr_z",
        "gamma_x": "gamma_x",
        "gamma_y": "gamma_y",
        "gamma_z": "gamma_z",
        "distance": "distance",
    },
)
