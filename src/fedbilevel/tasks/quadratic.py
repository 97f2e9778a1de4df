r"""T1: one quadratic for all clients, noisy oracles, every answer in closed form.

dx = 5, dy = 6, A with the spectrum linspace(0.5, 2) in a random basis, C = 0.3 N(0, 1),
a and b standard normal, r = 0.5. See `fedbilevel.tasks._quadratics` for the formulas.

`spread` makes clients differ: A_k = A + 0.4 spread D_k with ||D_k|| <= 1, C_k, a_k and
b_k likewise by 0.3, 1 and 1 times a normal, all with mean zero over clients, so that
the averaged problem and its solution are those of spread 0 for every K.
"""

from typing import Annotated

import numpy as np

from fedbilevel import _tree
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData
from fedbilevel.tasks._base import MEASURED, Task, settings
from fedbilevel.tasks._quadratics import PROBLEM, ClosedForm, client_rows

_RECOMMENDED = MEASURED | {
    "auto:fedbio-controls": "lower_step=1/L auxiliary_step=1/L",
    **settings("rounds=200 local_steps=10 batch=1 q=20 theta=0.4 upper_step=0.05"),
    **settings("lower_step=0.05 upper_weight=0.1 lower_weight=0.1"),
}
# Steps small enough for the exponents of the corollaries to show from K = 1 to 16.
_SMALL = settings("clients=1 iterations=4000 local_steps=7 q=10 rho1=1 rho2=2")
_MOMENTUM = _SMALL | settings("eta=0.014 alpha=8 beta=8")
_STORM = _SMALL | settings("eta=0.02 alpha=2 beta=2 first_batch=64")
_CALIBRATION = {
    "local-bsgm": _MOMENTUM,
    "fednest": _MOMENTUM,
    "local-bsgvrm": _STORM,
    "fedbioacc": _STORM,
}


def make(
    clients: int = 8,
    *,
    noise: Annotated[float, "s, the deviation of the noise in a sample"] = 0.5,
    instance: Annotated[int, "random seed of the coefficients"] = 0,
    spread: Annotated[float, "how much clients differ, from 0, alike, to 1"] = 0.0,
) -> Task:
    """Build the task."""
    if not 0 <= spread <= 1:
        raise InvalidInputError(
            f"spread={spread}: between 0, clients alike, and 1. Beyond, a client's "
            "lower level would not be strongly convex."
        )
    draw = np.random.default_rng(instance)
    dx, dy, r = 5, 6, 0.5
    basis, _ = np.linalg.qr(draw.standard_normal((dy, dy)))
    A = basis @ np.diag(np.linspace(0.5, 2, dy)) @ basis.T
    C = 0.3 * draw.standard_normal((dx, dy))
    a, b = draw.standard_normal(dy), draw.standard_normal(dy)
    apart = _deviations(draw, clients, dx, dy)
    rows = [
        client_rows(
            A + spread * A_k,
            C + spread * C_k,
            a + spread * a_k,
            b + spread * b_k,
            r,
            noise,
        )
        for A_k, C_k, a_k, b_k in zip(*apart, strict=True)
    ]
    data = ClientData.from_clients([up for up, _ in rows], [low for _, low in rows])
    return Task(
        PROBLEM,
        data,
        _tree.filled(dx),
        _tree.filled(dy),
        ClosedForm.of(data),
        headline="grad_norm_sq",
        tuned_by="grad_norm_sq",
        recommended=_RECOMMENDED,
        shows_point=True,
        calibration=_CALIBRATION,
    )


def _deviations(draw: np.random.Generator, clients: int, dx: int, dy: int):
    """Return what is added to A, C, a and b of every client at spread 1."""
    shapes = ((dy, dy), (dx, dy), (dy,), (dy,))
    D, C, a, b = (draw.standard_normal((clients, *shape)) for shape in shapes)
    D = D + np.swapaxes(D, 1, 2)
    D, C, a, b = (leaf - leaf.mean(axis=0) for leaf in (D, C, a, b))
    # One client has no deviation to scale.
    largest = max(np.linalg.norm(D, 2, axis=(1, 2)).max(), np.finfo(float).tiny)
    return 0.4 * D / largest, 0.3 * C, a, b
