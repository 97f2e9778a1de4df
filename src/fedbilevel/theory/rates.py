r"""The bounds of Theorems 1, 2 and 3 on the mean stationarity, term by term.

    M(T) = (1/T) sum_t E[ ||grad Phi(xbar_t)||^2 + Ltil^2 ||ybar_t - y*(xbar_t)||^2 ]

with Phi0 = Phi(x_0) - min Phi and Y0 = ||y_0 - y*(x_0)||^2.

Readings: the noise of u has the variance G^2, so the printed 4 alpha eta sigma^2/K of
Theorem 1 and 32 sigma^2 log(T+1) of Theorem 3 are read with G^2, as in Theorem 2.
"""

import math
from collections.abc import Callable, Mapping

from fedbilevel.theory.conditions import Parameters, _variance_weights
from fedbilevel.theory.constants import Constants


def _first(c: Constants, s: Parameters, T: float, phi0: float, y0: float):
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


def _second(c: Constants, s: Parameters, T: float, phi0: float, y0: float):
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


def _third(c: Constants, s: Parameters, T: float, phi0: float, y0: float):
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


_BOUNDS: Mapping[int, Callable[..., dict[str, float]]] = {
    1: _first,
    2: _second,
    3: _third,
}


def bound(
    theorem: int, c: Constants, s: Parameters, T: float, phi0: float, y0: float
) -> dict[str, float]:
    """Return the terms of the bound on M(T), whose sum it is."""
    return _BOUNDS[theorem](c, s, T, phi0, y0)


def dominating(terms: Mapping[str, float]) -> str:
    """Return the name of the largest term."""
    return max(terms, key=lambda name: terms[name])
