r"""Theorems 1, 2 and 3: every inequality with both sides, and every term of the bound.

The largest steps a theorem allows follow from the same right-hand sides: rho2 first,
then rho1 (whose bound contains rho2), then eta. It bounds the mean stationarity

    M(T) = (1/T) sum_t E[ ||grad Phi(xbar_t)||^2 + Ltil^2 ||ybar_t - y*(xbar_t)||^2 ]

with Phi0 = Phi(x_0) - min Phi and Y0 = ||y_0 - y*(x_0)||^2.

Readings: where the paper prints `rho <= {..}` it is the minimum. Theorem 2 asks for
alpha, beta <= Lhat^2/K, Theorem 3 sets them above that: two regimes, not to be mixed.
The noise of u has the variance G^2, so the printed 4 alpha eta sigma^2/K of Theorem 1
and 32 sigma^2 log(T+1) of Theorem 3 are read with G^2, as in Theorem 2.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_FLOOR, Decimal
from functools import partial
from typing import Any

from fedbilevel.errors import InvalidInputError
from fedbilevel.theory.constants import Constants

Terms = dict[str, float]


@dataclass(frozen=True)
class Parameters:
    """The parameters of a run, as the paper names them. eta is the first step."""

    clients: int
    local_steps: int
    eta: float
    alpha: float
    beta: float
    rho1: float
    rho2: float
    first_batch: int = 1


@dataclass(frozen=True)
class Condition:
    """`name`: left <= right, or < if strict. `letter` is the parameter to lower."""

    theorem: int
    name: str
    letter: str
    left: float
    right: float
    strict: bool = False

    @property
    def holds(self) -> bool:
        """Say whether it holds. A single-precision number may round past its limit."""
        room = 1.0 if self.strict else 1 + 1e-6
        return self.left < self.right * room

    @property
    def slack(self) -> float:
        """Return how many times the left side fits into the right one."""
        return math.inf if self.left == 0 else self.right / self.left

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, with slack and advice."""
        found = {"holds": self.holds, "slack": self.slack, "advice": self.advice()}
        return {**asdict(self), **found}

    def advice(self) -> str:
        """Say what would make it hold."""
        if self.holds:
            return ""
        sign = "below" if self.strict else "at most"
        if self.letter == "alpha = beta":
            return f"set alpha and beta to {self.right:.4g}"
        return f"{self.letter} {sign} {self.right:.4g}, {1 / self.slack:.3g} times less"


def _condition(
    theorem: int, s: Parameters, name: str, letter: str, right: float, *strict: bool
) -> Condition:
    return Condition(theorem, name, letter, getattr(s, letter), right, *strict)


def _conditions_one(c: Constants, s: Parameters) -> list[Condition]:
    l1, mu = c.inputs.l1, c.inputs.mu
    hat, tilde = (2 * c.l_hat / s.alpha) ** 2, (l1 * c.l_tilde / (s.beta * mu)) ** 2
    drift = (s.alpha**2 + s.beta**2) ** 0.25 * (s.rho1**2 + s.rho2**2) ** 0.25
    drift *= 3 * s.local_steps * math.sqrt(c.l_hat)
    of_u, of_v = hat + 500 / 3 * tilde, hat + 400 / 3 * tilde

    one = partial(_condition, 1, s)
    return [
        one("rho2 and the noise of v", "rho2", 6 * c.l_tilde**2 / mu / of_v),
        one("rho2 <= 1/(6 L1)", "rho2", 1 / (6 * l1)),
        one("rho1 and rho2", "rho1", 3 * s.rho2 * mu**2 / (50 * l1 * c.l_tilde)),
        one("rho1 and the noise of u", "rho1", 0.25 / math.sqrt(of_u)),
        one("eta < 1/alpha", "eta", 1 / s.alpha, True),
        one("eta < 1/beta", "eta", 1 / s.beta, True),
        one("eta < 1/(2 rho1 L_Phi)", "eta", _over(2 * s.rho1 * c.l_phi), True),
        one("eta and the drift of clients", "eta", _over(drift), True),
        one("eta < 1", "eta", 1.0, True),
    ]


def _bound_one(c: Constants, s: Parameters, T: float, phi0: float, y0: float) -> Terms:
    i, p, eta = c.inputs, s.local_steps, s.eta
    tilde = c.l_tilde**2 / i.mu**2
    moves = s.rho1**2 + s.rho2**2
    noise = s.alpha**2 * c.g_squared + s.beta**2 * i.sigma**2
    quartic = 2 * c.l_hat**2 + 500 / 3 * i.l1**2 * tilde
    square = 4 * c.l_hat**2 / s.alpha**2 + 500 / 3 * i.l1**2 * tilde / s.beta**2
    return {
        "start of x": 2 * phi0 / (eta * s.rho1 * T),
        "start of y": 20 * c.l_tilde**2 * y0 / (eta * T * s.rho2 * i.mu),
        "first u": 4 * c.g_squared / (s.alpha * eta * T),
        "first v": 500 / 3 * tilde * i.sigma**2 / (eta * T * s.beta),
        "noise of u": 4 * s.alpha * eta * c.g_squared / s.clients,
        "noise of v": 500 / 3 * s.beta * eta * i.sigma**2 * tilde / s.clients,
        "truncated series": 4 * c.delta_q**2,
        "drift, order 4": 48 * p**4 * eta**4 * moves * quartic * noise,
        "drift, order 2": 48 * p**2 * eta**2 * moves * square * noise,
    }


def _variance_weights(c: Constants, s: Parameters) -> tuple[float, float]:
    """Return W and V of Theorem 2."""
    l1, mu, tilde = c.inputs.l1, c.inputs.mu, c.l_tilde
    noise = 16 * c.l_hat**2 / (s.alpha * s.clients)
    noise += 2000 * l1**2 * tilde**2 / (3 * s.beta * mu**2 * s.clients)
    w = 4 + 1000 * tilde**2 / (3 * mu**2) + noise
    return w, noise + 12 / 25 * w


def _conditions_two(c: Constants, s: Parameters) -> list[Condition]:
    l1, mu = c.inputs.l1, c.inputs.mu
    _, v = _variance_weights(c, s)

    one = partial(_condition, 2, s)
    return [
        one("alpha <= Lhat^2/K", "alpha", c.l_hat**2 / s.clients),
        one("beta <= Lhat^2/K", "beta", c.l_hat**2 / s.clients),
        one("rho2 <= 1/(6 L1)", "rho2", 1 / (6 * l1)),
        one("rho2 and the noise", "rho2", 15 * c.l_tilde**2 / mu / v),
        one("rho2 <= 10", "rho2", 10.0),
        one("rho1 and rho2", "rho1", s.rho2 * mu**2 / (20 * c.l_tilde * l1)),
        one("rho1 and the noise", "rho1", 0.5 / math.sqrt(v)),
        one("rho1 <= 10", "rho1", 10.0),
        one("eta <= 1/sqrt(alpha)", "eta", 1 / math.sqrt(s.alpha)),
        one("eta <= 1/sqrt(beta)", "eta", 1 / math.sqrt(s.beta)),
        one("eta <= 1/(200 p Lhat)", "eta", 1 / (200 * s.local_steps * c.l_hat)),
    ]


def _bound_two(c: Constants, s: Parameters, T: float, phi0: float, y0: float) -> Terms:
    i, p, eta, K, B = c.inputs, s.local_steps, s.eta, s.clients, s.first_batch
    tilde = c.l_tilde**2 / i.mu**2
    w, _ = _variance_weights(c, s)
    noise = s.beta**2 * i.sigma**2 + s.alpha**2 * c.g_squared
    shared = eta**2 * T * K * B
    return {
        "start of x": 2 * phi0 / (eta * s.rho1 * T),
        "start of y": 10 * c.l_tilde**2 * y0 / (s.rho2 * i.mu * eta * T),
        "first u": 2 * c.g_squared / (s.alpha * shared),
        "first v": 250 / 3 * tilde * i.sigma**2 / (s.beta * shared),
        "noise of u": 8 * s.alpha * eta**2 * c.g_squared / K,
        "noise of v": 1000 / 3 * s.beta * eta**2 * i.sigma**2 * tilde / K,
        "truncated series": 4 * c.delta_q**2,
        "drift": (s.rho1**2 + s.rho2**2) * w * 48 * p**2 * eta**4 * noise,
    }


def theorem_three_weight(c: Constants, clients: int, local_steps: int) -> float:
    """Return the alpha = beta that Theorem 3 sets."""
    return c.l_hat**2 / (3 * local_steps * clients**2) + c.l_hat**2 / clients


def _conditions_three(c: Constants, s: Parameters) -> list[Condition]:
    l1, mu = c.inputs.l1, c.inputs.mu
    weight = theorem_three_weight(c, s.clients, s.local_steps)
    decay = s.clients ** (2 / 3) / (c.l_hat * 2 ** (1 / 3))
    drift = 1 / (200 * s.local_steps * c.l_hat)
    step = min(decay, drift, _over(2 * s.rho1 * c.l_phi))

    one = partial(_condition, 3, s)
    off = max(abs(s.alpha - weight), abs(s.beta - weight))
    equal = weight if off <= 1e-6 * weight else math.inf
    return [
        Condition(3, "alpha and beta as set", "alpha = beta", equal, weight),
        one("rho2 <= 15 mu/1174", "rho2", 15 * mu / 1174),
        one("rho2 <= 1/(6 L1)", "rho2", 1 / (6 * l1)),
        one("rho2 <= 10", "rho2", 10.0),
        one("rho1 and rho2", "rho1", s.rho2 * mu**2 / (60 * l1**2)),
        one("rho1 <= mu/(100 Ltil)", "rho1", mu / (100 * c.l_tilde)),
        one("rho1 <= 10", "rho1", 10.0),
        one("eta_0 of the schedule", "eta", step),
    ]


def _bound_three(
    c: Constants, s: Parameters, T: float, phi0: float, y0: float
) -> Terms:
    i, p, K, B = c.inputs, s.local_steps, s.clients, s.first_batch
    tilde, log = c.l_tilde**2 / i.mu**2, math.log(T + 1)
    rate = 200 * p / T + (K * T) ** (-2 / 3)
    drift = 3 * (s.rho1**2 + s.rho2**2) * tilde * (i.sigma**2 + c.g_squared)
    series = 4 * 200**3 * K**2 * p**3 / T + 4
    return {
        "start of x": 2 * phi0 * c.l_hat * rate / s.rho1,
        "start of y": 20 * c.l_tilde**2 * y0 * c.l_hat * rate / (s.rho2 * i.mu),
        "first u": 800 * p * c.g_squared * rate / B,
        "first v": 200000 / 3 * p * i.sigma**2 * tilde * rate / B,
        "noise of u": 32 * c.g_squared * rate * log,
        "noise of v": 4000 / 3 * i.sigma**2 * tilde * rate * log,
        "truncated series": series * c.delta_q**2 * log,
        "drift": drift * rate * log,
    }


_THEOREMS: Mapping[int, tuple[Callable[..., list[Condition]], Callable[..., Terms]]] = {
    1: (_conditions_one, _bound_one),
    2: (_conditions_two, _bound_two),
    3: (_conditions_three, _bound_three),
}


def conditions(theorem: int, c: Constants, s: Parameters) -> list[Condition]:
    """Return the inequalities of a theorem for a run."""
    if theorem not in _THEOREMS:
        raise InvalidInputError(f"theorem={theorem}: there are 1, 2 and 3.")
    limit = 1 / c.inputs.l1
    contracts = Condition(theorem, "theta < 1/L1", "theta", c.theta, limit, True)
    return [contracts, *_THEOREMS[theorem][0](c, s)]


def bound(
    theorem: int, c: Constants, s: Parameters, T: float, phi0: float, y0: float
) -> Terms:
    """Return the terms of the bound on M(T), whose sum it is."""
    return _THEOREMS[theorem][1](c, s, T, phi0, y0)


def dominating(terms: Mapping[str, float]) -> str:
    """Return the name of the largest term."""
    return max(terms, key=lambda name: terms[name])


def largest_steps(
    theorem: int,
    c: Constants,
    clients: int,
    local_steps: int,
    alpha: float | None = None,
    beta: float | None = None,
    digits: int | None = None,
) -> Parameters:
    """Return the largest rho2, rho1, eta that a theorem allows, in this order.

    If alpha and beta are not given, they are 1 for Theorem 1, Lhat^2/K for 2, and set
    by Theorem 3. With `digits` all steps have so many, and the theorem still holds for
    the printed numbers. A strict limit is not reached.
    """
    usual = {1: 1.0, 2: c.l_hat**2 / clients}
    weight = usual.get(theorem, theorem_three_weight(c, clients, local_steps))
    s = Parameters(clients, local_steps, 0, alpha or weight, beta or weight, 0, 0)
    for letter in ("rho2", "rho1", "eta"):
        found = conditions(theorem, c, s)
        mine = [one for one in found if one.letter == letter]
        limit = min(one.right for one in mine)
        if digits is not None:
            strict = any(one.strict and one.right == limit for one in mine)
            limit = _written(limit, digits, strict)
        s = replace(s, **{letter: limit})
    return s


def _written(limit: float, digits: int, strict: bool) -> float:
    """Return a number of so many digits just up to a limit, or just below it."""
    if not 0 < limit < math.inf:
        return limit
    unit = digits - 1 - math.floor(math.log10(limit))
    # Decimal, since a power of ten below one is no number of a computer's.
    step = Decimal(1).scaleb(-unit)
    count = (Decimal(limit) / step).to_integral_value(ROUND_FLOOR)
    if strict and float(count * step) >= limit:
        count -= 1
    return float(count * step)


def _over(value: float) -> float:
    return math.inf if value == 0 else 1 / value
