r"""T2: two scalar clients that differ, which shows who inverts the right Hessian.

    g_k = (h_k/2) y^2 - c_k x y,   f_k = 0.5 (y - b_k)^2 + (r/2) x^2
    h = (1, 3), c = (1, 1), b = (1, 1), r = 0.25

The solution is x* = 1, y* = 0.5. Averaging the clients' own hypergradients, as
LocalBSGM and LocalBSGVRM do, ends at x = 8/7, y = 4/7.
"""

from typing import Annotated

import numpy as np

from fedbilevel import _tree
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData
from fedbilevel.tasks._base import Task
from fedbilevel.tasks._quadratics import PROBLEM, ClosedForm, client_rows

__all__ = ["make"]

_RECOMMENDED = {
    "rounds": "500",
    "local_steps": "1",
    "batch": "1",
    "q": "60",
    "theta": "0.3",
    "length": "full",  # one random term of a series would need much shorter steps
    # Steps this long reach 1e-6 in float32 too: shorter ones stall on rounding first.
    "upper_step": "0.5",
    "lower_step": "0.3",
    "upper_weight": "0.9",
    "lower_weight": "0.9",
}


def make(
    clients: int = 2,
    *,
    noise: Annotated[float, "deviation of the noise in a sample"] = 0.0,
) -> Task:
    """Build the task; without noise every oracle is deterministic."""
    if clients != 2:
        raise InvalidInputError(
            f"the task two-client has 2 clients, got {clients}. The task quadratic "
            "takes any number."
        )
    one = np.ones(1)
    rows = [
        client_rows(np.full((1, 1), h), -np.ones((1, 1)), 0 * one, one, 0.25, noise)
        for h in (1.0, 3.0)
    ]
    data = ClientData.from_clients([up for up, _ in rows], [low for _, low in rows])
    return Task(
        PROBLEM,
        data,
        _tree.filled(1),
        _tree.filled(1),
        ClosedForm.of(data),
        headline="grad_norm_sq",
        tuned_by="grad_norm_sq",
        recommended=_RECOMMENDED,
        shows_point=True,
    )
