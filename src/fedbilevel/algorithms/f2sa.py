r"""F2SA: a penalty in place of a Hessian, on one machine.

At every outer iteration t, with samples of their own for each line, lam_t = 1/nu_t:

    T_in times:  y_l <- y_l - lr_y s_t (nu_t fy(x, y_l; xi) + gy(x, y_l; zeta))
                 y_s <- y_s - lr_y s_t gy(x, y_s; zeta)
    x <- x - lr_x s_t (fx(x, y_l; xi) + lam_t (gx(x, y_l; zeta) - gx(x, y_s; zeta)))

with nu_t = nu b_t and s_t = a_t. y_s is reported. The bias is O(nu): where lam rises,
it falls. The paper's lam rises as t^(1/7), and its steps fall as t^(-4/7): that is
`a=decay:C0:W0:0.5714` and `b=decay:C0:W0:0.1429`.

It is F2SA-p (`fedbilevel.algorithms.f2sa_p`) of degree 1, and at T_in = 1 Fed-F2SA on
one machine, in alternating order. F2SA-p of degree 2 has a smaller bias at the same
cost.

Reference: Kwon, Kwon, Wright, Nowak, arXiv 2301.10945 (ICML 2023).
Deviations: updates as in a public benchmark, the abstract was read. y_l's direction is
divided by lam, so that both copies take one step. One lower sample serves both copies,
where the benchmark draws two: else lam multiplies noise that does not cancel.
"""

from fedbilevel.algorithms._penalty import OWN
from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.f2sa_p import F2SAP

__all__ = ["F2SA"]

F2SA = Preset(
    F2SAP,
    summary="Loops on two copies of y, one with a penalty, then a step of x.",
    reference="Kwon et al. 2023, arXiv 2301.10945",
    provenance="abstract and a benchmark's program read",
    answers="single machine",
    parts={"degree": 1, "begin": OWN},
    letters={"lr_x": "lr_x", "lr_y": "lr_y", "nu": "nu"},
    pools=True,
)
