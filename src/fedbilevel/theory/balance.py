"""The best parameters a theorem's bound allows for K clients and T iterations."""

import math
from collections.abc import Callable
from dataclasses import replace

from fedbilevel.theory.conditions import Parameters, largest_steps
from fedbilevel.theory.constants import Constants, Inputs
from fedbilevel.theory.rates import bound

_MARGIN = 0.99  # the conditions on eta are strict
_TURNS = 6
_PRECISION = 1e-3  # of log eta: the bound is flat where it is least


def balanced(
    theorem: int,
    inputs: Inputs,
    clients: int,
    T: float,
    start: tuple[float, float],
    theta: float,
) -> tuple[Constants, Parameters, dict[str, float]]:
    """Return constants, parameters and the terms of the bound after T iterations.

    eta minimizes the bound, p = B is the largest with which the drift stays below a
    quarter of the noise; each depends on the other, so they take turns. Q is as large
    as the truncation needs. `start` is (Phi0, Y0).
    """
    q = 0
    while True:
        c = Constants(inputs, theta, q)
        s = largest_steps(theorem, c, clients, 1)
        for _ in range(_TURNS):
            before = s.local_steps
            s = _longest_period(theorem, c, _best_step(theorem, c, s, T, start), T)
            if s.local_steps == before:
                break
        terms = bound(theorem, c, s, T, *start)
        rest = sum(terms.values()) - terms["truncated series"]
        # More factors raise Lhat and G^2, so no more than the truncation needs.
        if terms["truncated series"] <= 0.1 * rest or c.delta_q == 0:
            return c, s, terms
        q += max(1, q // 8)


def _best_step(
    theorem: int, c: Constants, s: Parameters, T: float, start: tuple[float, float]
) -> Parameters:
    if theorem == 3:  # whose schedule is given
        return s
    # Not at the current p, which may shrink again if a larger eta is worth it.
    limit = largest_steps(theorem, c, s.clients, 1, s.alpha, s.beta).eta

    def value(log_eta: float) -> float:
        at = replace(s, eta=math.exp(log_eta))
        return sum(bound(theorem, c, at, T, *start).values())

    high = math.log(_MARGIN * limit)
    return replace(s, eta=math.exp(_least(value, high - 60, high)))


def _least(value: Callable[[float], float], low: float, high: float) -> float:
    """Return where a convex function is least: sums of powers are, of the logarithm."""
    while high - low > _PRECISION:
        third = (high - low) / 3
        if value(low + third) < value(high - third):
            high -= third
        else:
            low += third
    return high


def _longest_period(theorem: int, c: Constants, s: Parameters, T: float) -> Parameters:
    """Return the parameters with the largest p that conditions and drift allow."""

    def with_period(p: int) -> Parameters:
        if theorem == 1:
            return replace(s, local_steps=p)
        longest = largest_steps(3, c, s.clients, p) if theorem == 3 else s
        return replace(longest, local_steps=p, first_batch=p)

    def allowed(p: int) -> bool:
        if theorem == 3:
            # Beyond this p the 200 p/T of the bound outweighs its (K T)^(-2/3).
            return 200 * p / T <= (s.clients * T) ** (-2 / 3)
        limit = largest_steps(theorem, c, s.clients, p, s.alpha, s.beta).eta
        if s.eta > _MARGIN * limit * (1 + 1e-9):
            return False
        terms = bound(theorem, c, with_period(p), 1.0, 0.0, 0.0)
        drift = sum(value for name, value in terms.items() if "drift" in name)
        return drift <= 0.25 * (terms["noise of u"] + terms["noise of v"])

    best = 1
    while allowed(2 * best):
        best *= 2
    step = best // 2
    while step:
        best += step if allowed(best + step) else 0
        step //= 2
    return with_period(best)
