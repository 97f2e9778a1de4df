r"""Any estimator with its two products taken by central differences of gradients.

    hvp[v] ~ (gy(x, y + d v) - gy(x, y - d v)) / (2 d),   d = radius / ||v||
    jvp[v] ~ (gx(x, y + d v) - gx(x, y - d v)) / (2 d)

Two gradients a product, error O(radius^2), none for quadratic g.
"""

import dataclasses
from typing import Any

from fedbilevel._types import Key, Lower, Number, Upper
from fedbilevel.hypergradient._base import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import number, part


class FiniteDifference(AbstractHypergradient):
    """Run the estimator `rule` on first-order oracles only."""

    rule: AbstractHypergradient = part("what is run, without second derivatives")
    radius: Number = number("distance of the two points", default=1e-2)

    def draw(self, oracle: Oracle, key: Key) -> Any:
        """Draw what the estimator draws."""
        return self.rule.draw(oracle, key)

    def __call__(self, oracle: Oracle, x: Upper, y: Lower, bundle: Any) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        return self.rule(dataclasses.replace(oracle, radius=self.radius), x, y, bundle)

    def check(self, curvature: float, client: int) -> None:
        """Raise if the estimator fails at this lower curvature."""
        self.rule.check(curvature, client)
