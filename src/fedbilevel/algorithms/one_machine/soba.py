r"""SOBA: plain steps on x, y and the linear-system variable z, on one machine.

At every iteration, with one lower sample zeta and one upper sample xi:

    D_y = gy(x, y; zeta),   D_z = hvp(x, y; zeta)[z] - fy(x, y; xi)
    D_x = fx(x, y; xi) - jvp(x, y; zeta)[z]
    y <- y - lr_y a_t D_y,   z <- z - lr_z a_t D_z,   x <- x - lr_x a_t D_x

all three from the old point. a_t is any schedule. The paper's steps fall as T^(-2/5) (y
and z) and T^(-3/5) (x), and those of its code as (t + 1)^(-1/2).

A step: one gradient of each level, one Hessian and one cross product. On K clients the
directions are averaged at every iteration (p = 1), which is right where clients differ:
1 exchange an iteration, with dx + 2 dy floats each way. This is FedBiO (`fedbio`) at p
= 1, with one sample for each level.

Reference: Dagreou, Ablin, Vaiter, Moreau, arXiv 2201.13409 (NeurIPS 2022).
Deviations: z has the opposite sign of the authors' code, and starts at 0.
"""

from fedbilevel.algorithms.one_machine._path import ITERATIONS, WithZ
from fedbilevel.schedules import Schedule, count, schedule

__all__ = ["SOBA"]


class SOBA(WithZ):
    """Plain steps on x, y and z, all at once."""

    reference = "Dagreou et al. 2022, arXiv 2201.13409"
    provenance = "listing read in the paper"

    a: Schedule = schedule("common shape of the steps over t", default=1.0)
    local_steps: int = count(ITERATIONS, default=1, kw_only=True)
