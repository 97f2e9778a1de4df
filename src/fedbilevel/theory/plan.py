r"""Plans: all parameters of a run from K and T, or from K and a target.

`theory`: the theorem's own constants. For given T, the step eta that balances the start
(falling in eta T) against the noise (growing in eta), p as large as the drift terms
allow, Q as large as the truncation needs. For a target, the least T whose bound is
below it.

`practical`: measured once at small K_0 and T_0, then scaled by the corollaries:

    LocalBSGM     eta ~ (K/T)^(1/2),        p ~ T^(1/4)/K^(3/4),  M ~ (K T)^(-1/2)
    LocalBSGVRM   eta ~ K^(2/3)/T^(1/3),    p, B ~ T^(1/3)/K^(2/3),
                  alpha, beta ~ 1/K,        M ~ (K T)^(-2/3)
    both          Q ~ log(K T)

M tends to zero, as the squared gradient does that the theorems bound. Of another metric
the part above its floor is scaled, and a target below the floor is refused.

Both claims need T >= K^3 (LocalBSGM) or T >= K^2 (LocalBSGVRM): else the corollary's p
is below 1.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from fedbilevel.errors import InvalidInputError
from fedbilevel.theory.constants import Constants, Inputs
from fedbilevel.theory.theorems import Parameters, bound, dominating, largest_steps

_THEOREMS = (1, 2, 3)
_MOST_ITERATIONS = 1e30
_MARGIN = 0.99  # the conditions on eta are strict
_TURNS = 6
_PRECISION = 1e-3  # of log eta: the bound is flat where it is least


@dataclass(frozen=True)
class Plan:
    """Everything needed to run, what it will cost, and what it promises."""

    preset: str
    theorem: int
    clients: int
    iterations: int
    local_steps: int
    eta: str
    alpha: float
    beta: float
    rho1: float
    rho2: float
    theta: float
    q: int
    first_batch: int
    rounds: int
    floats_up: int
    bytes_up: int
    samples_per_client: int
    promise: float
    terms: dict[str, float] = field(default_factory=dict)
    dominating: str = ""
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @staticmethod
    def from_plain(data: dict[str, Any]) -> "Plan":
        """Read what `plain` wrote."""
        plan = Plan(**data)
        if plan.theorem not in _THEOREMS:
            raise ValueError(f"theorem {plan.theorem}")
        return plan


@dataclass(frozen=True)
class Calibration:
    """One measurement: `parameters` for `iterations` iterations gave `value`.

    `sizes` are dx and dy. `floor` is what the metric tends to: 0 if it is a squared
    gradient.
    """

    theorem: int
    iterations: int
    parameters: Parameters
    theta: float
    q: int
    sizes: tuple[int, int]
    value: float
    floor: float = 0.0

    def scale(self, clients: int, T: float) -> float:
        """Return by how much the corollary lowers what tends to zero."""
        power = 1 / 2 if self.theorem == 1 else 2 / 3
        work = self.parameters.clients * self.iterations
        return (clients * T / work) ** -power

    def promise(self, clients: int, T: float) -> float:
        """Return what the mean of the metric will come to."""
        return self.floor + (self.value - self.floor) * self.scale(clients, T)


def theory_plan(
    theorem: int,
    inputs: Inputs,
    clients: int,
    *,
    sizes: tuple[int, int],
    iterations: int | None = None,
    target: float | None = None,
    start: tuple[float, float] = (1.0, 1.0),
    theta: float | None = None,
) -> Plan:
    """Plan by the theorem's own constants.

    `sizes` are dx and dy, `start` is (Phi(x_0) - min Phi, ||y_0 - y*(x_0)||^2).
    """
    rate = theta or 0.5 / inputs.l1
    at = partial(balanced, theorem, inputs, clients, start=start, theta=rate)
    T = _given_or_least(iterations, target, lambda T: sum(at(T)[2].values()))
    c, s, terms = at(T)
    literal = f"theorem3:{float(c.l_hat)!r}:{float(c.l_phi)!r}"
    eta = literal if theorem == 3 else repr(float(s.eta))
    known: dict[str, Any] = {"eta": eta, "theta": c.theta, "terms": terms}
    known |= {"promise": sum(terms.values()), "dominating": dominating(terms)}
    return _costed("theory", theorem, s, T, sizes, q=c.q, **known)


def practical_plan(
    calibration: Calibration,
    clients: int,
    *,
    iterations: int | None = None,
    target: float | None = None,
) -> Plan:
    """Scale what was measured by the corollary's exponents."""
    base, first = calibration, calibration.parameters
    known = f"the metric is estimated not to fall below {base.floor:.4g}"
    if base.floor >= base.value:
        known = f"nothing shows that the metric falls below {base.floor:.4g}"
    if target is not None and 0 < target <= base.floor:
        raise InvalidInputError(
            f"target={target:g}: {known}, however long the run, so ask for more; "
            f"K = {first.clients} and T = {base.iterations} gave {base.value:.4g}."
        )
    T = _given_or_least(iterations, target, lambda T: base.promise(clients, T))
    more, longer = clients / first.clients, T / base.iterations
    if base.theorem == 1:
        step, period, weight = (more / longer) ** 0.5, longer**0.25 / more**0.75, 1.0
    else:
        step, period = more ** (2 / 3) / longer ** (1 / 3), longer ** (1 / 3)
        period, weight = period / more ** (2 / 3), 1 / more
    s = replace(
        first,
        clients=clients,
        eta=first.eta * step,
        alpha=first.alpha * weight,
        beta=first.beta * weight,
        local_steps=max(1, round(first.local_steps * period)),
        first_batch=max(1, round(first.first_batch * period)),
    )
    work = first.clients * base.iterations
    q = max(1, round(base.q * math.log(clients * T + 1) / math.log(work + 1)))
    eta = _decaying(s.eta, T) if base.theorem == 3 else repr(float(s.eta))
    notes = (f"Only the part above a floor is scaled: {known}.",) if base.floor else ()
    found: dict[str, Any] = {"eta": eta, "theta": base.theta, "notes": notes}
    found["promise"] = base.promise(clients, T)
    return _costed("practical", base.theorem, s, T, base.sizes, q=q, **found)


def _decaying(eta: float, T: int) -> str:
    """Return the practical decay c0/(w0 + t)^(1/3) that has come to eta at t = T.

    Theorem 3 keeps the step constant until t is some K^2 p^3, which under the
    corollary is a share of T: here an eighth, so that the first step is twice eta.
    """
    w0 = T / 8
    return f"decay:{float(eta * (w0 + T) ** (1 / 3))!r}:{w0!r}"


def _given_or_least(iterations, target, value) -> int:
    """Return T as given, or the least one whose value is below the target."""
    if (iterations is None) == (target is None):
        raise InvalidInputError("give the iterations, or a target, and not both.")
    if iterations is not None:
        if iterations < 1:
            raise InvalidInputError(f"iterations={iterations}: at least 1.")
        return iterations
    if not target > 0:
        raise InvalidInputError(f"target={target}: must be above 0.")
    high = 1
    while value(high) > target:
        high *= 16
        if high > _MOST_ITERATIONS:
            raise InvalidInputError(
                f"no number of iterations reaches {target:g} by this bound."
            )
    low = high // 16
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if value(middle) <= target else (middle, high)
    return high


def _costed(
    preset: str,
    theorem: int,
    s: Parameters,
    T: int,
    sizes: tuple[int, int],
    *,
    q: int,
    notes: tuple[str, ...] = (),
    **known: Any,
) -> Plan:
    """Return a plan, with what it costs."""
    rounds = -(-T // s.local_steps)
    floats = rounds * 2 * sum(sizes)
    least = s.clients ** (3 if theorem == 1 else 2)
    note = (
        f"T = {T} is below K^{3 if theorem == 1 else 2} = {least}: the corollary's p "
        "would be below 1, and a linear speed-up is not claimed here."
    )
    return Plan(
        preset=preset,
        theorem=theorem,
        iterations=T,
        **(asdict(s) | known),
        q=q,
        rounds=rounds,
        floats_up=floats,
        bytes_up=4 * floats,
        samples_per_client=(T + s.first_batch - 1) * (q + 3),
        notes=((note,) if least > T else ()) + notes,
    )


def balanced(
    theorem: int,
    inputs: Inputs,
    clients: int,
    T: float,
    start: tuple[float, float],
    theta: float,
) -> tuple[Constants, Parameters, dict[str, float]]:
    """Return constants, parameters and the terms of the bound after T iterations.

    eta minimizes the bound. p = B is the largest with which the drift stays below a
    quarter of the noise. Each depends on the other, so they take turns. Q is as large
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
