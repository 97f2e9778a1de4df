"""BOME and MEHA, line by line, in NumPy, on K clients.

What a listing draws is handed to it: `samples[k][t]` is what client k draws at t.
"""

import numpy as np

from tests.reference.bent_oracles import BEND, lower_gradient, upper_gradients
from tests.reference.single_listings import at, mean


def upper_part(x, y, zeta):
    """Return gx."""
    return zeta["C"].mean(axis=0) @ y + BEND * (y @ y) * x / 2


def bome(x, y, lowers, steps, *, lr, alpha, T, eta, small):
    """Return x and y; `lowers[k][t T + i]` is zeta, `steps[k][t]` is (xi, zeta)."""
    for t in range(len(steps[0])):
        y_s = y
        for i in range(T):
            slopes = [lower_gradient(x, y_s, zeta) for zeta in at(lowers, t * T + i)]
            y_s = y_s - alpha * np.mean(slopes, axis=0)
        fx, fy = mean([upper_gradients(x, y, xi) for xi, _ in at(steps, t)])
        q_x, q_y = mean(
            [
                (
                    upper_part(x, y, zeta) - upper_part(x, y_s, zeta),
                    lower_gradient(x, y, zeta),
                )
                for _, zeta in at(steps, t)
            ]
        )
        size, inner = q_x @ q_x + q_y @ q_y, fx @ q_x + fy @ q_y
        m = max(eta * size - inner, 0) / (size + small)
        x, y = x - lr[0] * (fx + m * q_x), y - lr[1] * (fy + m * q_y)
    return x, y


def meha(x, y, samples, *, p, lr, eta, gamma, c, in_turn):
    """Return x, y and th; a sample is (xi of y and of x, zeta of y and of x)."""
    th, rounds = y, len(samples[0]) // p
    for r in range(rounds):
        ends = []
        for client in samples:
            w = [x, y, th]
            for t in range(r * p, (r + 1) * p):
                w = _meha_step(w, client[t], lr, eta, gamma, c(t), in_turn)
            ends.append(w)
        x, y, th = mean(ends)
    return x, y, th


def _meha_step(w, sample, lr, eta, gamma, c, in_turn):
    xi_y, xi_x, zeta, zeta_x = sample
    x, y, th = w
    new_th = th - eta * (lower_gradient(x, th, zeta) + gamma * (th - y))
    if in_turn:
        th = new_th
    _, fy = upper_gradients(x, y, xi_y)
    new_y = y - lr[1] * (fy / c + lower_gradient(x, y, zeta) - gamma * (y - th))
    if in_turn:
        y = new_y
    fx, _ = upper_gradients(x, y, xi_x)
    gap = upper_part(x, y, zeta_x) - upper_part(x, th, zeta_x)
    return x - lr[0] * (fx / c + gap), new_y, new_th
