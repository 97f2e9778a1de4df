"""The methods with a linear-system variable z, line by line, in NumPy.

`samples[k][t]` is what client k draws at iteration t, for each line its own: zeta for
omega, (xi, zeta) for q, (xi, zeta) for nu. x, y, z and the directions that are returned
are lists over clients.
"""

import numpy as np

from tests.reference.bent_oracles import (
    cross_product,
    hessian_product,
    lower_gradient,
    upper_gradients,
)


def fedbio(x0, y0, samples, *, p, lr_x, lr_y, lr_z, radius=np.inf, alternating=False):
    """Return x, y, z of all clients after the last iteration."""
    K, T = len(samples), len(samples[0])
    x, y, z = [x0] * K, [y0] * K, [np.zeros_like(y0)] * K
    for t in range(T):
        for k in range(K):
            for_omega, for_q, for_nu = samples[k][t]
            old = (x[k], y[k], z[k])
            y[k] = y[k] - lr_y * _omega(old, for_omega)
            w = (x[k], y[k], z[k]) if alternating else old
            z[k] = _in_ball(z[k] - lr_z * _q(w, for_q), radius)
            w = (x[k], y[k], z[k]) if alternating else old
            x[k] = x[k] - lr_x * _nu(w, for_nu)
        if (t + 1) % p == 0:
            x, y, z = _averaged(x), _averaged(y), _averaged(z)
    return x, y, z


def fedbioacc(x0, y0, samples, *, p, a, steps, factors, alternating=False):
    """Return x, y, z, nu, omega, q of all clients after the last iteration.

    `a` is a function of t, `steps` are (eta, gamma, tau), `factors` (c_nu, c_omega,
    c_q). A line corrects from where this client last evaluated it, before averaging.
    """
    (eta, gamma, tau), (c_nu, c_omega, c_q) = steps, factors
    K, T = len(samples), len(samples[0])
    x, y, z = [x0] * K, [y0] * K, [np.zeros_like(y0)] * K
    nu, omega, q = [None] * K, [None] * K, [None] * K
    start = (x0, y0, np.zeros_like(y0))
    nu_at, omega_at, q_at = [start] * K, [start] * K, [start] * K
    for t in range(T):
        for k in range(K):
            for_omega, for_q, for_nu = samples[k][t]
            square = a(t - 1) ** 2
            old = (x[k], y[k], z[k])
            omega[k] = _storm(
                _omega, for_omega, old, omega_at[k], omega[k], c_omega * square
            )
            omega_at[k] = old
            y[k] = y[k] - gamma * a(t) * omega[k]
            w = (x[k], y[k], z[k]) if alternating else old
            q[k] = _storm(_q, for_q, w, q_at[k], q[k], c_q * square)
            q_at[k] = w
            z[k] = z[k] - tau * a(t) * q[k]
            w = (x[k], y[k], z[k]) if alternating else old
            nu[k] = _storm(_nu, for_nu, w, nu_at[k], nu[k], c_nu * square)
            nu_at[k] = w
            x[k] = x[k] - eta * a(t) * nu[k]
        if (t + 1) % p == 0:
            x, y, z = _averaged(x), _averaged(y), _averaged(z)
            nu, omega, q = _averaged(nu), _averaged(omega), _averaged(q)
    return x, y, z, nu, omega, q


def fedbioacc_in_cohorts(x0, y0, samples, cohorts, *, p, a, steps, factors):
    """Return (x, y, z) and (nu, omega, q) of the server after the last round.

    `cohorts[r]` are the clients of round r. One that missed the last round has no
    point to correct from: what it received remains, without a correction.
    """
    w, d, seen = (x0, y0, np.zeros_like(y0)), (None,) * 3, {}
    lines = (_nu, _omega, _q)
    for r, cohort in enumerate(cohorts):
        ends, now = [], {}
        for k in cohort:
            w_k, d_k, before = w, d, seen.get(k, w)
            for t in range(r * p, (r + 1) * p):
                for_omega, for_q, for_nu = samples[k][t]
                drawn = zip(lines, (for_nu, for_omega, for_q), d_k, strict=True)
                weights = [c * a(t - 1) ** 2 for c in factors]
                d_k = tuple(
                    _storm(line, sample, w_k, before, kept, weight)
                    for (line, sample, kept), weight in zip(drawn, weights, strict=True)
                )
                before = w_k
                moves = zip(w_k, steps, d_k, strict=True)
                w_k = tuple(block - s * a(t) * g for block, s, g in moves)
            ends.append((*w_k, *d_k))
            now[k] = before
        means = [np.mean(part, axis=0) for part in zip(*ends, strict=True)]
        w, d, seen = tuple(means[:3]), tuple(means[3:]), now
    return w, d


def soba(x, y, samples, *, lr_x, lr_y, lr_v):
    """Return x, y, v of SOBA, whose v stands for -z and whose cross term is added."""
    v = np.zeros_like(y)
    for zeta, (xi_v, zeta_v), (xi_x, zeta_x) in samples:
        D_y = lower_gradient(x, y, zeta)
        D_v = hessian_product(x, y, v, zeta_v) + upper_gradients(x, y, xi_v)[1]
        D_x = upper_gradients(x, y, xi_x)[0] + cross_product(x, y, v, zeta_x)
        x, y, v = x - lr_x * D_x, y - lr_y * D_y, v - lr_v * D_v
    return x, y, v


def _omega(w, zeta):
    x, y, _ = w
    return lower_gradient(x, y, zeta)


def _q(w, drawn):
    (x, y, z), (xi, zeta) = w, drawn
    return hessian_product(x, y, z, zeta) - upper_gradients(x, y, xi)[1]


def _nu(w, drawn):
    (x, y, z), (xi, zeta) = w, drawn
    return upper_gradients(x, y, xi)[0] - cross_product(x, y, z, zeta)


def _storm(G, sample, now, before, direction, weight):
    if direction is None:
        return G(now, sample)
    return G(now, sample) + (1 - weight) * (direction - G(before, sample))


def _in_ball(z, radius):
    size = np.linalg.norm(z)
    return z if size <= radius else (radius / size) * z


def _averaged(values):
    return [np.mean(values, axis=0)] * len(values)
