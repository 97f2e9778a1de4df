r"""BSA: a step of x by one random term of the series, then a loop of lower steps.

For every outer iteration t:

    x <- x - lr_x a_t h(x, y; b),   h = fx - jvp[z],  z = N theta prod_{m=1..N'} (I -
                                    theta hvp_m) fy,  N' uniform on {0..N-1}
    T_in times:  y <- y - lr_y b_t gy(x, y; zeta)

In the benchmark that was read both steps fall as (t + 1)^(-1/2).

It is stocBiO (`fedbilevel.algorithms.stocbio`) with the random series and x first, and
what is said there of K clients holds.

Reference: Ghadimi, Wang, arXiv 1802.02246.
Deviations: the number of lower steps is constant, where theory lets it grow as the root
of t; x is not projected.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.stocbio import StocBiO
from fedbilevel.hypergradient import RandomNeumann

__all__ = ["BSA"]

BSA = Preset(
    StocBiO,
    summary="A step of x by a random term of the series, then a loop of lower steps.",
    reference="Ghadimi, Wang 2018, arXiv 1802.02246",
    provenance="updates read in a public benchmark; theory from memory",
    answers="single machine",
    parts={"upper_first": True},
    pools=True,
    rule=RandomNeumann,
)
