r"""LFedNest: the light FedNest, with nothing but local steps.

For every round:

    LFedInn, T_in times (1 exchange each):
        y_i = y;  tau times:  y_i -= (beta/tau) gy_i(x, y_i; zeta);    y = mean_i y_i
    LFedOut (1 exchange):
        x_i = x;  tau times:  x_i -= (alpha/tau) h_i(x_i, y);          x = mean_i x_i

h_i is a hypergradient on the client's own Hessian, formed anew at every step: right
for clients whose data are alike, biased where they differ.

Exchanges a round: T_in + 1. Floats a client and round, each way: T_in dy + dx.

Reference: Tarzanagh, Li, Thrampoulidis, Oymak, arXiv 2205.02215 (ICML 2022).
Deviations: tau is the same on all clients; any hypergradient rule (`Neumann` on the
command line).
"""

from typing import ClassVar

from fedbilevel.algorithms._nest_outer import AbstractLightOut

__all__ = ["LFedNest"]


class LFedNest(AbstractLightOut):
    """Plain local steps below, local hypergradients above."""

    reference: ClassVar[str] = "Tarzanagh et al. 2022, arXiv 2205.02215"
    provenance: ClassVar[str] = "authors' program and table read; details from memory"
    anchors_inner: ClassVar[bool] = False
