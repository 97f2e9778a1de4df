"""The paper's constants, conditions and bounds, copied from its lines in plain Python.

Nothing is shared with the package, and nothing is factored out: each expression stands
as printed, with the readings of fedbilevel.theory (L_21 for L_12, G^2 for G, G^2 in the
noise of u, the minimum where an operator is missing). A problem is a dictionary of its
letters L0, L1, L21, L22, mu, sigma; a run one of K, p, B, eta, alpha, beta, rho1, rho2.
"""

from math import inf, log, sqrt


def derived(problem, theta, Q):
    """Return L_Phi, Lhat^2, Ltil, G^2 and Delta_Q."""
    L0, L1, L21, L22, mu, sigma = (
        problem[name] for name in ("L0", "L1", "L21", "L22", "mu", "sigma")
    )
    return {
        "L_Phi": L1
        + (2 * L1**2 + L21 * L0**2) / mu
        + (L22 * L1 * L0 + L1**3 + L21 * L0 * L1) / mu**2
        + L22 * L1**2 * L0 / mu**3,
        "Lhat2": 2 * L1**2
        + 4 * theta**2 * L0**2 * L21**2 * (Q + 1) ** 2
        + 8 * theta**2 * L1**4 * (Q + 1) ** 2
        + 2 * theta**4 * L0**2 * L1**2 * L22**2 * Q**2 * (Q + 1) ** 2,
        "Ltil": L1 + L1**2 / mu + L0 * L21 / mu + L0 * L1 * L22 / mu**2,
        "G2": 2 * L0**2
        + 12 * theta**2 * L0**2 * L1**2 * (Q + 1) ** 2
        + 4 * theta**4 * L0**2 * L1**2 * (Q + 2) * (Q + 1) ** 2 * sigma**2,
        "Delta_Q": (1 - theta * mu) ** (Q + 1) * L0 * L1 / mu,
    }


def _letters(problem, theta, Q, run):
    found = derived(problem, theta, Q)
    L1, mu = problem["L1"], problem["mu"]
    return (
        *(L1, mu, found["L_Phi"], sqrt(found["Lhat2"]), found["Ltil"]),
        *(run[name] for name in ("K", "p", "alpha", "beta", "rho1", "rho2")),
    )


def limits(theorem, problem, theta, Q, run):
    """Return (letter, right-hand side) of every inequality, in the paper's order."""
    return (_limits_1, _limits_2, _limits_3)[theorem - 1](problem, theta, Q, run)


def _limits_1(problem, theta, Q, run):
    L1, mu, L_Phi, Lhat, Ltil, _, p, alpha, beta, rho1, rho2 = _letters(
        problem, theta, Q, run
    )
    return [
        ("theta", 1 / L1),
        ("rho1", 3 * rho2 * mu**2 / (50 * L1 * Ltil)),
        (
            "rho1",
            (1 / 4)
            / sqrt(
                4 * Lhat**2 / alpha**2 + 500 * L1**2 * Ltil**2 / (3 * beta**2 * mu**2)
            ),
        ),
        (
            "rho2",
            (6 * Ltil**2 / mu)
            / (4 * Lhat**2 / alpha**2 + 400 * L1**2 * Ltil**2 / (3 * beta**2 * mu**2)),
        ),
        ("rho2", 1 / (6 * L1)),
        ("eta", 1 / alpha),
        ("eta", 1 / beta),
        ("eta", 1 / (2 * rho1 * L_Phi) if rho1 else inf),
        (
            "eta",
            1
            / (
                3
                * p
                * (alpha**2 + beta**2) ** (1 / 4)
                * (rho1**2 + rho2**2) ** (1 / 4)
                * Lhat ** (1 / 2)
            )
            if rho1 or rho2
            else inf,
        ),
        ("eta", 1),
    ]


def _limits_2(problem, theta, Q, run):
    L1, mu, _, Lhat, Ltil, K, p, alpha, beta, _, rho2 = _letters(problem, theta, Q, run)
    inner = (
        16 * Lhat**2 / (alpha * K)
        + 2000 * L1**2 * Ltil**2 / (3 * beta * mu**2 * K)
        + (12 / 25)
        * (
            4
            + 1000 * Ltil**2 / (3 * mu**2)
            + 16 * Lhat**2 / (alpha * K)
            + 2000 * L1**2 * Ltil**2 / (3 * beta * mu**2 * K)
        )
    )
    return [
        ("theta", 1 / L1),
        ("alpha", Lhat**2 / K),
        ("beta", Lhat**2 / K),
        ("eta", 1 / sqrt(alpha)),
        ("eta", 1 / sqrt(beta)),
        ("eta", 1 / (200 * p * Lhat)),
        ("rho1", rho2 * mu**2 / (20 * Ltil * L1)),
        ("rho1", (1 / 2) / sqrt(inner)),
        ("rho1", 10),
        ("rho2", 1 / (6 * L1)),
        ("rho2", (15 * Ltil**2 / mu) / inner),
        ("rho2", 10),
    ]


def _limits_3(problem, theta, Q, run):
    L1, mu, L_Phi, Lhat, Ltil, K, p, _, _, rho1, rho2 = _letters(problem, theta, Q, run)
    w_0 = max(2, 200**3 * K**2 * p**3, 8 * rho1**3 * L_Phi**3 * K**2 / Lhat**3)
    return [
        ("theta", 1 / L1),
        ("alpha = beta", Lhat**2 / (3 * p * K**2) + Lhat**2 / K),
        ("eta", (K ** (2 / 3) / Lhat) / w_0 ** (1 / 3)),
        ("rho1", rho2 * mu**2 / (60 * L1**2)),
        ("rho1", mu / (100 * Ltil)),
        ("rho1", 10),
        ("rho2", 15 * mu / 1174),
        ("rho2", 1 / (6 * L1)),
        ("rho2", 10),
    ]


def largest(theorem, problem, theta, Q, run):
    """Return a run with the largest rho2, rho1 and eta, in this order."""
    run = {**run, "rho1": 0.0, "rho2": 0.0}
    for letter in ("rho2", "rho1", "eta"):
        every = limits(theorem, problem, theta, Q, run)
        run[letter] = min(right for name, right in every if name == letter)
    return run


def bound_1(problem, theta, Q, run, T, Phi0, Y0):
    """Return the terms of Theorem 1 by the names the package gives them."""
    L1, mu, _, Lhat, Ltil, K, p, alpha, beta, rho1, rho2 = _letters(
        problem, theta, Q, run
    )
    found, sigma, eta = derived(problem, theta, Q), problem["sigma"], run["eta"]
    G2, Delta_Q = found["G2"], found["Delta_Q"]
    return {
        "start of x": 2 * Phi0 / (eta * rho1 * T),
        "start of y": 20 * Ltil**2 / (eta * T * rho2 * mu) * Y0,
        "first u": 4 * G2 / (alpha * eta * T),
        "first v": 500 * Ltil**2 * sigma**2 / (3 * eta * T * beta * mu**2),
        "noise of u": 4 * alpha * eta * G2 / K,
        "noise of v": 500 * beta * eta * sigma**2 * Ltil**2 / (3 * K * mu**2),
        "truncated series": 4 * Delta_Q**2,
        "drift, order 4": 48
        * alpha**2
        * eta**4
        * p**4
        * (rho1**2 + rho2**2)
        * (2 * Lhat**2 + 500 * L1**2 * Ltil**2 / (3 * mu**2))
        * G2
        + 48
        * beta**2
        * p**4
        * eta**4
        * (rho1**2 + rho2**2)
        * (2 * Lhat**2 + 500 * L1**2 * Ltil**2 / (3 * mu**2))
        * sigma**2,
        "drift, order 2": 48
        * alpha**2
        * p**2
        * eta**2
        * (rho1**2 + rho2**2)
        * (4 * Lhat**2 / alpha**2 + 500 * L1**2 * Ltil**2 / (3 * beta**2 * mu**2))
        * G2
        + 48
        * beta**2
        * p**2
        * eta**2
        * (rho1**2 + rho2**2)
        * (4 * Lhat**2 / alpha**2 + 500 * L1**2 * Ltil**2 / (3 * beta**2 * mu**2))
        * sigma**2,
    }


def bound_2(problem, theta, Q, run, T, Phi0, Y0):
    """Return the terms of Theorem 2."""
    L1, mu, _, Lhat, Ltil, K, p, alpha, beta, rho1, rho2 = _letters(
        problem, theta, Q, run
    )
    found, sigma, eta = derived(problem, theta, Q), problem["sigma"], run["eta"]
    G2, Delta_Q, B = found["G2"], found["Delta_Q"], run["B"]
    return {
        "start of x": 2 * Phi0 / (eta * rho1 * T),
        "start of y": 10 * Ltil**2 / (rho2 * mu * eta * T) * Y0,
        "first u": 2 * G2 / (alpha * eta**2 * T * K * B),
        "first v": 250 * Ltil**2 * sigma**2 / (3 * beta * mu**2 * eta**2 * T * K * B),
        "truncated series": 4 * Delta_Q**2,
        "noise of u": 8 * alpha * eta**2 * G2 / K,
        "noise of v": 1000 * beta * eta**2 * sigma**2 * Ltil**2 / (3 * mu**2 * K),
        "drift": (rho1**2 + rho2**2)
        * (
            4
            + 1000 * Ltil**2 / (3 * mu**2)
            + 16 * Lhat**2 / (alpha * K)
            + 2000 * L1**2 * Ltil**2 / (3 * beta * mu**2 * K)
        )
        * (
            48 * beta**2 * p**2 * eta**4 * sigma**2 + 48 * alpha**2 * p**2 * eta**4 * G2
        ),
    }


def bound_3(problem, theta, Q, run, T, Phi0, Y0):
    """Return the terms of Theorem 3."""
    _, mu, _, Lhat, Ltil, K, p, _, _, rho1, rho2 = _letters(problem, theta, Q, run)
    found, sigma = derived(problem, theta, Q), problem["sigma"]
    G2, Delta_Q, B = found["G2"], found["Delta_Q"], run["B"]
    with_hat = 200 * p * Lhat / T + Lhat / (K ** (2 / 3) * T ** (2 / 3))
    without = 200 * p / T + 1 / (K ** (2 / 3) * T ** (2 / 3))
    return {
        "start of x": 2 * Phi0 / rho1 * with_hat,
        "start of y": with_hat * 20 * Ltil**2 / (rho2 * mu) * Y0,
        "first u": without * 800 * p * G2 / B,
        "first v": without * 200000 * p * sigma**2 * Ltil**2 / (3 * mu**2 * B),
        "noise of u": without * 32 * G2 * log(T + 1),
        "noise of v": without * 4000 * sigma**2 * Ltil**2 / (3 * mu**2) * log(T + 1),
        "truncated series": (4 * 200**3 * K**2 * p**3 / T + 4)
        * Delta_Q**2
        * log(T + 1),
        "drift": without
        * 3
        * (rho1**2 + rho2**2)
        * Ltil**2
        * (sigma**2 + G2)
        / mu**2
        * log(T + 1),
    }


def bound(theorem, *given):
    """Return the terms of a theorem's bound."""
    return (bound_1, bound_2, bound_3)[theorem - 1](*given)
