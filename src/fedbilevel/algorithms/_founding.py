"""What the two algorithms of the founding paper share: their letters and a warm start.

The letters alpha and beta set the momentum weights of u and v, rho1 and rho2 scale the
common step eta for x and y. A weight is alpha eta^power, with the power 1 for moving
averages and 2 for variance-reduced momentum.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Pair
from fedbilevel.algorithms._base import Phase, Turn
from fedbilevel.algorithms._local import Iterate
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_schedule, is_known

__all__ = ["check_letters", "effective_values", "from_effective", "warm_start"]

T = TypeVar("T")


def from_effective(
    kind: Callable[..., T],
    power: int,
    hypergradient: AbstractHypergradient,
    *,
    upper_step: float,
    lower_step: float,
    upper_weight: float,
    lower_weight: float,
    eta: Any,
    **rest: Any,
) -> T:
    """Build from what a step really does at t = 0; `eta` gives the shape over t."""
    schedule = as_schedule(eta)
    first = schedule(0)
    scale = first**power
    return kind(
        hypergradient,
        schedule,
        alpha=upper_weight / scale,
        beta=lower_weight / scale,
        rho1=upper_step / first,
        rho2=lower_step / first,
        **rest,
    )


def effective_values(step: Pair, weight: Pair) -> dict[str, float]:
    """Name steps and weights by what they do."""
    return {
        "upper_step": float(step.x),
        "lower_step": float(step.y),
        "upper_weight": float(weight.x),
        "lower_weight": float(weight.y),
    }


def check_letters(algorithm: Any, power: int) -> None:
    """Raise unless all letters can work."""
    name = type(algorithm).__name__
    letters = (algorithm.alpha, algorithm.beta, algorithm.rho1, algorithm.rho2)
    numbers = (*letters, algorithm.eta(0))
    if not all(is_known(number) for number in numbers):
        return
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


def warm_start(steps: int, length: Array) -> Phase:
    """Return the exchange that averages y after so many lower steps."""

    def local(point: Pair, client: Any, oracle: Oracle, turn: Turn):
        def descend(y: Lower, key: Key) -> tuple[Lower, None]:
            slope = oracle.lower_gradient(point.x, y, oracle.draw_lower(key))
            return _tree.add_scaled(y, -length, slope), None

        y, _ = jax.lax.scan(descend, point.y, turn.keys(steps))
        return client, Pair(None, y)

    def replace_y(server: Iterate, mean: Pair) -> Iterate:
        return replace(server, point=Pair(server.point.x, mean.y))

    return Phase(
        "warm_start",
        lambda server: server.point,
        local,
        replace_y,
        about=lambda point: Pair(None, point.y),
    )
