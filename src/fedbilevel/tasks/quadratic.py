r"""T1: one quadratic for all clients, noisy oracles, every answer in closed form.

dx = 5, dy = 6, A with the spectrum linspace(0.5, 2) in a random basis, C = 0.3 N(0, 1),
a and b standard normal, r = 0.5. See `fedbilevel.tasks._quadratics` for the formulas.
"""

import jax.numpy as jnp
import numpy as np

from fedbilevel.problem import ClientData
from fedbilevel.tasks._base import Task
from fedbilevel.tasks._quadratics import PROBLEM, ClosedForm, client_rows

__all__ = ["make"]

_RECOMMENDED = {
    "rounds": "200",
    "local_steps": "10",
    "batch": "1",
    "q": "20",
    "theta": "0.4",
    "upper_step": "0.05",
    "lower_step": "0.05",
    "upper_weight": "0.1",
    "lower_weight": "0.1",
}


def make(clients: int = 8, *, noise: float = 0.5, instance: int = 0) -> Task:
    """Build the task; `noise` is s, `instance` draws the coefficients."""
    draw = np.random.default_rng(instance)
    dx, dy, r = 5, 6, 0.5
    basis, _ = np.linalg.qr(draw.standard_normal((dy, dy)))
    A = basis @ np.diag(np.linspace(0.5, 2, dy)) @ basis.T
    C = 0.3 * draw.standard_normal((dx, dy))
    a, b = draw.standard_normal(dy), draw.standard_normal(dy)
    rows = [client_rows(A, C, a, b, r, noise) for _ in range(clients)]
    data = ClientData.from_clients([up for up, _ in rows], [low for _, low in rows])
    return Task(
        PROBLEM,
        data,
        jnp.zeros(dx),
        jnp.zeros(dy),
        ClosedForm.of(data),
        headline="grad_norm_sq",
        recommended=_RECOMMENDED,
        shows_point=True,
    )
