r"""Pooled: all clients' data on one machine, the ceiling of every comparison.

With all rows in one place K = 1, and LocalBSGVRM is MRBO: with a bundle b_t and zeta_t
drawn from all rows, a = alpha eta_{t-1}^2 and c = beta eta_{t-1}^2,

    u_t = (1 - a) (u_{t-1} - h(x_{t-1}, y_{t-1}; b_t)) + h(x_t, y_t; b_t)
    v_t = (1 - c) (v_{t-1} - gy(x_{t-1}, y_{t-1}; zeta_t)) + gy(x_t, y_t; zeta_t)
    x_{t+1} = x_t - rho1 eta_t u_t,     y_{t+1} = y_t - rho2 eta_t v_t

A drawn row is one of client k with the chance w_k / sum w, then uniform over that
client's rows, so that the problem is the federated one exactly, whatever the sizes. The
Hessian inverted is that of the pooled data. It tells what data that may not be moved
would give; nothing is exchanged.

Reference: Yang, Ji, Liang, arXiv 2106.04692 (MRBO).
Deviations: `local_steps` only groups iterations into rounds.
"""

from typing import ClassVar

from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM

__all__ = ["Pooled"]


class Pooled(LocalBSGVRM):
    """MRBO on the rows of all clients, as if they could be moved."""

    reference: ClassVar[str] = "Yang, Ji, Liang 2021, arXiv 2106.04692"
    provenance: ClassVar[str] = "updates read in a public benchmark"
    answers: ClassVar[str] = "shared y, data pooled"
    allows_private: ClassVar[bool] = False
    inverts_locally: ClassVar[bool] = False
    pools: ClassVar[bool] = True
