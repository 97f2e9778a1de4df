r"""Momentum local SGD on the lower level at the given x.

    min_y  1/K sum_k g_k(x, y),   x fixed

Client k:

    m <- beta m + gy_k(x, y; zeta),    y <- y - lr m
    every p iterations:  y, m <- mean over clients

Exchanges a round: 1, with 2 dy floats each way. x is sent once.

Reference: Yu, Jin, Yang, arXiv 1905.03817.
Deviations: none known. The variant that restarts m at every average is not offered.
"""

from typing import Any

import jax.numpy as jnp

from fedbilevel._types import Number, Pair
from fedbilevel.algorithms.local._bases import ByLowerSlope
from fedbilevel.estimators import HeavyBall
from fedbilevel.schedules import count, step, weight

__all__ = ["MomentumLocalSGD"]


def _shorter(value: Any, made: Any) -> Any:
    # A sum of momentum beta is 1/(1 - beta) times longer than an average.
    return (1 - made["beta"]) * value


class MomentumLocalSGD(ByLowerSlope):
    """Heavy-ball steps on y at the given x, averaged with their momentum."""

    reference = "Yu, Jin, Yang 2019, arXiv 1905.03817"
    provenance = "standard method, from memory"
    estimator = HeavyBall()

    lr: Number = step("lower", "y moves by lr m", convert=_shorter, after=("beta",))
    beta: Number = weight(
        "lower",
        "m keeps beta of itself a step",
        convert=lambda weight, _: 1 - weight,
        least=0.0,
        below=1.0,
    )
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def weight(self, t):
        """Return 1 - beta; 1 at t = 0, where there is no momentum yet."""
        return Pair(None, jnp.where(t == 0, jnp.ones_like(self.beta), 1 - self.beta))
