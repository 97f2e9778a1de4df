"""Methods with an own y on each client, and local SGD, line by line, in NumPy.

`samples[k][t]` is what client k draws at iteration t: (bundle, zeta), or zeta alone for
local SGD. What is returned are lists over clients.
"""

import numpy as np

from tests.reference.bent_oracles import hypergradient, lower_gradient


def fedbio_clientwise(x0, y0, samples, *, p, lr_x, lr_y, theta):
    """Return x and y of all clients after the last iteration."""
    K, T = len(samples), len(samples[0])
    x, y = [x0] * K, [y0] * K
    for t in range(T):
        for k in range(K):
            bundle, zeta = samples[k][t]
            y[k] = y[k] - lr_y * lower_gradient(x[k], y[k], zeta)
            x[k] = x[k] - lr_x * hypergradient(x[k], y[k], bundle, theta)
        if (t + 1) % p == 0:
            x = _averaged(x)
    return x, y


def fedbioacc_clientwise(x0, y0, samples, *, p, a, eta, gamma, c_nu, c_omega, theta):
    """Return x, y, nu, omega; x and nu are averaged before the move."""
    K, T = len(samples), len(samples[0])
    x, y, nu, omega = [x0] * K, [y0] * K, [None] * K, [None] * K
    x_old, y_old = [x0] * K, [y0] * K
    for t in range(T):
        for k in range(K):
            bundle, zeta = samples[k][t]
            fresh_omega = lower_gradient(x[k], y[k], zeta)
            fresh_nu = hypergradient(x[k], y[k], bundle, theta)
            if t == 0:
                omega[k], nu[k] = fresh_omega, fresh_nu
                continue
            before = lower_gradient(x_old[k], y_old[k], zeta)
            keep = 1 - c_omega * a(t - 1) ** 2
            omega[k] = fresh_omega + keep * (omega[k] - before)
            before = hypergradient(x_old[k], y_old[k], bundle, theta)
            nu[k] = fresh_nu + (1 - c_nu * a(t - 1) ** 2) * (nu[k] - before)
        if (t + 1) % p == 0:
            nu, x = _averaged(nu), _averaged(x)
        for k in range(K):
            x_old[k], y_old[k] = x[k], y[k]
            y[k] = y[k] - gamma * a(t) * omega[k]
            x[k] = x[k] - eta * a(t) * nu[k]
    return x, y, nu, omega


def fedbioacc_local(x0, y0, samples, *, p, a, eta, gamma, c_nu, c_omega, theta):
    """Return x, y, nu, omega; x and nu are averaged after the move.

    A line corrects from where this client last evaluated it, before averaging.
    """
    K, T = len(samples), len(samples[0])
    x, y, nu, omega = [x0] * K, [y0] * K, [None] * K, [None] * K
    evaluated = [(x0, y0)] * K
    for t in range(T):
        for k in range(K):
            bundle, zeta = samples[k][t]
            old = (x[k], y[k])
            fresh_omega = lower_gradient(*old, zeta)
            fresh_nu = hypergradient(*old, bundle, theta)
            if t > 0:
                before = lower_gradient(*evaluated[k], zeta)
                keep = 1 - c_omega * a(t - 1) ** 2
                fresh_omega = fresh_omega + keep * (omega[k] - before)
                before = hypergradient(*evaluated[k], bundle, theta)
                keep = 1 - c_nu * a(t - 1) ** 2
                fresh_nu = fresh_nu + keep * (nu[k] - before)
            omega[k], nu[k], evaluated[k] = fresh_omega, fresh_nu, old
            y[k] = y[k] - gamma * a(t) * omega[k]
            x[k] = x[k] - eta * a(t) * nu[k]
        if (t + 1) % p == 0:
            x, nu = _averaged(x), _averaged(nu)
    return x, y, nu, omega


def fedavg(x, y0, samples, *, p, lr):
    """Return y of all clients after the last iteration."""
    K, T = len(samples), len(samples[0])
    y = [y0] * K
    for t in range(T):
        for k in range(K):
            y[k] = y[k] - lr * lower_gradient(x, y[k], samples[k][t])
        if (t + 1) % p == 0:
            y = _averaged(y)
    return y


def momentum_local_sgd(x, y0, samples, *, p, lr, beta):
    """Return y and m of all clients after the last iteration."""
    K, T = len(samples), len(samples[0])
    y, m = [y0] * K, [np.zeros_like(y0)] * K
    for t in range(T):
        for k in range(K):
            m[k] = beta * m[k] + lower_gradient(x, y[k], samples[k][t])
            y[k] = y[k] - lr * m[k]
        if (t + 1) % p == 0:
            y, m = _averaged(y), _averaged(m)
    return y, m


def _averaged(values):
    return [np.mean(values, axis=0)] * len(values)
