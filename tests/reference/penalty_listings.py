"""Methods without a Hessian, line by line, in NumPy, with means over clients.

What a listing draws is handed to it: `samples[k][t]` is what client k draws at t, xi
and zeta, and maybe another zeta. Copies of y are a dictionary by j, where y_j follows
argmin j nu f + g.
"""

import numpy as np

from tests.reference.bent_oracles import lower_gradients, upper_gradients

# Slopes at 0 through points at the multiples j of nu.
WEIGHTS = {
    1: {0: -1.0, 1: 1.0},
    2: {1: 0.5, -1: -0.5},
    3: {0: -1 / 2, 1: 1.0, 2: -1 / 6, -1: -1 / 3},
    4: {1: 2 / 3, -1: -2 / 3, 2: -1 / 12, -2: 1 / 12},
}


def slope(x, y, j, nu, xi, zeta):
    """Return the slope of j nu f + g in y."""
    return j * nu * upper_gradients(x, y, xi)[1] + lower_gradients(x, y, zeta)[1]


def h(x, copies, nu, xi, zeta):
    """Return the difference of d/dx (j nu f + g) over nu."""
    weights = next(one for one in WEIGHTS.values() if one.keys() == copies.keys())
    total = np.zeros_like(x)
    for j, y in copies.items():
        of_f, of_g = upper_gradients(x, y, xi)[0], lower_gradients(x, y, zeta)[0]
        total = total + weights[j] * (j * nu * of_f + of_g) / nu
    return total


def fed_f2sa(x, y, samples, *, degree, p, lr, nu, alternating=False):
    """Return x and the copies after all rounds; all clients take part."""
    copies = {j: y for j in WEIGHTS[degree]}  # noqa: C420
    for r in range(len(samples[0]) // p):
        ends = []
        for client in samples:
            x_k, y_k = x, dict(copies)
            for xi, zeta, other in client[r * p : (r + 1) * p]:
                moved = {
                    j: y - lr[1] * slope(x_k, y, j, nu, xi, zeta)
                    for j, y in y_k.items()
                }
                at = moved if alternating else y_k
                x_k = x_k - lr[0] * h(x_k, at, nu, xi, other)
                y_k = moved
            ends.append((x_k, y_k))
        x = np.mean([end for end, _ in ends], axis=0)
        copies = {j: np.mean([end[j] for _, end in ends], axis=0) for j in copies}
    return x, copies


def f2sa_p(x, y, lowers, uppers, *, degree, T_in, lr, nu, a, begin="own"):
    """Return x and the copies; `nu` and `a` are functions of t."""
    copies = {j: y for j in WEIGHTS[degree]}  # noqa: C420
    for t in range(len(uppers[0])):
        if begin == "one":
            copies = {j: copies[1] for j in copies}  # noqa: C420
        if begin == "sides":
            sides = {
                sign: np.mean([y for j, y in copies.items() if (j > 0) == sign], axis=0)
                for sign in (True, False)
            }
            copies = {j: sides[j > 0] for j in copies}
        for i in range(T_in):
            drawn = [client[t * T_in + i] for client in lowers]
            copies = {
                j: y
                - lr[1]
                * a(t)
                * np.mean([slope(x, y, j, nu(t), *s) for s in drawn], axis=0)
                for j, y in copies.items()
            }
        along = np.mean([h(x, copies, nu(t), *client[t]) for client in uppers], axis=0)
        x = x - lr[0] * a(t) * along
    return x, copies


def f3sa(x, y, lowers, uppers, *, lr, nu, a, alpha, beta):
    """Return x, y_s and y_l, and u."""
    copies, v, u = {0: y, 1: y}, {0: 0.0, 1: 0.0}, 0.0
    below = above = (x, dict(copies))
    for t in range(len(uppers[0])):
        kept = 0.0 if t == 0 else 1 - beta * a(t - 1) ** 2
        for j in v:

            def D(where, j=j, t=t):
                at, ys = where
                drawn = [client[t] for client in lowers]
                return np.mean([slope(at, ys[j], j, nu, *s) for s in drawn], axis=0)

            v[j] = D((x, copies)) + kept * (v[j] - D(below))
        below = (x, dict(copies))
        copies = {j: y - lr[1] * a(t) * v[j] for j, y in copies.items()}

        def H(where, t=t):
            at, ys = where
            return np.mean([h(at, ys, nu, *client[t]) for client in uppers], axis=0)

        kept = 0.0 if t == 0 else 1 - alpha * a(t - 1) ** 2
        u = H((x, copies)) + kept * (u - H(above))
        above = (x, dict(copies))
        x = x - lr[0] * a(t) * u
    return x, copies, u


def v_pbgd(x, y, lowers, joints, *, T_in, lr, gam):
    """Return x, w and y; `lowers` are zetas, `gam` is a function of t."""
    w, (lr_x, lr_y, lr_w) = y, lr
    for t in range(len(joints[0])):
        for i in range(T_in):
            zetas = [client[t * T_in + i] for client in lowers]
            gy = [lower_gradients(x, w, zeta)[1] for zeta in zetas]
            w = w - lr_w * np.mean(gy, axis=0)
        to_x, to_y, c = [], [], min(1 / gam(t), 1)
        for client in joints:
            xi, zeta = client[t]
            (fx, fy), (gx, gy) = upper_gradients(x, y, xi), lower_gradients(x, y, zeta)
            to_x.append(fx + gam(t) * (gx - lower_gradients(x, w, zeta)[0]))
            to_y.append(fy + gam(t) * gy)
        x = x - lr_x * c * np.mean(to_x, axis=0)
        y = y - lr_y * c * np.mean(to_y, axis=0)
    return x, w, y


def pbgd_free(x, y, lowers, uppers, *, T_in, lr, nu):
    """Return x and y; `uppers` are xis."""
    for t in range(len(uppers[0])):
        for i in range(T_in):
            drawn = [client[t * T_in + i] for client in lowers]
            y = y - lr[1] * np.mean([slope(x, y, 1, nu, *s) for s in drawn], axis=0)
        fx = [upper_gradients(x, y, client[t])[0] for client in uppers]
        x = x - lr[0] * np.mean(fx, axis=0)
    return x, y
