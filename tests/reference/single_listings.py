"""Methods of one machine, line by line, in NumPy, with means over clients.

What a listing draws is handed to it: `samples[k][t]` is what client k draws at t. `lr`
are the steps of x, y and z, or of x and y.
"""

import numpy as np

from tests.reference.bent_oracles import (
    cross_product,
    hessian_product,
    lower_gradient,
    upper_gradients,
)


def three(x, y, z, xi, zeta):
    """Return D_x, D_y and D_z of SOBA."""
    fx, fy = upper_gradients(x, y, xi)
    D_x = fx - cross_product(x, y, z, zeta)
    return D_x, lower_gradient(x, y, zeta), hessian_product(x, y, z, zeta) - fy


def mean(rows):
    """Return the mean of every block over clients or samples."""
    return [np.mean(block, axis=0) for block in zip(*rows, strict=True)]


def at(samples, t):
    """Return what all clients draw at t."""
    return [client[t] for client in samples]


def soba(x, y, samples, *, lr, a):
    """Return x, y, z after all samples."""
    z = np.zeros_like(y)
    for t in range(len(samples[0])):
        D_x, D_y, D_z = mean([three(x, y, z, *s) for s in at(samples, t)])
        x, y, z = x - lr[0] * a(t) * D_x, y - lr[1] * a(t) * D_y, z - lr[2] * a(t) * D_z
    return x, y, z


def ma_soba(x, y, samples, *, lr, a, alpha):
    """Return x, y, z and u."""
    z, u = np.zeros_like(y), np.zeros_like(x)
    for t in range(len(samples[0])):
        D_x, D_y, D_z = mean([three(x, y, z, *s) for s in at(samples, t)])
        weight = 1 if t == 0 else alpha * a(t - 1)
        u = (1 - weight) * u + weight * D_x
        x, y, z = x - lr[0] * a(t) * u, y - lr[1] * a(t) * D_y, z - lr[2] * a(t) * D_z
    return x, y, z, u


def recursive(w, rounds, G, *, lr):
    """Return the point after rounds of (large batches, then small ones), [k][j].

    `G(w, s)` are the directions. A large batch forms them anew, a small one corrects.
    """
    for large, small in rounds:
        d = mean([mean([G(w, s) for s in client]) for client in large])
        before, w = w, [b - step * e for b, step, e in zip(w, lr, d, strict=True)]
        for j in range(len(small[0])):
            now = mean([G(w, s) for s in at(small, j)])
            then = mean([G(before, s) for s in at(small, j)])
            d = [e + n - o for e, n, o in zip(d, now, then, strict=True)]
            before, w = w, [b - step * e for b, step, e in zip(w, lr, d, strict=True)]
    return w


def saba(x, y, drawn, parts_below, parts_above, *, lr):
    """Return x, y, z; `drawn[k][t]` is (i, j), `parts_below[k][i]` (weight, rows)."""
    z, tables = np.zeros_like(y), {}
    for t in range(len(drawn[0])):
        found = []
        for k, (i, j) in enumerate(at(drawn, t)):
            estimate = {}
            for name, part, value in _five(x, y, z, parts_below[k][i], i) + _two(
                x, y, parts_above[k][j], j
            ):
                parts = len(parts_below[k])
                zeros = [np.zeros_like(value)] * parts
                table = tables.setdefault((k, name), list(zeros))
                estimate[name] = value - table[part] + np.mean(table, axis=0)
                table[part] = value
            D_x = estimate["fx"] - estimate["jvp"]
            found.append((D_x, estimate["gy"], estimate["hvp"] - estimate["fy"]))
        D_x, D_y, D_z = mean(found)
        x, y, z = x - lr[0] * D_x, y - lr[1] * D_y, z - lr[2] * D_z
    return x, y, z


def _five(x, y, z, weighted, part):
    weight, rows = weighted
    return [
        ("jvp", part, weight * sum(cross_product(x, y, z, row) for row in rows)),
        ("gy", part, weight * sum(lower_gradient(x, y, row) for row in rows)),
        ("hvp", part, weight * sum(hessian_product(x, y, z, row) for row in rows)),
    ]


def _two(x, y, weighted, part):
    weight, rows = weighted
    both = [upper_gradients(x, y, row) for row in rows]
    return [
        ("fx", part, weight * sum(fx for fx, _ in both)),
        ("fy", part, weight * sum(fy for _, fy in both)),
    ]


def alternating(x, y, lowers, uppers, h, *, lr, T_in, a, b, upper_first=False):
    """Return x and y; `lowers[k][t T_in + i]` is zeta, `uppers[k][t]` a bundle."""

    def above(t):
        bundles = at(uppers, t)
        return x - lr[0] * a(t) * np.mean([h(x, y, one) for one in bundles], axis=0)

    for t in range(len(uppers[0])):
        if upper_first:
            x = above(t)
        for i in range(T_in):
            zetas = at(lowers, t * T_in + i)
            gy = np.mean([lower_gradient(x, y, zeta) for zeta in zetas], axis=0)
            y = y - lr[1] * b(t) * gy
        if not upper_first:
            x = above(t)
    return x, y


def random_term(x, y, drawn, theta, N):
    """Return the hypergradient by one random term of the series of N."""
    (xi, zeta_0, factors), length = drawn
    fx, r = upper_gradients(x, y, xi)
    for zeta in factors[: int(length)]:
        r = r - theta * hessian_product(x, y, r, zeta)
    return fx - N * theta * cross_product(x, y, r, zeta_0)


def amigo(x, y, lowers, systems, uppers, *, lr, T_in, N_z):
    """Return x, y, z; samples by phase, (xi, zeta) but for the lower one."""
    z = np.zeros_like(y)
    for t in range(len(uppers[0])):
        for i in range(T_in):
            slopes = [lower_gradient(x, y, zeta) for zeta in at(lowers, t * T_in + i)]
            y = y - lr[1] * np.mean(slopes, axis=0)
        for i in range(N_z):
            D_z = [three(x, y, z, *s)[2] for s in at(systems, t * N_z + i)]
            z = z - lr[2] * np.mean(D_z, axis=0)
        D_x = [three(x, y, z, *s)[0] for s in at(uppers, t)]
        x = x - lr[0] * np.mean(D_x, axis=0)
    return x, y, z


def fsla(x, y, lowers, systems, uppers, *, lr, a, alpha):
    """Return x, y, z and u."""
    z, u = np.zeros_like(y), np.zeros_like(x)
    before = (x, y, z)
    for t in range(len(uppers[0])):
        slopes = [lower_gradient(x, y, zeta) for zeta in at(lowers, t)]
        y = y - lr[1] * a(t) * np.mean(slopes, axis=0)
        D_z = [three(x, y, z, *s)[2] for s in at(systems, t)]
        z = z - lr[2] * a(t) * np.mean(D_z, axis=0)
        now = np.mean([three(x, y, z, *s)[0] for s in at(uppers, t)], axis=0)
        if t == 0:
            u = now
        else:
            then = np.mean([three(*before, *s)[0] for s in at(uppers, t)], axis=0)
            u = now + (1 - alpha * a(t - 1)) * (u - then)
        before = (x, y, z)
        x = x - lr[0] * a(t) * u
    return x, y, z, u


def s_tfbo(x, y, samples, *, start):
    """Return x, y, z."""
    z, al, be, ga = np.zeros_like(y), start**2, start**2, start**2
    for t in range(len(samples[0])):
        D_x, D_y, D_z = mean([three(x, y, z, *s) for s in at(samples, t)])
        al, be, ga = al + D_x @ D_x, be + D_y @ D_y, ga + D_z @ D_z
        most = max(be, ga) ** 0.5
        x, y, z = x - D_x / (al**0.5 * most), y - D_y / be**0.5, z - D_z / most
    return x, y, z


def momentum(x, y, samples, h, *, lr, eta, weights, power, corrected):
    """Return x, y, u and v of SMB (averages), or of MRBO and SUSTAIN (corrected).

    `samples[t]` of one machine is (bundle, zeta); weights are `weights` eta^power.
    """
    u, v, before = np.zeros_like(x), np.zeros_like(y), (x, y)
    for t, (bundle, zeta) in enumerate(samples):
        h_now, g_now = h(x, y, bundle), lower_gradient(x, y, zeta)
        if t == 0:
            u, v = h_now, g_now
        else:
            a, c = (w * eta(t - 1) ** power for w in weights)
            if corrected:
                u = h_now + (1 - a) * (u - h(*before, bundle))
                v = g_now + (1 - c) * (v - lower_gradient(*before, zeta))
            else:
                u, v = (1 - a) * u + a * h_now, (1 - c) * v + c * g_now
        before = (x, y)
        x, y = x - lr[0] * eta(t) * u, y - lr[1] * eta(t) * v
    return x, y, u, v


def pair(w, drawn, h):
    """Return the hypergradient and gy."""
    (x, y), (bundle, zeta) = w, drawn
    return h(x, y, bundle), lower_gradient(x, y, zeta)


def vrbo(x, y, rounds, h, *, lr, q, m):
    """Return x and y; a round is (large batches, small ones), [k][j]."""
    for large, small in rounds:
        u, v = mean([mean([pair((x, y), s, h) for s in client]) for client in large])
        old, j = (x, y), 0
        for _ in range(q):
            x = x - lr[0] * u
            for _ in range(m):
                now = mean([pair((x, y), s, h) for s in at(small, j)])
                then = mean([pair(old, s, h) for s in at(small, j)])
                u, v = u + now[0] - then[0], v + now[1] - then[1]
                old, y, j = (x, y), y - lr[1] * v, j + 1
    return x, y


def biadam(x, y, samples, h, *, lr, a, weights, tau, small, start, paper, corrected):
    """Return x and y; `samples[k][t]` is (bundle, zeta)."""
    u, v, before = np.zeros_like(x), np.zeros_like(y), (x, y)
    second_x = np.full_like(x, start)
    second_y = start if paper else np.full_like(y, start)
    for t in range(len(samples[0])):
        now = mean([pair((x, y), s, h) for s in at(samples, t)])
        if t == 0:
            u, v = now
        elif corrected:
            then = mean([pair(before, s, h) for s in at(samples, t)])
            u = now[0] + (1 - weights[0]) * (u - then[0])
            v = now[1] + (1 - weights[1]) * (v - then[1])
        else:
            u = (1 - weights[0]) * u + weights[0] * now[0]
            v = (1 - weights[1]) * v + weights[1] * now[1]
        second_x = tau * second_x + (1 - tau) * u**2
        second_y = tau * second_y + (1 - tau) * (np.linalg.norm(v) if paper else v**2)
        A = np.sqrt(second_x) + small if paper else np.sqrt(second_x + small)
        B = second_y + small if paper else np.sqrt(second_y + small)
        before = (x, y)
        x, y = x - lr[0] * a(t) * u / A, y - lr[1] * a(t) * v / B
    return x, y


def proximal(x, u, gamma, l1, H):
    """Return argmin <u, x'> + l1 |x'| + (H/2) (x' - x)^2 / gamma, by its cases."""
    out = []
    for one, slope, scale in zip(x, u, H, strict=True):
        free, shift = one - gamma * slope / scale, gamma * l1 / scale
        out.append(max(free - shift, 0.0) if free > 0 else min(free + shift, 0.0))
    return np.asarray(out)


class Distance:
    """H of psi = ||x||^2 / 2, or of the one that follows the squares of u."""

    def __init__(self, diagonal, x):
        self.diagonal, self.a = diagonal, np.zeros_like(x)

    def scale(self, u):
        """Return H after a direction u."""
        self.a = 0.99 * self.a + 0.01 * u**2
        return np.sqrt(self.a) + 1e-6 if self.diagonal else np.ones_like(u)


def bio_bred(x, y, samples, *, lr, l1, diagonal):
    """Return x and y; `samples[k][t]` is (xi, zetas of all lower steps)."""
    psi = Distance(diagonal, x)
    for t in range(len(samples[0])):
        u, y = mean([unrolled(x, y, xi, zetas, lr[1]) for xi, zetas in at(samples, t)])
        x = proximal(x, u, lr[0], l1, psi.scale(u))
    return x, y


def unrolled(x, y, xi, zetas, lr):
    """Return d/dx f(x, y^T(x)), going back through the lower steps, and y^T."""
    passed = []
    for zeta in zetas:
        passed.append((y, zeta))
        y = y - lr * lower_gradient(x, y, zeta)
    u, p = upper_gradients(x, y, xi)
    for at_y, zeta in reversed(passed):
        u = u - lr * cross_product(x, at_y, p, zeta)
        p = p - lr * hessian_product(x, at_y, p, zeta)
    return u, y


def mirrored(x, y, rounds, h, *, lr, b, l1, diagonal):
    """Return x and y of SBiO-BreD (rounds without small batches) and ASBiO-BreD."""
    psi, t, before = Distance(diagonal, x), 0, (x, y)
    for large, small in rounds:
        u, v = mean([mean([pair((x, y), s, h) for s in client]) for client in large])
        for j in range(len(small[0]) + 1):
            if j > 0:
                now = mean([pair((x, y), s, h) for s in at(small, j - 1)])
                then = mean([pair(before, s, h) for s in at(small, j - 1)])
                u, v = u + now[0] - then[0], v + now[1] - then[1]
            before = (x, y)
            x, y = proximal(x, u, lr[0], l1, psi.scale(u)), y - lr[1] * b(t) * v
            t += 1
    return x, y
