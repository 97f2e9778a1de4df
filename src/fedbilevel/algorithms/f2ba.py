r"""F2BA: F2SA whose two copies of y begin every loop at one place.

At every outer iteration, lam = 1/nu:

    y_s <- y_l
    T_in times:  y_l <- y_l - lr_y (nu fy(x, y_l) + gy(x, y_l))
                 y_s <- y_s - lr_y gy(x, y_s)
    x <- x - lr_x (fx(x, y_l) + lam (gx(x, y_l) - gx(x, y_s)))

y_s is reported. It gets no farther from y_l than T_in steps lead: too few of them leave
an error, that of F2SA, whose y_s goes on from where it stood, vanishes.

It is F2SA-p (`fedbilevel.algorithms.f2sa_p`) of degree 1 with begin=one. With all rows
as a batch it is F2BA, with fewer F2BSA.

Reference: Chen, Ma, Zhang, arXiv 2306.14853 (JMLR 2025).
Deviations: updates as in the authors' program, but for y_l's slope of g, which that
takes at y_s. y_l's direction is divided by lam, so that both copies take one step.
"""

from fedbilevel.algorithms._penalty import ONE
from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.f2sa_p import F2SAP

__all__ = ["F2BA"]

F2BA = Preset(
    F2SAP,
    summary="F2SA whose copies of y begin every loop at one place.",
    reference="Chen et al. 2025, arXiv 2306.14853",
    provenance="the authors' program and abstract read",
    answers="single machine",
    parts={"degree": 1, "begin": ONE},
    letters={"lr_x": "lr_x", "lr_y": "lr_y", "nu": "nu"},
    pools=True,
)
