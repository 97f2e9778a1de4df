r"""T2: two scalar clients that differ, which show the bias of local inverses.

    g_k = (h_k/2) y^2 - c_k x y,   f_k = 0.5 (y - b_k)^2 + (r/2) x^2
    h = (1, 3), c = (1, 1), b = (1, 1), r = 0.25

The solution is x* = 1, y* = 0.5. Averaging the clients' own hypergradients, as
LocalBSGM and LocalBSGVRM do, ends at x = 8/7, y = 4/7.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, PooledData
from fedbilevel.tasks._base import Task, settings
from fedbilevel.tasks.quadratic import PROBLEM, ClosedForm, client_rows

_RECOMMENDED = {
    **settings("rounds=500 local_steps=1 batch=1 q=60 theta=0.3"),
    "length": "full",  # one random term of a series would need much shorter steps
    # Steps this long reach 1e-6 in float32 too: shorter ones stall on rounding first.
    **settings("upper_step=0.5 lower_step=0.3 upper_weight=0.9 lower_weight=0.9"),
    # It divides by the size of its directions, so that 0.5 is how far it goes.
    "auto:biadam": "upper_step=0.1",
}


class _Deterministic(ClientData):
    """Two rows without noise; a machine that had both would still draw one of them.

    It has their mean instead, which is the same problem.
    """

    def pooled(self) -> PooledData:
        """Return one row, of the mean coefficients."""
        share = self.weights / jnp.sum(self.weights)

        def mean(leaf: Array) -> Array:
            return jnp.tensordot(share.astype(leaf.dtype), leaf, 1)[None]

        one = jnp.ones_like(self.weights[:1])
        sizes = self.upper_sizes[:1], self.lower_sizes[:1]
        upper, lower = (jax.tree.map(mean, rows) for rows in (self.upper, self.lower))
        return ClientData(upper, lower, *sizes, one).pooled()


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
    held = data if noise else _Deterministic(**vars(data))
    return Task(
        PROBLEM,
        held,
        _tree.filled(1),
        _tree.filled(1),
        ClosedForm.of(data),
        headline="grad_norm_sq",
        tuned_by="grad_norm_sq",
        recommended=_RECOMMENDED,
        shows_point=True,
    )
