"""SimFBO, SCAFFOLD and FedMBO, line by line, in NumPy.

What a listing draws is handed to it. Cohorts are lists of clients, one for each round.
"""

import numpy as np

from tests.reference.bent_oracles import (
    cross_product,
    hessian_product,
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
