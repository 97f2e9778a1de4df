"""The paper's two listings, line by line, in NumPy.

`samples[k][t]` is (bundle, zeta) of client k at iteration t, `firsts[k]` the further
bundles of the first batch. Nothing here is shared with the package.
"""

import numpy as np

from tests.reference.quadratic_oracles import hypergradient, lower_gradient


def local_bsgm(x0, y0, samples, *, p, eta, alpha, beta, rho1, rho2, theta):
    """Return x, y, u, v of all clients after the last iteration, as in Algorithm 1."""
    K, T = len(samples), len(samples[0])
    x, y = [x0] * K, [y0] * K
    u, v = [None] * K, [None] * K
    for t in range(T):
        for k in range(K):
            bundle, zeta = samples[k][t]
            G = hypergradient(x[k], y[k], bundle, theta)
            D = lower_gradient(x[k], y[k], zeta)
            if t == 0:
                u[k], v[k] = G, D
            else:
                u[k] = (1 - alpha * eta) * u[k] + alpha * eta * G
                v[k] = (1 - beta * eta) * v[k] + beta * eta * D
            x[k] = x[k] - rho1 * eta * u[k]
            y[k] = y[k] - rho2 * eta * v[k]
        if (t + 1) % p == 0:
            x, y, u, v = _averaged(x), _averaged(y), _averaged(u), _averaged(v)
    return x, y, u, v


def local_bsgvrm(
    x0, y0, samples, firsts, *, p, eta, alpha, beta, rho1, rho2, theta, on_step=None
):
    """Return x, y, u, v of all clients after the last iteration, as in Algorithm 2.

    `eta` is a function of t. `on_step(t, x, y, u)` sees the points and directions of
    all clients before they move.
    """
    K, T = len(samples), len(samples[0])
    x, y = [x0] * K, [y0] * K
    x_prev, y_prev = [x0] * K, [y0] * K
    u, v = [None] * K, [None] * K
    for t in range(T):
        for k in range(K):
            bundle, zeta = samples[k][t]
            if t == 0:
                every = [(bundle, zeta), *firsts[k]]
                u[k] = np.mean(
                    [hypergradient(x0, y0, b, theta) for b, _ in every], axis=0
                )
                v[k] = np.mean([lower_gradient(x0, y0, z) for _, z in every], axis=0)
            else:
                a, c = alpha * eta(t - 1) ** 2, beta * eta(t - 1) ** 2
                before = hypergradient(x_prev[k], y_prev[k], bundle, theta)
                now = hypergradient(x[k], y[k], bundle, theta)
                u[k] = (1 - a) * (u[k] - before) + now
                before = lower_gradient(x_prev[k], y_prev[k], zeta)
                v[k] = (1 - c) * (v[k] - before) + lower_gradient(x[k], y[k], zeta)
        if on_step is not None:
            on_step(t, x, y, u)
        for k in range(K):
            x_prev[k], y_prev[k] = x[k], y[k]
            x[k] = x[k] - rho1 * eta(t) * u[k]
            y[k] = y[k] - rho2 * eta(t) * v[k]
        if (t + 1) % p == 0:
            x, y, u, v = _averaged(x), _averaged(y), _averaged(u), _averaged(v)
    return x, y, u, v


def mrbo(x, y, samples, *, gamma, lam, c1, c2, eta, theta):
    """Return x, y after single-machine STORM on both levels (MRBO, batch 1)."""
    x_old, y_old = x, y
    u, v = np.zeros_like(x), np.zeros_like(y)
    for t, (bundle, zeta) in enumerate(samples):
        now_u, now_v = hypergradient(x, y, bundle, theta), lower_gradient(x, y, zeta)
        if t == 0:
            u, v = now_u, now_v
        else:
            old_u = hypergradient(x_old, y_old, bundle, theta)
            old_v = lower_gradient(x_old, y_old, zeta)
            u = now_u + (1 - c1 * eta(t - 1) ** 2) * (u - old_u)
            v = now_v + (1 - c2 * eta(t - 1) ** 2) * (v - old_v)
        x_old, y_old = x, y
        x, y = x - gamma * eta(t) * u, y - lam * eta(t) * v
    return x, y


def _averaged(values):
    return [np.mean(values, axis=0)] * len(values)
