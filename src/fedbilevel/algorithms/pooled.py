r"""Pooled: all clients' data on one machine, the ceiling of every comparison.

With all rows in one place K = 1, and FedBiOAcc is SOBA with STORM directions. With
samples drawn from all rows, w = (x, y, z) and a_t = delta/(t_0 + t)^(1/3):

    omega = gy(x, y; .),   q = hvp(x, y; .)[z] - fy(x, y; .),
    nu    = fx(x, y; .) - jvp(x, y; .)[z],     each filtered as in FedBiOAcc
    y <- y - gamma a_t omega_t,   z <- z - tau a_t q_t,   x <- x - eta a_t nu_t

A drawn row is one of client k with the chance w_k / sum w, then uniform over that
client's rows, so that the problem is the federated one exactly, whatever the sizes. The
Hessian inverted is that of the pooled data. It tells what data that may not be moved
would give; nothing is exchanged.

Reference: Dagreou, Ablin, Vaiter, Moreau, arXiv 2201.13409 (SOBA).
Deviations: STORM in place of plain directions; z has the opposite sign of SOBA's code.
`local_steps` only groups iterations into rounds.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.fedbioacc import FedBiOAcc

__all__ = ["Pooled"]

Pooled = Preset(
    FedBiOAcc,
    summary="FedBiOAcc on the rows of all clients, as if they could be moved.",
    reference="Dagreou et al. 2022, arXiv 2201.13409",
    provenance="updates read in a public benchmark; STORM is ours",
    answers="shared y, data pooled",
    pools=True,
)
