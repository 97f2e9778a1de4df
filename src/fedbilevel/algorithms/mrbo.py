r"""MRBO: STORM on hypergradient and lower gradient, on one machine.

With one bundle b_t and one zeta_t at both points, and eta_t = d/(m + t)^(1/3):

    u_t = h(x_t, y_t; b_t) + (1 - c1 eta_{t-1}^2) (u_{t-1} - h(x_{t-1}, y_{t-1}; b_t))
    v_t = gy(x_t, y_t; .) + (1 - c2 eta_{t-1}^2) (v_{t-1} - gy(x_{t-1}, y_{t-1}; .))
    x_{t+1} = x_t - gamma eta_t u_t,     y_{t+1} = y_t - lam eta_t v_t

First directions by direct evaluation; h is the stochastic Neumann series.

It is LocalBSGVRM (`fedbilevel.algorithms.local_bsgvrm`) on the rows of all clients,
where `local_steps` only groups iterations into rounds. From Python it runs on K
clients, too: there it is LocalBSGVRM, right only for clients that are alike.

Reference: Yang, Ji, Liang, arXiv 2106.04692 (NeurIPS 2021).
Deviations: the authors' program was read, and a benchmark's; the first resets its
schedule in every iteration and steps twice, the second starts from zeros. This one does
neither.
"""

from fedbilevel.algorithms._absence import KEEP
from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM

__all__ = ["MRBO"]

MRBO = Preset(
    LocalBSGVRM,
    summary="STORM on both levels, on one machine.",
    reference="Yang, Ji, Liang 2021, arXiv 2106.04692",
    provenance="the authors' program and a benchmark's read",
    answers="single machine",
    parts={"drift": None, "absent": KEEP, "own_lower": False},
    letters={
        "hypergradient": "hypergradient",
        "eta": "eta",
        "c1": "alpha",
        "c2": "beta",
        "gamma": "rho1",
        "lam": "rho2",
    },
    pools=True,
)
