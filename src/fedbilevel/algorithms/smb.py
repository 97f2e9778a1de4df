r"""SMB: moving averages of hypergradient and lower gradient, on one machine.

    v <- (1 - beta eta) v + beta eta gy(x, y; zeta),   y <- y - rho2 eta v
    u <- (1 - alpha eta) u + alpha eta h(x, y; b),     x <- x - rho1 eta u

both from the old point, first directions by direct evaluation; h is a Neumann series.
No large batch is needed.

It is LocalBSGM (`fedbilevel.algorithms.local_bsgm`) on the rows of all clients, where
`local_steps` only groups iterations into rounds. From Python it runs on K clients, too:
there it is LocalBSGM, right only for clients that are alike.

Reference: Guo, Xu, Yin, Jin, Yang, arXiv 2104.14840.
Deviations: the abstract was read, and the order of the updates in a program of others,
whose weights are constant, as they are here if eta is.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.local_bsgm import LocalBSGM

__all__ = ["SMB"]

SMB = Preset(
    LocalBSGM,
    summary="Moving averages on both levels, on one machine.",
    reference="Guo et al. 2021, arXiv 2104.14840",
    provenance="abstract and a program of others read",
    answers="single machine",
    parts={"drift": None},
    pools=True,
)
