r"""Momentum local SGD on the lower level at the given x.

    min_y  1/K sum_k g_k(x, y),   x fixed

Client k:

    m <- beta m + gy_k(x, y; zeta),    y <- y - lr m
    every p iterations:  y, m <- mean over clients

Exchanges a round: 1, with 2 dy floats each way; x is sent once.

Reference: Yu, Jin, Yang, arXiv 1905.03817.
Deviations: none known; the variant that restarts m at every average is not offered.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbilevel._types import Pair
from fedbilevel.algorithms import _options
from fedbilevel.algorithms._lower_only import AbstractLowerOnly
from fedbilevel.errors import InvalidInputError
from fedbilevel.estimators import AbstractEstimator, HeavyBall
from fedbilevel.schedules import as_number, is_known

__all__ = ["MomentumLocalSGD"]


class MomentumLocalSGD(AbstractLowerOnly):
    """Heavy-ball steps on y at the given x, averaged with their momentum."""

    reference: ClassVar[str] = "Yu, Jin, Yang 2019, arXiv 1905.03817"
    provenance: ClassVar[str] = "standard method, from memory"

    beta: Float[Array, "..."] = eqx.field(converter=as_number)

    def __check_init__(self) -> None:
        if is_known(self.beta) and not 0 <= float(self.beta) < 1:
            raise InvalidInputError(
                f"`MomentumLocalSGD(beta=...)` must be in [0, 1), got {self.beta:.4g}."
            )

    def estimator(self) -> AbstractEstimator:
        """Return the heavy ball."""
        return HeavyBall()

    def weight(self, t: Any) -> Pair:
        """Return 1 - beta, and 1 at t = 0 where there is no momentum yet."""
        return Pair(None, jnp.where(t == 0, jnp.ones_like(self.beta), 1 - self.beta))

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""
        return ("lr", "beta", "lower_step", "lower_weight")

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from letters, or so that it moves as far as the other methods do."""
        del clients
        beta = _options.optional_number(options, "beta")
        if beta is None:
            beta = 1 - _options.number(options, "lower_weight")
        rate = _options.optional_number(options, "lr")
        if rate is None:
            # A sum of momentum beta is 1/(1 - beta) times longer than an average.
            rate = (1 - beta) * _options.number(options, "lower_step")
        return cls(rate, beta, local_steps=local_steps)
