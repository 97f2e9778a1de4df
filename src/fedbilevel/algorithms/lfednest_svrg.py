r"""LFedNest-SVRG: LFedNest with anchored lower steps.

For every round:

    FedInn, T_in times (2 exchanges each):
        q   = mean_i gy_i(x, y; zeta_i)
        y_i = y;  tau times:
            y_i -= (beta/tau) (gy_i(x, y_i; zeta) - gy_i(x, y; zeta) + q)
        y   = mean_i y_i
    LFedOut as in LFedNest (`fedbilevel.algorithms.lfednest`)

The lower level does not drift; the hypergradient is on the client's own Hessian, biased
where clients differ.

Exchanges a round: 2 T_in + 1. Floats a client and round, each way: 2 T_in dy + dx.

Reference: Tarzanagh, Li, Thrampoulidis, Oymak, arXiv 2205.02215 (ICML 2022), table 2.
Deviations: as LFedNest.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.lfednest import LFedNest

__all__ = ["LFedNestSVRG"]

LFedNestSVRG = Preset(
    LFedNest,
    summary="Anchored local steps below, local hypergradients above.",
    reference="Tarzanagh et al. 2022, arXiv 2205.02215, table 2",
    provenance="structure read in the paper's table; details from memory",
    parts={"anchored": True},
    letters={"hypergradient": "hypergradient"},
)
