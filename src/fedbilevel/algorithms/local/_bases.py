"""Bases of the family's methods: the blocks that move, directions, replies, wiring."""

from dataclasses import fields
from typing import Any

from fedbilevel.algorithms import OneLoop, directions
from fedbilevel.algorithms.parts import Stepping
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.schedules import as_schedule, is_known, part


class ByHypergradient(OneLoop):
    """Moves x along the client's own hypergradient, y along its lower slope."""

    inverts_locally = True

    hypergradient: AbstractHypergradient = part("the client's estimate of grad Phi")

    def directions(self, oracle, key, t):
        """Return h_k(.; b_t) and gy_k(.; zeta_t)."""
        return directions.hypergradient_and_slope(self.hypergradient, oracle, key)


class Founding(ByHypergradient):
    """A method with the parameters of the founding paper.

    alpha and beta set the momentum weights of u and v, rho1 and rho2 scale the common
    step eta for x and y. A weight is alpha eta^power, with the power 1 for moving
    averages and 2 for variance-reduced momentum.
    """

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
        """Build from the effective steps at t = 0. `eta` gives the shape over t.

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


class ByLinearSystem(OneLoop):
    """Moves x, y and the linear-system variable z, which starts at 0."""

    moves = ("x", "y", "z")

    def directions(self, oracle, key, t):
        """Return the maps nu, omega and q."""
        return directions.three_directions(oracle, key)


class OnLinearSystem(Stepping):
    """Moves x, y and z by exchanges of its own."""

    moves = ("x", "y", "z")


class ByLowerSlope(OneLoop):
    """Moves y alone, along its lower slope, at the x that is given."""

    answers = "shared y, x fixed"
    moves = ("y",)

    def directions(self, oracle, key, t):
        """Return gy_k(.; zeta)."""
        return directions.lower_slope(oracle, key)
