r"""SRMBA: STORM on x, y and the linear-system variable z, on one machine.

With D = (D_x, D_y, D_z) of SOBA (`fedbilevel.algorithms.soba`), w = (x, y, z), one
weight for each variable, and any schedule a_t, such as delta/(t_0 + t)^(1/3):

    d_t = D(w_t; s_t) + (1 - c a_{t-1}^2) (d_{t-1} - D(w_{t-1}; s_t)),     d_0 = D(w_0)
    y <- y - gamma a_t d_y,   z <- z - tau a_t d_z,   x <- x - eta a_t d_x

That is FedBiOAcc (`fedbilevel.algorithms.fedbioacc`) on the rows of all clients, where
`local_steps` only groups iterations into rounds. From Python it runs on K clients, too:
there it is FedBiOAcc, which is right where clients differ at p = 1.

Reference: Chu, Xu, Yao, Zhang, arXiv 2405.18777 (ICML 2024).
Deviations: the updates were read in the authors' program, which returns a direction in
the place of a point. Each of the three lines has samples of its own.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fedbioacc import FedBiOAcc

__all__ = ["SRMBA"]

SRMBA = Preset(
    FedBiOAcc,
    summary="STORM on x, y and z, on one machine.",
    reference="Chu et al. 2024, arXiv 2405.18777",
    provenance="abstract and the authors' program read",
    answers="single machine",
    pools=True,
)
