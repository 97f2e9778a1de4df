r"""FedBiO without second derivatives: products by differences of gradients.

FedBiO's local steps (`fedbilevel.algorithms.fedbio`) with products by central
differences, on one batch zeta each, at d = distance / ||z||:

    omega = gy(x, y; .)
    q     = (gy(x, y + d z; zeta) - gy(x, y - d z; zeta)) / (2 d) - fy(x, y; .)
    nu    = fx(x, y; .) - (gx(x, y + d z; zeta) - gx(x, y - d z; zeta)) / (2 d)
    y <- y - lr_y omega,   z <- z - lr_z q,   x <- x - lr_x nu
    every p iterations:  x, y, z <- mean over clients

The error of a product is of order distance^2, and none where g is quadratic; a distance
below 1e-3 is lost in rounding in float32. Unbiased where clients differ, as FedBiO: a
difference of means is the mean of differences.

Exchanges a round: 1, with dx + 2 dy floats each way. A step: two upper and five lower
gradients, of which two are of x.

Reference: Li, Huang, Huang, arXiv 2302.06701, for the local steps; differences in the
place of products are DARTS's, arXiv 1806.09055.
Deviations: the two are put together here; arXiv 2610.01843, of which a summary was
read, tracks x, y and the response in this way on one machine. Where steps are measured
(`auto`), the measurement of the curvature takes Hessian products; plain numbers need
none.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fedbio import FedBiO

__all__ = ["FedBiODifferences"]

FedBiODifferences = Preset(
    FedBiO,
    summary="FedBiO without second derivatives, by differences of gradients.",
    reference="Li, Huang, Huang 2023, arXiv 2302.06701; arXiv 1806.09055",
    provenance="ours: two known methods put together",
    parts={"distance": 1e-2},
    letters={"lr_x": "lr_x", "lr_y": "lr_y", "lr_z": "lr_z", "distance": "distance"},
)
