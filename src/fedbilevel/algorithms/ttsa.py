r"""TTSA: one lower step, then one of x, on two time scales.

    y <- y - lr_y b_t gy(x, y; zeta)
    x <- x - lr_x a_t h(x, y; b),   h = fx - jvp[z],  z = N theta prod_{m=1..N'} (I -
                                    theta hvp_m) fy,  N' uniform on {0..N-1}

In theory b_t falls as (t + 1)^(-2/5) and a_t as (t + 1)^(-3/5), so that y is the faster
of the two: `--set a=decay:1:1:0.6 --set b=decay:1:1:0.4`.

It is stocBiO (`fedbilevel.algorithms.stocbio`) with the random series and T_in = 1, and
what is said there of K clients holds.

Reference: Hong, Wai, Wang, Yang, arXiv 2007.05170.
Deviations: the cross product has a sample of its own, that of the lower step in the
benchmark that was read; x is not projected; steps are constant unless a and b are set.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.stocbio import StocBiO
from fedbilevel.hypergradient import RandomNeumann

__all__ = ["TTSA"]

TTSA = Preset(
    StocBiO,
    summary="One lower step, then one of x, on two time scales.",
    reference="Hong et al. 2020, arXiv 2007.05170",
    provenance="updates read in a public benchmark; theory from memory",
    answers="single machine",
    parts={"upper_first": False, "inner_steps": 1},
    pools=True,
    rule=RandomNeumann,
)
