"""What the two algorithms of the founding paper share: steps, weights, bounds.

alpha and beta set the momentum weights of u and v, rho1 and rho2 scale the common step
eta for x and y. A weight is alpha eta^power, with the power 1 for moving averages and 2
for variance-reduced momentum.
"""

from dataclasses import fields
from typing import Any

from fedbilevel.algorithms.local._bases import ByHypergradient
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.schedules import as_schedule, is_known


class Founding(ByHypergradient):
    """A method with the parameters of the founding paper."""

    @classmethod
    def power(cls) -> int:
        """Return the power of eta in the momentum weights."""
        metadata = next(one.metadata for one in fields(cls) if one.name == "alpha")
        return metadata["effective"].power

    @classmethod
    def effective(
        cls,
        hypergradient: AbstractHypergradient,
        *,
        upper_step: Any,
        lower_step: Any,
        upper_weight: Any,
        lower_weight: Any,
        eta: Any = 1.0,
        **rest: Any,
    ) -> Any:
        """Build from what a step really does at t = 0; `eta` gives the shape over t.

        x moves by upper_step * u, and u keeps 1 - upper_weight of its memory.
        """
        make: Any = cls
        schedule = as_schedule(eta)
        first = schedule(0)
        scale = first ** cls.power()
        return make(
            hypergradient,
            schedule,
            alpha=upper_weight / scale,
            beta=lower_weight / scale,
            rho1=upper_step / first,
            rho2=lower_step / first,
            **rest,
        )

    def effective_values(self, t: int = 0) -> dict[str, float]:
        """Return the effective steps and weights at iteration t."""
        step, weight = self.step(t), self.weight(max(t, 1))
        return {
            "upper_step": float(step.x),
            "lower_step": float(step.y),
            "upper_weight": float(weight.x),
            "lower_weight": float(weight.y),
        }

    def __check_init__(self) -> None:
        numbers = (self.alpha, self.beta, self.rho1, self.rho2, self.eta(0))
        if not all(is_known(number) for number in numbers):
            return
        name, power = type(self).__name__, self.power()
        alpha, beta, rho1, rho2, eta = (float(number) for number in numbers)
        if not (alpha > 0 and beta > 0 and rho1 >= 0 and rho2 >= 0 and eta > 0):
            raise InvalidInputError(
                f"`{name}` needs alpha, beta, eta > 0 and rho1, rho2 >= 0, got "
                f"alpha={alpha:g}, beta={beta:g}, eta={eta:g}, rho1={rho1:g}, "
                f"rho2={rho2:g}."
            )
        shown = "" if power == 1 else f"^{power}"
        for letter, value in (("alpha", alpha), ("beta", beta)):
            plain = value == 1 and eta == 1
            if value * eta**power >= 1 and not plain:
                raise InvalidInputError(
                    f"`{name}`: {letter}*eta{shown} = {value * eta**power:.4g} must be "
                    f"below 1. With eta={eta:g} use {letter} < {eta**-power:.4g}; for "
                    f"local steps without memory set {letter} = eta = 1."
                )
