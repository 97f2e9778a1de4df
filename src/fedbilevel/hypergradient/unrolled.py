r"""Differentiation through N lower steps (ITD).

    y^0 = y,  y^{n+1} = y^n - step gy(x, y^n; zeta_n),   h = d/dx f(x, y^N(x); xi)

The start y does not depend on x. For quadratic g and one batch this is the Neumann
series with Q = N-1 and theta = step, evaluated at y^N.
"""

from typing import Any

import jax
import jax.random as jr

from fedbilevel._types import Key, Lower, Number, Upper
from fedbilevel.errors import ClientInputError, InvalidInputError
from fedbilevel.hypergradient._base import AbstractHypergradient
from fedbilevel.problem import Batch, Oracle
from fedbilevel.schedules import count, is_known, number


def check_lower_step(name: str, step: Any, curvature: float, client: int) -> None:
    """Raise if a lower step of this length moves away from the minimum."""
    if is_known(step) and float(step) * curvature >= 2:
        raise ClientInputError(
            client,
            f" L1 is about {curvature:.4g}, so use at most {1.98 / curvature:.4g}.",
            f"`{name}(step={float(step):.4g})`: lower steps diverge beyond 2/L1; on ",
        )


class Unrolled(AbstractHypergradient):
    """Reverse-mode differentiation through `steps` lower steps."""

    steps: int = count("lower steps that are differentiated through")
    step: Number = number("how far each of them goes, below 2/L1", step="lower")

    def __check_init__(self) -> None:
        if self.steps < 1:
            raise InvalidInputError(
                f"`Unrolled(steps=...)` must be at least 1, got {self.steps}."
            )

    def draw(self, oracle: Oracle, key: Key) -> tuple[Batch, Batch]:
        """Draw xi and one zeta per lower step."""
        upper, lower = jr.split(key)
        batches = jax.vmap(oracle.draw_lower)(jr.split(lower, self.steps))
        return oracle.draw_upper(upper), batches

    def __call__(
        self, oracle: Oracle, x: Upper, y: Lower, bundle: tuple[Batch, Batch]
    ) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        return oracle.unrolled_gradient(x, y, *bundle, self.step)

    def check(self, curvature: float, client: int) -> None:
        """Raise if a lower step of this length moves away from the minimum."""
        check_lower_step("Unrolled", self.step, curvature, client)
