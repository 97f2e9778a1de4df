"""Listings with a warm start and with cohorts, in NumPy, round by round.

`cohorts[r]` are the clients of round r, `samples[k][t]` what client k draws at
iteration t of the run, whether it takes part or not, and `warm[k]` the lower samples of
the warm start. The server averages over who took part. A client that was there in the
last round corrects from where it stood before that average; any other has no such
point: its correction is left out, and the received momentum remains.
"""

import numpy as np

from tests.reference.bent_oracles import hypergradient, lower_gradient


def warm_started(x, y, cohort, warm, *, step):
    """Return y after the cohort's own lower steps, averaged."""
    ends = []
    for k in cohort:
        y_k = y
        for zeta in warm[k]:
            y_k = y_k - step * lower_gradient(x, y_k, zeta)
        ends.append(y_k)
    return np.mean(ends, axis=0)


def local_bsgm(x, y, samples, cohorts, *, p, eta, alpha, beta, rho1, rho2, theta):
    """Return the server's x, y, u, v after the last round."""
    u, v = np.zeros_like(x), np.zeros_like(y)
    for r, cohort in enumerate(cohorts):
        ends = []
        for k in cohort:
            x_k, y_k, u_k, v_k = x, y, u, v
            for t in range(r * p, (r + 1) * p):
                bundle, zeta = samples[k][t]
                G = hypergradient(x_k, y_k, bundle, theta)
                D = lower_gradient(x_k, y_k, zeta)
                a, b = (1, 1) if t == 0 else (alpha * eta, beta * eta)
                u_k, v_k = (1 - a) * u_k + a * G, (1 - b) * v_k + b * D
                x_k, y_k = x_k - rho1 * eta * u_k, y_k - rho2 * eta * v_k
            ends.append((x_k, y_k, u_k, v_k))
        x, y, u, v = _means(ends)
    return x, y, u, v


def local_bsgvrm(
    x, y, samples, firsts, cohorts, *, p, eta, alpha, beta, rho1, rho2, theta
):
    """Return the server's x, y, u, v; `firsts[k]` completes the first batch."""
    u, v, seen = np.zeros_like(x), np.zeros_like(y), {}
    for r, cohort in enumerate(cohorts):
        ends, now = [], {}
        for k in cohort:
            w, d, before = (x, y), (u, v), seen.get(k, (None, None))
            for t in range(r * p, (r + 1) * p):
                if t == 0:
                    every = [samples[k][0], *firsts[k]]
                    d = _means([_both(w, sample, theta) for sample in every])
                else:
                    weights = (alpha * eta(t - 1) ** 2, beta * eta(t - 1) ** 2)
                    d = _storm(w, before, d, weights, samples[k][t], theta)
                before = w
                w = (w[0] - rho1 * eta(t) * d[0], w[1] - rho2 * eta(t) * d[1])
            ends.append((*w, *d))
            now[k] = before
        (x, y, u, v), seen = _means(ends), now
    return x, y, u, v


def own_lower(
    x,
    y0,
    samples,
    cohorts,
    *,
    p,
    a,
    eta,
    gamma,
    c_nu,
    c_omega,
    theta,
    averaged_before_the_move,
):
    """Return x, nu, and y and omega of all clients, who keep those two.

    An omega that is first formed after t = 0 starts from zero. Where x and nu are
    averaged before the move, the last point is the averaged one.
    """
    K, nu, seen = len(samples), np.zeros_like(x), {}
    y, omega = [y0] * K, [np.zeros_like(y0)] * K
    for r, cohort in enumerate(cohorts):
        ends, now, last = [], {}, (r + 1) * p - 1
        for k in cohort:
            w, d, before = (x, y[k]), (nu, omega[k]), seen.get(k, (None, None))
            for t in range(r * p, (r + 1) * p):
                if t == 0:
                    d = _both(w, samples[k][0], theta)
                else:
                    weights = (c_nu * a(t - 1) ** 2, c_omega * a(t - 1) ** 2)
                    d = _storm(w, before, d, weights, samples[k][t], theta)
                before = w
                w = (w[0] - eta * a(t) * d[0], w[1] - gamma * a(t) * d[1])
            y[k], omega[k], now[k] = w[1], d[1], before
            ends.append((before[0], d[0]))
        stood, nu = _means(ends)
        x, seen = stood - eta * a(last) * nu, now
        if averaged_before_the_move:
            seen = {k: (stood, own) for k, (_, own) in now.items()}
    return x, nu, y, omega


def _both(w, sample, theta):
    (x, y), (bundle, zeta) = w, sample
    return hypergradient(x, y, bundle, theta), lower_gradient(x, y, zeta)


def _storm(w, before, d, weights, sample, theta):
    now = _both(w, sample, theta)
    then = now if before[0] is None else _both(before, sample, theta)
    return tuple(
        g + (1 - a) * (kept - g_then)
        for g, a, kept, g_then in zip(now, weights, d, then, strict=True)
    )


def _means(ends):
    return tuple(np.mean(part, axis=0) for part in zip(*ends, strict=True))
