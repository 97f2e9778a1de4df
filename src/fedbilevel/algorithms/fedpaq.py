r"""FedPAQ on the lower level at the given x: FedAvg with quantized replies.

    y_k = y;  p times:  y_k <- y_k - lr gy_k(x, y_k; zeta)
    y <- y + mean over a cohort S of Q(y_k - y)

with an unbiased quantizer Q. It is FedCOM (`fedbilevel.algorithms.fedcom`) whose server
moves all the way, lr_server = 1.

Reference: Reisizadeh et al., arXiv 1909.13014 (AISTATS 2020).
Deviations: none known.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fedcom import FedCOM

__all__ = ["FedPAQ"]

FedPAQ = Preset(
    FedCOM,
    summary="Local steps on y at the given x, sent back quantized, averaged.",
    reference="Reisizadeh et al. 2020, arXiv 1909.13014",
    provenance="standard method, from memory",
    answers="shared y, x fixed",
    parts={"lr_server": 1.0},
)
