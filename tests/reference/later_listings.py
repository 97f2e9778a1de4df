"""SimFBO, SCAFFOLD, FedMBO and AdaFBiO, line by line, in NumPy.

What a listing draws is handed to it. Cohorts are lists of clients, one for each round.
"""

import numpy as np

from tests.reference.bent_oracles import (
    cross_product,
    hessian_product,
    hypergradient,
    lower_gradient,
    upper_gradients,
)


def simfbo(x, y, samples, *, tau, lr, gamma, radius=np.inf):
    """Return the server's x, y, z; `lr` and `gamma` are those of x, y and z.

    `samples[k][t]` are zeta for D_y, (xi, zeta) for D_z and (xi, zeta) for D_x.
    """
    z, rounds = np.zeros_like(y), len(samples[0]) // tau
    for r in range(rounds):
        sums = []
        for client in samples:
            x_i, y_i, z_i = x, y, z
            q_x, q_y, q_z = np.zeros_like(x), np.zeros_like(y), np.zeros_like(y)
            for zeta, (xi_z, zeta_z), (xi_x, zeta_x) in client[r * tau : (r + 1) * tau]:
                D_y = lower_gradient(x_i, y_i, zeta)
                D_z = hessian_product(x_i, y_i, z_i, zeta_z)
                D_z = D_z - upper_gradients(x_i, y_i, xi_z)[1]
                D_x = upper_gradients(x_i, y_i, xi_x)[0]
                D_x = D_x - cross_product(x_i, y_i, z_i, zeta_x)
                q_x, q_y, q_z = q_x + D_x, q_y + D_y, q_z + D_z
                x_i, y_i, z_i = x_i - lr[0] * D_x, y_i - lr[1] * D_y, z_i - lr[2] * D_z
            sums.append((q_x, q_y, q_z))
        q_x, q_y, q_z = (np.mean(q, axis=0) for q in zip(*sums, strict=True))
        x, y, z = x - gamma[0] * q_x, y - gamma[1] * q_y, z - gamma[2] * q_z
        size = np.linalg.norm(z)
        z = z if size <= radius else (radius / size) * z
    return x, y, z


def scaffold(x, y, samples, cohorts, *, p, lr, lr_server):
    """Return the server's y and c, and all c_k; `samples[k][t]` is zeta."""
    K = len(samples)
    c, c_own = np.zeros_like(y), [np.zeros_like(y)] * K
    for r, cohort in enumerate(cohorts):
        moves, changes = [], []
        for k in cohort:
            y_k = y
            for zeta in samples[k][r * p : (r + 1) * p]:
                y_k = y_k - lr * (lower_gradient(x, y_k, zeta) - c_own[k] + c)
            renewed = c_own[k] - c + (y - y_k) / (p * lr)
            moves.append(y_k - y)
            changes.append(renewed - c_own[k])
            c_own[k] = renewed
        y = y + lr_server * np.mean(moves, axis=0)
        c = c + (len(cohort) / K) * np.mean(changes, axis=0)
    return y, c, c_own


def fedmbo(x, y, rounds, *, lr_x, lr_y, theta, scale):
    """Return x and y; `scale(terms)` makes one vector of the terms of a chain.

    A round is (lowers, firsts, hops, (order, lasts)): zetas of all clients for each
    lower step; their xis; for every hop which chain each client gets and the zetas; the
    same for the last one.
    """
    for lowers, firsts, hops, (order, lasts) in rounds:
        for zetas in lowers:
            y = y - lr_y * np.mean([lower_gradient(x, y, z) for z in zetas], axis=0)
        both = [upper_gradients(x, y, xi) for xi in firsts]
        fx, r = [one for one, _ in both], [one for _, one in both]
        terms = [[one] for one in r]
        for dealt, zetas in hops:
            for client, chain in enumerate(dealt):
                product = hessian_product(x, y, r[chain], zetas[client])
                r[chain] = r[chain] - theta * product
            for chain, one in enumerate(r):
                terms[chain].append(one)
        h = [
            fx[chain] - cross_product(x, y, scale(terms[chain]), lasts[client])
            for client, chain in enumerate(order)
        ]
        x = x - lr_x * np.mean(h, axis=0)
    return x, y


def adafbio(
    x, y, firsts, samples, *, p, eta, gamma, lam, c1, c2, tau, r, theta, coordinatewise
):
    """Return the server's x, y, u, v, A and B; `eta` is a function of t.

    `samples[k][t]` is (bundle, zeta), `firsts[k]` that of the first scales.
    """

    def slopes(x, y, sample):
        bundle, zeta = sample
        return hypergradient(x, y, bundle, theta), lower_gradient(x, y, zeta)

    def squared(v):
        return v**2 if coordinatewise else np.sqrt(v @ v)

    def divisor(B):
        return (np.sqrt(B) if coordinatewise else B) + r

    K, T = len(samples), len(samples[0])
    every = zip(*(slopes(x, y, first) for first in firsts), strict=True)
    u, v = (np.mean(one, axis=0) for one in every)
    A, B = u**2, squared(v)
    xs, ys, us, vs = [x] * K, [y] * K, [u] * K, [v] * K
    x_prev, y_prev = [x] * K, [y] * K
    for t in range(T):
        for k in range(K):
            now_u, now_v = slopes(xs[k], ys[k], samples[k][t])
            if t == 0:
                us[k], vs[k] = now_u, now_v
            else:
                old_u, old_v = slopes(x_prev[k], y_prev[k], samples[k][t])
                a, e = c1 * eta(t - 1) ** 2, c2 * eta(t - 1) ** 2
                us[k] = now_u + (1 - a) * (us[k] - old_u)
                vs[k] = now_v + (1 - e) * (vs[k] - old_v)
            x_prev[k], y_prev[k] = xs[k], ys[k]
            xs[k] = xs[k] - gamma * eta(t) * us[k] / (np.sqrt(A) + r)
            ys[k] = ys[k] - lam * eta(t) * vs[k] / divisor(B)
        if (t + 1) % p == 0:
            xs, ys, us, vs = ([np.mean(w, axis=0)] * K for w in (xs, ys, us, vs))
            A = tau * A + (1 - tau) * us[0] ** 2
            B = tau * B + (1 - tau) * squared(vs[0])
    return xs[0], ys[0], us[0], vs[0], A, B
