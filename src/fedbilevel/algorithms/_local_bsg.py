"""What LocalBSGM and LocalBSGVRM share: parameters, states, the exchange of a round."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._blocks import join, only
from fedbilevel._types import Key, Lower, Pair
from fedbilevel.algorithms import _options
from fedbilevel.algorithms._base import Phase, Phases, Turn
from fedbilevel.algorithms._parts import (
    at_time,
    coupled,
    first_or_coupled,
    hypergradient_and_slope,
)
from fedbilevel.algorithms._single_loop import (
    AbstractSingleLoop,
    Directions,
    Iterate,
    Order,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import Schedule, as_number, as_schedule, describe, is_known

__all__ = ["AbstractLocalBSG"]


class AbstractLocalBSG(AbstractSingleLoop):
    """Fields in the paper's letters.

    `hypergradient` is the client's estimate of grad Phi, `eta` the common step or its
    schedule, `rho1` and `rho2` scale it for x and y, `alpha` and `beta` set the
    momentum weights of u and v, `local_steps` is p, and `warm_start` counts lower
    steps before the first round (one extra exchange that averages y).
    """

    inverts_locally: ClassVar[bool] = True
    weight_power: ClassVar[int]

    hypergradient: AbstractHypergradient
    eta: Schedule = eqx.field(converter=as_schedule)
    alpha: Float[Array, "..."] = eqx.field(converter=as_number)
    beta: Float[Array, "..."] = eqx.field(converter=as_number)
    rho1: Float[Array, "..."] = eqx.field(converter=as_number)
    rho2: Float[Array, "..."] = eqx.field(converter=as_number)
    warm_start: int = eqx.field(static=True, default=0)

    @classmethod
    def effective(
        cls,
        hypergradient: AbstractHypergradient,
        *,
        upper_step: float,
        lower_step: float,
        upper_weight: float,
        lower_weight: float,
        local_steps: int,
        eta: Any = 1.0,
        **rest: Any,
    ) -> Self:
        """Build from what a step really does at t = 0; `eta` gives the shape over t.

        x moves by upper_step * u and u keeps 1 - upper_weight of its memory.
        """
        schedule = as_schedule(eta)
        first = schedule(0)
        scale = first**cls.weight_power
        return cls(
            hypergradient,
            schedule,
            alpha=upper_weight / scale,
            beta=lower_weight / scale,
            rho1=upper_step / first,
            rho2=lower_step / first,
            local_steps=local_steps,
            **rest,
        )

    def effective_values(self, t: int = 0) -> dict[str, float]:
        """Return the effective steps and weights at iteration t."""
        step, power = self.step(t), self.weight_power
        alpha, beta = (coupled(c, self.eta, t, power) for c in (self.alpha, self.beta))
        return {
            "upper_step": float(step.x),
            "lower_step": float(step.y),
            "upper_weight": float(alpha),
            "lower_weight": float(beta),
        }

    def parameters(self) -> dict[str, Any]:
        """Return the letters and the effective values at t = 0."""
        letters = ("alpha", "beta", "rho1", "rho2")
        return {
            **{letter: float(getattr(self, letter)) for letter in letters},
            "eta": describe(self.eta),
            "hypergradient": describe(self.hypergradient),
            "local_steps": self.local_steps,
            "first_batch": self.first_bundles(),
            "warm_start": self.warm_start,
            "effective": self.effective_values(),
        }

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Name the options that `from_options` takes."""
        return (*_options.LETTERS, *_options.EFFECTIVE, "q", "theta", "warm_start")

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], clients: int, local_steps: int
    ) -> Self:
        """Build from letters or effective values, whichever are given."""
        rule = _options.series(options)
        counts = {
            name: _options.integer(options, name)
            for name in ("warm_start", "first_batch")
            if name in options
        }
        letters = _options.letters(options, clients, local_steps)
        if letters is not None:
            return cls(rule, local_steps=local_steps, **letters, **counts)
        values = _options.effective(options, clients, local_steps)
        return cls.effective(rule, local_steps=local_steps, **values, **counts)

    def __check_init__(self) -> None:
        name = type(self).__name__
        if self.warm_start < 0:
            raise InvalidInputError(
                f"`{name}(warm_start=...)` must not be negative, got {self.warm_start}."
            )
        numbers = (self.alpha, self.beta, self.rho1, self.rho2, self.eta(0))
        if not all(is_known(number) for number in numbers):
            return
        alpha, beta, rho1, rho2, eta = (float(number) for number in numbers)
        if not (alpha > 0 and beta > 0 and rho1 >= 0 and rho2 >= 0 and eta > 0):
            raise InvalidInputError(
                f"`{name}` needs alpha, beta, eta > 0 and rho1, rho2 >= 0, got "
                f"alpha={alpha:g}, beta={beta:g}, eta={eta:g}, rho1={rho1:g}, "
                f"rho2={rho2:g}."
            )
        power = "" if self.weight_power == 1 else f"^{self.weight_power}"
        for letter, value in (("alpha", alpha), ("beta", beta)):
            plain = value == 1 and eta == 1
            if value * eta**self.weight_power >= 1 and not plain:
                raise InvalidInputError(
                    f"`{name}`: {letter}*eta{power} = "
                    f"{value * eta**self.weight_power:.4g} must be below 1. With "
                    f"eta={eta:g} use {letter} < {eta**-self.weight_power:.4g}; for "
                    f"local steps without memory set {letter} = eta = 1."
                )

    def order(self) -> Order:
        """Return the simultaneous order."""
        return (("x", "y"),)

    def step(self, t: Any) -> Pair:
        """Return rho1 eta_t and rho2 eta_t."""
        eta = at_time(self.eta, t, self.rho1)
        return Pair(self.rho1 * eta, self.rho2 * eta)

    def weight(self, t: Any) -> Pair:
        """Return the momentum weights at t; the first bundles count 1/B each."""
        shared = (self.eta, t, self.weight_power, self.first_bundles())
        return Pair(
            first_or_coupled(self.alpha, *shared), first_or_coupled(self.beta, *shared)
        )

    def setup(self) -> Phases:
        """Return the optional warm start of the lower level."""
        if self.warm_start == 0:
            return ()

        def replace(server: Iterate, mean: Pair) -> Iterate:
            return Iterate(join(mean, server.point), server.direction)

        return (
            Phase(
                "warm_start",
                lambda s: s.point,
                self._warm_start,
                replace,
                about=lambda point: only(point, ("y",)),
            ),
        )

    def check(self, curvature: float, client: int) -> None:
        """Ask the hypergradient rule."""
        self.hypergradient.check(curvature, client)

    def directions(self, oracle: Oracle, key: Key) -> Directions:
        """Draw b_t and zeta_t; return h_k and grad_y g_k with them."""
        return hypergradient_and_slope(self.hypergradient, oracle, key)

    def _warm_start(self, point: Pair, client: Any, oracle: Oracle, turn: Turn):
        def descend(y: Lower, key: Key) -> tuple[Lower, None]:
            slope = oracle.lower_gradient(point.x, y, oracle.draw_lower(key))
            return _tree.add_scaled(y, -self.step(0).y, slope), None

        y, _ = jax.lax.scan(descend, point.y, turn.keys(self.warm_start))
        return client, Pair(None, y)
