"""What the methods for a client-local lower level share: y_k never leaves client k."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
from jaxtyping import Array, Float

from fedbilevel._types import Key, Pair
from fedbilevel.algorithms import _options
from fedbilevel.algorithms._parts import (
    at_time,
    first_or_coupled,
    hypergradient_and_slope,
)
from fedbilevel.algorithms._single_loop import AbstractSingleLoop, Directions, Order
from fedbilevel.estimators import AbstractEstimator, Storm
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, as_number, as_schedule

__all__ = ["AbstractOwnLowerLevel", "AbstractOwnStorm"]


class AbstractOwnLowerLevel(AbstractSingleLoop):
    """Each client has its own y_k*(x) and inverts its own Hessian, which is exact."""

    answers: ClassVar[str] = "own y per client"
    private: ClassVar[Pair] = Pair(False, True)

    hypergradient: AbstractHypergradient
    alternating: bool = eqx.field(static=True, default=False, kw_only=True)

    def order(self) -> Order:
        """Return y then x, or both at once."""
        return (("y",), ("x",)) if self.alternating else (("x", "y"),)

    def directions(self, oracle: Oracle, key: Key) -> Directions:
        """Draw a bundle and a sample; return h_k and grad_y g_k with them."""
        return hypergradient_and_slope(self.hypergradient, oracle, key)

    def check(self, curvature: float, client: int) -> None:
        """Ask the hypergradient rule."""
        self.hypergradient.check(curvature, client)


class AbstractOwnStorm(AbstractOwnLowerLevel):
    """STORM on both levels; x and its direction are averaged every p steps.

    Steps eta a_t for x and gamma a_t for y; weights c_nu a^2 and c_omega a^2.
    """

    a: Schedule = eqx.field(converter=as_schedule)
    eta: Float[Array, "..."] = eqx.field(converter=as_number)
    gamma: Float[Array, "..."] = eqx.field(converter=as_number)
    c_nu: Float[Array, "..."] = eqx.field(converter=as_number)
    c_omega: Float[Array, "..."] = eqx.field(converter=as_number)

    def estimator(self) -> AbstractEstimator:
        """Return STORM."""
        return Storm()

    def step(self, t: Any) -> Pair:
        """Return eta a_t and gamma a_t."""
        a = at_time(self.a, t, self.eta)
        return Pair(self.eta * a, self.gamma * a)

    def weight(self, t: Any) -> Pair:
        """Return c a_{t-1}^2 for each level, and 1 at t = 0."""
        letters = (self.c_nu, self.c_omega)
        return Pair(*(first_or_coupled(c, self.a, t, 2) for c in letters))

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""
        letters = ("a", "eta", "gamma", "c_nu", "c_omega")
        return (*letters, *_options.EFFECTIVE, "q", "theta", "order")

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from letters or effective values."""
        return cls(
            _options.series(options),
            **_options.storm(options, clients, local_steps, third=False),
            local_steps=local_steps,
            alternating=_options.is_alternating(options, "simultaneous"),
        )
