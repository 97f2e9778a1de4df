r"""Momentum local SGD on the lower level at the given x.

    min_y  1/K sum_k g_k(x, y),   x fixed

Client k:

    m <- beta m + gy_k(x, y; zeta),    y <- y - lr m
    every p iterations:  y, m <- mean over clients

Exchanges a round: 1, with 2 dy floats each way; x is sent once.

Reference: Yu, Jin, Yang, arXiv 1905.03817.
Deviations: none known; the variant that restarts m at every average is not offered.
"""

from typing import Any, ClassVar

import jax.numpy as jnp

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Number, Pair, Upper
from fedbilevel.algorithms._base import AbstractAlgorithm, Phases, Turn
from fedbilevel.algorithms._local import (
    Iterate,
    averaged,
    check_counts,
    local_steps,
    move,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.estimators import HeavyBall
from fedbilevel.problem import Oracle
from fedbilevel.schedules import count, is_known, number

__all__ = ["MomentumLocalSGD"]


class MomentumLocalSGD(AbstractAlgorithm):
    """Heavy-ball steps on y at the given x, averaged with their momentum."""

    reference: ClassVar[str] = "Yu, Jin, Yang 2019, arXiv 1905.03817"
    provenance: ClassVar[str] = "standard method, from memory"
    answers: ClassVar[str] = "shared y, x fixed"

    lr: Number = number("y moves by lr m", step="lower")
    beta: Number = number("m keeps beta of itself a step")
    local_steps: int = count("local steps between two averages, p", kw_only=True)

    def __check_init__(self) -> None:
        check_counts(self, local_steps=self.local_steps)
        if is_known(self.beta) and not 0 <= float(self.beta) < 1:
            raise InvalidInputError(
                f"`MomentumLocalSGD(beta=...)` must be in [0, 1), got {self.beta:.4g}."
            )

    def init_server(self, x: Upper, y: Lower) -> Iterate:
        """Start at (x, y), without momentum."""
        return Iterate(Pair(x, y), Pair(None, _tree.zeros_like(y)))

    def init_client(self, x: Upper, y: Lower) -> None:
        """Return nothing: clients keep nothing between rounds."""

    def phases(self) -> Phases:
        """Return the one exchange of a round; x is not sent back."""

        def without_x(sent: Iterate) -> Iterate:
            return Iterate(Pair(None, sent.point.y), sent.direction)

        return (averaged(self.local, without_x),)

    def point(self, server: Iterate) -> Pair:
        """Return x and the averaged y."""
        return server.point

    def local(self, message: Iterate, client: None, oracle: Oracle, turn: Turn):
        """Make p local steps on y."""
        x = message.point.x

        def iterate(carry: tuple[Lower, Lower], time: tuple[Any, Key]):
            (y, m), (t, key) = carry, time
            zeta = oracle.draw_lower(key)
            # At t = 0 there is no momentum yet.
            forgets = jnp.where(t == 0, jnp.ones_like(self.beta), 1 - self.beta)
            m = HeavyBall()(
                lambda y: oracle.lower_gradient(x, y, zeta), y, None, m, forgets
            )
            return move(y, self.lr, m), m

        start = (message.point.y, message.direction.y)
        y, m = local_steps(iterate, start, turn, self.local_steps)
        return client, Iterate(Pair(None, y), Pair(None, m))
