"""Methods of one level, line by line, in NumPy: y alone moves, at a given x.

What a listing draws is handed to it: `samples[k][t]` is client k's zeta. Cohorts are
lists of clients, one for each round.
"""

import numpy as np

from tests.reference.bent_oracles import lower_gradient


def local_ends(x, y, samples, r, p, lr, mu=0.0, corrections=None):
    """Return y_k of every client after its p steps of round r.

    `mu` draws back to y, `corrections` are subtracted from the clients' slopes.
    """
    ends = []
    for k, own in enumerate(samples):
        y_k = y
        for zeta in own[r * p : (r + 1) * p]:
            slope = lower_gradient(x, y_k, zeta) + mu * (y_k - y)
            y_k = y_k - lr * (slope if corrections is None else slope - corrections[k])
        ends.append(y_k)
    return ends


def fedprox(x, y, samples, *, p, lr, mu):
    """Return the server's y."""
    for r in range(len(samples[0]) // p):
        y = np.mean(local_ends(x, y, samples, r, p, lr, mu), axis=0)
    return y


def fedavgm(x, y, samples, *, p, lr, beta, lr_server):
    """Return the server's y and v."""
    v = np.zeros_like(y)
    for r in range(len(samples[0]) // p):
        delta = y - np.mean(local_ends(x, y, samples, r, p, lr), axis=0)
        v = beta * v + delta
        y = y - lr_server * v
    return y, v


def fedadam(x, y, samples, *, p, lr, lr_server, beta1, beta2, tau):
    """Return the server's y, m and v."""
    m, v = np.zeros_like(y), np.full_like(y, tau**2)
    for r in range(len(samples[0]) // p):
        delta = np.mean(local_ends(x, y, samples, r, p, lr), axis=0) - y
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * delta**2
        y = y + lr_server * m / (np.sqrt(v) + tau)
    return y, m, v


def stem(x, y0, samples, firsts, *, p, lr, c, eta):
    """Return the mean y and d; `firsts[k]` are the further samples of the first d.

    As the paper has it: at the last step of a round y and d are averaged, and the move
    follows; `w` is where a client itself was before.
    """
    K, T = len(samples), len(samples[0])
    y, d, w = [y0] * K, [np.zeros_like(y0)] * K, [y0] * K
    for t in range(T):
        for k in range(K):
            zeta = samples[k][t]
            if t == 0:
                batch = [*firsts[k], zeta]
                d[k] = np.mean([lower_gradient(x, y0, one) for one in batch], axis=0)
            else:
                a = c * eta(t - 1) ** 2
                before = lower_gradient(x, w[k], zeta)
                d[k] = lower_gradient(x, y[k], zeta) + (1 - a) * (d[k] - before)
        w = list(y)
        if (t + 1) % p == 0:
            y, d = [np.mean(y, axis=0)] * K, [np.mean(d, axis=0)] * K
        y = [y_k - lr * eta(t) * d_k for y_k, d_k in zip(y, d, strict=True)]
    return y[0], d[0]


def storm(x, y, zetas, *, lr, c, eta):
    """Return y and d of STORM on one machine."""
    d, before = None, None
    for t, zeta in enumerate(zetas):
        d_new = lower_gradient(x, y, zeta)
        if t > 0:
            keep = 1 - c * eta(t - 1) ** 2
            d_new = d_new + keep * (d - lower_gradient(x, before, zeta))
        d, before = d_new, y
        y = y - lr * eta(t) * d
    return y, d


def bvr_l_sgd(x, y, anchors, samples, picks, *, p, lr):
    """Return the server's y and v; `anchors[r][k]` are samples, `picks[r]` a client."""
    v = np.zeros_like(y)
    for r, drawn in enumerate(anchors):
        slopes = [[lower_gradient(x, y, zeta) for zeta in own] for own in drawn]
        v = np.mean([np.mean(own, axis=0) for own in slopes], axis=0)
        ends = []
        for own in samples:
            y_k, w_k, v_k = y, y, v
            for zeta in own[r * p : (r + 1) * p]:
                change = lower_gradient(x, y_k, zeta) - lower_gradient(x, w_k, zeta)
                v_k = v_k + change
                w_k, y_k = y_k, y_k - lr * v_k
            ends.append(y_k)
        y = ends[picks[r]]
    return y, v


def rounded(change, draws, bits):
    """Return a change in levels of its largest entry, rounded by the uniform draws."""
    highest = 2 ** (bits - 1) - 1
    scale = np.max(np.abs(change))
    exact = change / scale * highest
    below = np.floor(exact)
    return (below + (draws < exact - below)) * scale / highest


def fedcom(x, y, samples, draws, *, p, lr, lr_server, bits):
    """Return the server's y; `draws[r][k]` are what client k rounds by."""
    for r, own in enumerate(draws):
        ends = local_ends(x, y, samples, r, p, lr)
        sent = [rounded(y_k - y, u, bits) for y_k, u in zip(ends, own, strict=True)]
        y = y + lr_server * np.mean(sent, axis=0)
    return y


def fedcomgate(x, y, samples, draws, *, p, lr, lr_server, bits):
    """Return the server's y, and every delta_k after the last round."""
    deltas = [np.zeros_like(y)] * len(samples)
    for r, own in enumerate(draws):
        ends = local_ends(x, y, samples, r, p, lr, corrections=deltas)
        changes = [y - y_k for y_k in ends]
        # What is rounded is y_k - y: chance rounds its negative otherwise.
        sent = [-rounded(-one, u, bits) for one, u in zip(changes, own, strict=True)]
        mean = np.mean(sent, axis=0)
        y = y - lr_server * mean
        deltas = [
            delta + (one - mean) / (p * lr)
            for delta, one in zip(deltas, changes, strict=True)
        ]
    return y, deltas


def compressed_local_sgd(x, y, samples, *, p, lr, kept):
    """Return the server's y, and every e_k; `kept` entries travel."""
    errors = [np.zeros_like(y)] * len(samples)
    for r in range(len(samples[0]) // p):
        sent = []
        for k, y_k in enumerate(local_ends(x, y, samples, r, p, lr)):
            due = y_k - y + errors[k]
            largest = np.argsort(-np.abs(due))[:kept]
            c_k = np.zeros_like(due)
            c_k[largest] = due[largest]
            sent.append(c_k)
            errors[k] = due - c_k
        y = y + np.mean(sent, axis=0)
    return y, errors
