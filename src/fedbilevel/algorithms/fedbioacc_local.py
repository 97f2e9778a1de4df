r"""FedBiOAcc-Local: STORM for a client-local lower level, averaging after the move.

    min_x  1/K sum_k f_k(x, y_k*(x))   with   y_k*(x) = argmin_y g_k(x, y)

Client k at local iteration t, with one zeta and one bundle b at both points, and
a_t = delta/(t_0 + t)^(1/3) (any schedule):

    omega_t = gy_k(x_t, y_t; zeta)
              + (1 - c_omega a_{t-1}^2) (omega_{t-1} - gy_k(x_{t-1}, y_{t-1}; zeta))
    nu_t    = h_k(x_t, y_t; b)
              + (1 - c_nu a_{t-1}^2) (nu_{t-1} - h_k(x_{t-1}, y_{t-1}; b))
    y_{t+1} = y_t - gamma a_t omega_t,     x_{t+1} = x_t - eta a_t nu_t
    every p iterations:  x_{t+1}, nu_t <- mean over clients;  y, omega are never sent

h_k is the stochastic Neumann hypergradient on the client's own Hessian, which is the
right one here. The previous point is the client's own, before averaging, so that
mean_k nu_t tracks mean_k h_k exactly when oracles are exact.

Exchanges a round: 1, with 2 dx floats each way. With K = 1 this is MRBO. It is
LocalBSGVRM (`fedbilevel.algorithms.local_bsgvrm`) with y and v kept on their client,
and with other letters: a for eta, eta and gamma for rho1 and rho2, c_nu and c_omega for
alpha and beta.

Reference: Li, Huang, Huang, arXiv 2302.06701 (NeurIPS 2023).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. With fewer than K participants a client that
missed the last round corrects from the received point.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM

__all__ = ["FedBiOAccLocal"]

FedBiOAccLocal = Preset(
    LocalBSGVRM,
    summary="STORM, x and its direction averaged after the move, y kept on its client.",
    reference="Li, Huang, Huang 2023, arXiv 2302.06701",
    provenance="abstract read; listing reconstructed, unverified",
    answers="own y per client",
    parts={"own_lower": True},
    letters={
        "hypergradient": "hypergradient",
        "a": "eta",
        "eta": "rho1",
        "gamma": "rho2",
        "c_nu": "alpha",
        "c_omega": "beta",
    },
)
