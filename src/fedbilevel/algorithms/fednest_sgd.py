r"""FedNest-SGD: FedNest with plain local steps below.

For every round:

    LFedInn, T_in times (1 exchange each):
        y_i = y;  tau times:  y_i -= (beta/tau) gy_i(x, y_i; zeta);    y = mean_i y_i
    FedIHGP and FedOut as in FedNest (`fedbilevel.algorithms.fednest`)

Exchanges a round: T_in + N' + 3. Floats a client and round, each way:
T_in dy + (1 + N') dy + 2 dx. The inverse is unbiased; the lower level drifts for
tau > 1 where clients differ.

Reference: Tarzanagh, Li, Thrampoulidis, Oymak, arXiv 2205.02215 (ICML 2022), table 2.
Deviations: as FedNest.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fednest import FedNest

__all__ = ["FedNestSGD"]

FedNestSGD = Preset(
    FedNest,
    summary="Plain local steps below, a federated Neumann series above.",
    reference="Tarzanagh et al. 2022, arXiv 2205.02215, table 2",
    provenance="structure read in the paper's table; details from memory",
    parts={"anchored": False},
)
