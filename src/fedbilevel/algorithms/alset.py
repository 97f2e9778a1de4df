r"""ALSET: alternating lower and upper steps, with one random term of the series.

For every outer iteration t:

    T times:  y <- y - lr_y b_t gy(x, y; zeta)
    x <- x - lr_x a_t h(x, y; b),   h = fx - jvp[z],  z = N theta prod_{m=1..N'} (I -
                                    theta hvp_m) fy,  N' uniform on {0..N-1}

One time scale: both steps are of order T^(-1/2), all samples are single ones, and T is
a constant; T = 1 is the single-loop version.

It is stocBiO (`fedbilevel.algorithms.stocbio`) with the random series, and what is said
there of K clients holds.

Reference: Chen, Sun, Yin, arXiv 2106.13781 (NeurIPS 2021).
Deviations: the printed length is uniform on {1..N}, which loses the first term; here it
is that of BSA. The cross product is taken at the new y.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.stocbio import StocBiO
from fedbilevel.hypergradient import RandomNeumann

__all__ = ["ALSET"]

ALSET = Preset(
    StocBiO,
    summary="Lower steps, then one of x, on one time scale, by the random series.",
    reference="Chen, Sun, Yin 2021, arXiv 2106.13781",
    provenance="listing read in the paper",
    answers="single machine",
    parts={"upper_first": False},
    pools=True,
    rule=RandomNeumann,
)
