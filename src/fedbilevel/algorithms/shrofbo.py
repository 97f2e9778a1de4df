r"""ShroFBO: SimFBO for clients that make different numbers of local steps.

With q_i the sum of the directions in client i's tau_i local steps (SimFBO,
`fedbilevel.algorithms.simfbo`), S a cohort:

    h_i = q_i / tau_i,   rho = mean over S of tau_i,   q = rho mean over S of h_i
    y -= gamma_y q_y,   z = Proj_{||z|| <= r}(z - gamma_z q_z),   x -= gamma_x q_x

Every client counts by its weight, whatever the number of its steps, as in FedNova: the
limit is that of equal numbers, where SimFBO's leans towards those that make many. With
equal numbers the two are the same.

Exchanges a round: 1, with dx + 2 dy + 1 floats up and dx + 2 dy down. It is SimFBO with
`normalized`.

Reference: Yang, Xiao, Ji, arXiv 2305.19442 (NeurIPS 2023).
Deviations: SimFBO's. `fewest_steps` is 1: client i has a number tau_i between that and
`local_steps`, uniform and the same in every round.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.simfbo import SimFBO

__all__ = ["ShroFBO"]

ShroFBO = Preset(
    SimFBO,
    summary="SimFBO for clients that make different numbers of local steps.",
    reference="Yang, Xiao, Ji 2023, arXiv 2305.19442",
    provenance="abstract read; listing reconstructed, unverified",
    parts={"normalized": True, "fewest_steps": 1},
    letters={
        "lr_x": "lr_x",
        "lr_y": "lr_y",
        "lr_z": "lr_z",
        "gamma_x": "gamma_x",
        "gamma_y": "gamma_y",
        "gamma_z": "gamma_z",
        "fewest_steps": "fewest_steps",
    },
)
