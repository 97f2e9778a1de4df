r"""SUSTAIN: STORM on both levels with the random series, on one machine.

With one bundle and one random length at both points, and a_t = c/(w + t)^(1/3):

    u_t = h(x_t, y_t; b_t) + (1 - c_f a_{t-1}^2) (u_{t-1} - h(x_{t-1}, y_{t-1}; b_t))
    v_t = gy(x_t, y_t; .) + (1 - c_g a_{t-1}^2) (v_{t-1} - gy(x_{t-1}, y_{t-1}; .))
    x_{t+1} = x_t - c_a a_t u_t,     y_{t+1} = y_t - c_b a_t v_t

h = fx - jvp[z] with z one random term of the Neumann series, Q times as long: the sum
of Q terms in the mean. One time scale, and a constant number of samples a step.

It is MRBO (`fedbilevel.algorithms.mrbo`) with another series, so LocalBSGVRM on the
rows of all clients. From Python it runs on K clients, too, right only for clients that
are alike.

Reference: Khanduri et al., arXiv 2102.07367 (NeurIPS 2021).
Deviations: the abstract was read, and the updates in a benchmark, which starts from
zeros and shares a sample of gy; here first directions are evaluated, and samples of the
two are independent. The paper has c_a = 1.
"""

from fedbilevel.algorithms._absence import KEEP
from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import RandomNeumann

__all__ = ["SUSTAIN"]

SUSTAIN = Preset(
    LocalBSGVRM,
    summary="STORM on both levels with the random series, on one machine.",
    reference="Khanduri et al. 2021, arXiv 2102.07367",
    provenance="abstract and a benchmark's program read",
    answers="single machine",
    parts={"drift": None, "absent": KEEP, "own_lower": False},
    letters={
        "hypergradient": "hypergradient",
        "a": "eta",
        "c_f": "alpha",
        "c_g": "beta",
        "c_a": "rho1",
        "c_b": "rho2",
    },
    pools=True,
    rule=RandomNeumann,
)
