r"""FedBiO: local steps on x, y and the linear-system variable z, for a shared y.

Client k at every local iteration, independent samples for each line:

    omega = gy_k(x, y; .)                            slope of the lower level
    q     = hvp_k(x, y; .)[z] - fy_k(x, y; .)        slope of 0.5 z'Hz - z'fy
    nu    = fx_k(x, y; .) - jvp_k(x, y; .)[z]        hypergradient with the current z
    y <- y - lr_y omega,   z <- z - lr_z q,   x <- x - lr_x nu
    every p iterations:  x, y, z <- mean over clients

Because z is averaged, it tracks Hbar^-1 fybar of the mean Hessian, so the limit is
unbiased where clients differ (p = 1), up to a drift of order lr p (p > 1), of which
`controls` or an `anchor` leave nothing (`fedbilevel.algorithms.wrappers.drift`). With
K = 1 this is SOBA (arXiv 2201.13409), whose code stores -z and shares one sample a
level.

Exchanges a round: 1, with dx + 2 dy floats each way. A step: one Hessian and one cross
product, two upper gradients.

Reference: Li, Huang, Huang, arXiv 2302.06701 (NeurIPS 2023).
Deviations: the listing is a reconstruction. The paper's abstract was read, not its
body. All three lines use the old point. The wrapper `alternating` moves y, then z, then
x, at the client's own fresh values. Its limit is biased where clients differ, also for
p = 1, unless `controls` or an `anchor` correct it. z starts at 0, and the wrapper
`ball` bounds it.
"""

from fedbilevel.algorithms.local._bases import ByLinearSystem
from fedbilevel.schedules import Number, count, step

__all__ = ["FedBiO"]


class FedBiO(ByLinearSystem):
    """Plain local steps on x, y and z, averaged every p steps."""

    reference = "Li, Huang, Huang 2023, arXiv 2302.06701"
    provenance = "abstract read; listing reconstructed, unverified"

    lr_x: Number = step("upper", "x moves by lr_x nu")
    lr_y: Number = step("lower", "y moves by lr_y omega")
    lr_z: Number = step("auxiliary", "z moves by lr_z q")
    local_steps: int = count("local steps between two averages, p", kw_only=True)
