"""Later federated methods, line by line, in NumPy. What a listing draws is given."""

import numpy as np

from tests.reference import quadratic_oracles
from tests.reference.bent_oracles import (
    BEND,
    cross_product,
    hessian_product,
    lower_gradient,
    upper_gradients,
)


def three(w, sample, hvp=hessian_product, jvp=cross_product):
    """Return nu, omega and q at w = (x, y, z), with own samples for each line."""
    zeta, (xi_z, zeta_z), (xi_x, zeta_x) = sample
    x, y, z = w
    nu = upper_gradients(x, y, xi_x)[0] - jvp(x, y, z, zeta_x)
    q = hvp(x, y, z, zeta_z) - upper_gradients(x, y, xi_z)[1]
    return nu, lower_gradient(x, y, zeta), q


def moved(w, steps, d):
    """Return w - steps d, block by block."""
    return tuple(a - s * b for a, s, b in zip(w, steps, d, strict=True))


def mean(many):
    """Return the mean of points, block by block."""
    return tuple(np.mean(block, axis=0) for block in zip(*many, strict=True))


def fedbio_momentum(x, y, samples, *, p, lr, alpha, a):
    """Return x, y, z and u; `samples[k][t]` as `three` takes them, `a` of t."""
    K, T = len(samples), len(samples[0])
    ws, us = [(x, y, np.zeros_like(y))] * K, [np.zeros_like(x)] * K
    for t in range(T):
        weight = alpha * a(t - 1) if t else 1.0
        for k in range(K):
            nu, omega, q = three(ws[k], samples[k][t])
            us[k] = (1 - weight) * us[k] + weight * nu
            ws[k] = moved(ws[k], [a(t) * step for step in lr], (us[k], omega, q))
        if (t + 1) % p == 0:
            ws, us = [mean(ws)] * K, [np.mean(us, axis=0)] * K
    return *ws[0], us[0]


def e_aipod(x, y, rounds, *, alpha, lr_y, pr, ell):
    """Return x, y and all c_k, with the whole sum of the series.

    A round is (lowers, firsts, factors, anchors, corrections): for each lower exchange
    the zetas of all clients up to the coin; their xis; their zetas for each factor;
    their (xi, zeta); for each client the xis of the parts of the step of x.
    """
    K = len(rounds[0][1])
    c = [np.zeros_like(y)] * K
    for lowers, firsts, factors, anchors, corrections in rounds:
        for zetas in lowers:
            ends = []
            for k in range(K):
                y_k = y
                for zeta in zetas[k]:
                    y_k = y_k - lr_y * (lower_gradient(x, y_k, zeta) - c[k])
                ends.append(y_k)
            y = np.mean(ends, axis=0)
            c = [c[k] + (pr / lr_y) * (y - ends[k]) for k in range(K)]
        r = np.mean([upper_gradients(x, y, xi)[1] for xi in firsts], axis=0) / ell
        z = r
        for zetas in factors:
            r = r - np.mean([hessian_product(x, y, r, one) for one in zetas], 0) / ell
            z = z + r
        x = fed_out(x, y, z, anchors, corrections, alpha)
    return x, y, c


def fed_out(x, y, z, anchors, corrections, alpha):
    """Return x after the steps corrected by the mean hypergradient with z."""
    slopes = [
        upper_gradients(x, y, xi)[0] - cross_product(x, y, z, zeta)
        for xi, zeta in anchors
    ]
    h, ends = np.mean(slopes, axis=0), []
    for xis in corrections:
        x_k = x
        for xi in xis:
            change = upper_gradients(x_k, y, xi)[0] - upper_gradients(x, y, xi)[0]
            x_k = x_k - alpha / len(xis) * (h + change)
        ends.append(x_k)
    return np.mean(ends, axis=0)


def fedmsa(x, y, starts, firsts, walks, cohorts, *, alpha, beta, rho, tau):
    """Return x, y, z and h.

    `starts[k][m]` are (xi, zeta) of the terms of z, `firsts[k][e]` the samples of all
    clients in round e and `walks[k][t]` those of local steps, as `three` takes them;
    `cohorts[e]` who takes part in the recursion.
    """
    K, z, steps = len(firsts), np.zeros_like(y), (alpha, beta, beta)
    for m in range(len(starts[0])):
        slopes = [
            hessian_product(x, y, z, zeta) - upper_gradients(x, y, xi)[1]
            for xi, zeta in (client[m] for client in starts)
        ]
        z = z - beta * np.mean(slopes, axis=0)
    w, h = (x, y, z), (0 * x, 0 * y, 0 * z)
    previous = w
    for e, cohort in enumerate(cohorts):
        every, kept = [], (1 - rho) if e else 0
        for k in range(K):
            now, then = three(w, firsts[k][e]), three(previous, firsts[k][e])
            parts = zip(now, h, then, strict=True)
            every.append(tuple(a + kept * (b - c) for a, b, c in parts))
        h, ends, previous = mean(every), [], w
        for k in cohort:
            own, before, now = h, w, moved(w, steps, h)
            for s in walks[k][e * (tau - 1) : (e + 1) * (tau - 1)]:
                parts = zip(own, three(now, s), three(before, s), strict=True)
                own = tuple(a + b - c for a, b, c in parts)
                before, now = now, moved(now, steps, own)
            ends.append(now)
        w = mean(ends)
    return *w, *h


def shrofbo(x, y, samples, taus, *, most, lr, gamma, normalized=True, products=()):
    """Return x, y, z; client i makes the first `taus[i]` of `most` local steps.

    Without `normalized` it is SimFBO, then with other `products` MemFBO.
    """
    w = (x, y, np.zeros_like(y))
    for r in range(len(samples[0]) // most):
        every = []
        for client, tau in zip(samples, taus, strict=True):
            w_i, q = w, tuple(np.zeros_like(block) for block in w)
            for sample in client[r * most : r * most + tau]:
                D = three(w_i, sample, *products)
                q = tuple(a + b for a, b in zip(q, D, strict=True))
                w_i = moved(w_i, lr, D)
            every.append(tuple(a / tau for a in q) if normalized else q)
        rho = np.mean(taus) if normalized else 1.0
        w = moved(w, gamma, tuple(rho * block for block in mean(every)))
    return w


def differences(distance):
    """Return products by central differences of the gradients of g."""

    def upper_part(x, y, zeta):
        # The derivative in x of the lower loss, of which `cross_product` is one more.
        straight = quadratic_oracles.cross_product(y, zeta)
        return straight + BEND * (y @ y) * x / 2

    def difference(gradient):
        def product(x, y, v, zeta):
            size = np.linalg.norm(v)
            d = distance / (size if size > 0 else 1)
            ahead, behind = gradient(x, y + d * v, zeta), gradient(x, y - d * v, zeta)
            return (ahead - behind) / (2 * d)

        return product

    return difference(lower_gradient), difference(upper_part)


def fedbio(x, y, samples, *, p, lr, products):
    """Return x, y and z with these Hessian and cross products."""
    K, T = len(samples), len(samples[0])
    ws = [(x, y, np.zeros_like(y))] * K
    for t in range(T):
        ws = [
            moved(w, lr, three(w, samples[k][t], *products)) for k, w in enumerate(ws)
        ]
        if (t + 1) % p == 0:
            ws = [mean(ws)] * K
    return ws[0]


def aggitd(x, y, rounds, *, alpha, beta, lam, whole):
    """Return x and y; with `whole` z is the sum over all beginnings.

    A round is (lowers, begins, series, anchors, corrections): for each lower update the
    (zeta, zetas of the walk) of all clients; N - m; their (xi, zeta) at y^1 to y^N;
    their (xi, zeta) for h; for each client the xis of the parts of the step of x.
    """
    for lowers, begins, series, anchors, corrections in rounds:
        N, z = len(lowers), np.zeros_like(y)
        for t in range(1, N + 1):
            y = fed_inn(x, y, lowers[t - 1], beta)
            fy = np.mean([upper_gradients(x, y, xi)[1] for xi, _ in series[t - 1]], 0)
            products = [hessian_product(x, y, z, zeta) for _, zeta in series[t - 1]]
            longer = z - lam * np.mean(products, axis=0)
            if whole:
                z = longer + lam * fy
            else:
                z = longer if t > begins else lam * N * fy if t == begins else z
        x = fed_out(x, y, z, anchors, corrections, alpha)
    return x, y


def fed_inn(x, y, samples, beta):
    """Return y after local steps that are corrected by the mean slope."""
    q = np.mean([lower_gradient(x, y, zeta) for zeta, _ in samples], axis=0)
    ends = []
    for _, zetas in samples:
        y_k = y
        for zeta in zetas:
            change = lower_gradient(x, y_k, zeta) - lower_gradient(x, y, zeta)
            y_k = y_k - beta / len(zetas) * (change + q)
        ends.append(y_k)
    return np.mean(ends, axis=0)


def br_fedbim(x, y, samples, cohorts, *, lr, alpha, rule):
    """Return x, y and z; `rule` makes one of many vectors, coordinate by coordinate."""
    w, d = (x, y, np.zeros_like(y)), {}
    for t, cohort in enumerate(cohorts):
        for k in cohort:
            D = three(w, samples[k][t])
            pairs = zip(d.get(k, D), D, strict=True)
            d[k] = tuple((1 - alpha) * old + alpha * new for old, new in pairs)
        blocks = zip(*(d[k] for k in cohort), strict=True)
        w = moved(w, lr, [rule(np.stack(block)) for block in blocks])
    return w


def ef_soba(x, y, samples, *, lr, largest):
    """Return x, y and z; so many of the largest entries of a block are sent.

    `samples[k][t]` is (xi, zeta).
    """
    w = (x, y, np.zeros_like(y))
    errors = [tuple(np.zeros_like(block) for block in w) for _ in samples]
    for t in range(len(samples[0])):
        sent = []
        for k, client in enumerate(samples):
            xi, zeta = client[t]
            D = three(w, (zeta, (xi, zeta), (xi, zeta)))
            due = [e + d for e, d in zip(errors[k], D, strict=True)]
            sent.append(tuple(_largest(block, largest) for block in due))
            pairs = zip(due, sent[-1], strict=True)
            errors[k] = tuple(block - part for block, part in pairs)
        w = moved(w, lr, mean(sent))
    return w


def _largest(vector, count):
    """Return a vector with 0 in the place of all but its largest entries."""
    keep = np.argsort(-np.abs(vector), kind="stable")[:count]
    kept = np.zeros_like(vector)
    kept[keep] = vector[keep]
    return kept
