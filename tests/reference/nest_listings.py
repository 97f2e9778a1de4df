"""The FedNest family, listing by listing, in NumPy.

What a listing draws is handed to it: `clients[k]` is what client k draws in one call of
the listing, and tau is the number of samples for its local steps.
"""

import numpy as np

from tests.reference.bent_oracles import (
    cross_product,
    hessian_product,
    hypergradient,
    lower_gradient,
    upper_gradients,
)


def nest(x, y, rounds, inner, outer):
    """Return x, y after T_in calls of `inner` and one of `outer` in every round."""
    for lower_samples, upper_samples in rounds:
        for clients in lower_samples:
            y = inner(x, y, clients)
        x = outer(x, y, upper_samples)
    return x, y


def fed_inn(x, y, clients, *, beta):
    """Return y after steps corrected by the mean slope; (zeta_i, tau zetas) each."""
    q = _mean(lower_gradient(x, y, zeta_i) for zeta_i, _ in clients)
    ends = []
    for _, zetas in clients:
        y_i, tau = y, len(zetas)
        for zeta in zetas:
            now, anchor = lower_gradient(x, y_i, zeta), lower_gradient(x, y, zeta)
            y_i = y_i - (beta / tau) * (now - anchor + q)
        ends.append(y_i)
    return _mean(ends)


def light_fed_inn(x, y, clients, *, beta):
    """Return y after plain local steps; tau zetas each."""
    ends = []
    for zetas in clients:
        y_i, tau = y, len(zetas)
        for zeta in zetas:
            y_i = y_i - (beta / tau) * lower_gradient(x, y_i, zeta)
        ends.append(y_i)
    return _mean(ends)


def random_ihgp(x, y, first, factors, *, ell, terms):
    """Return p_N', with N' = len(factors); xi_i and, for each m, zeta_{i,m}."""
    p = (terms / ell) * _mean(upper_gradients(x, y, xi)[1] for xi in first)
    for zetas in factors:
        p = _mean(p - (1 / ell) * hessian_product(x, y, p, zeta) for zeta in zetas)
    return p


def full_ihgp(x, y, first, factors, *, ell):
    """Return the whole series of N = len(factors) factors."""
    r = _mean(upper_gradients(x, y, xi)[1] for xi in first)
    total = r
    for zetas in factors:
        r = _mean(r - (1 / ell) * hessian_product(x, y, r, zeta) for zeta in zetas)
        total = total + r
    return (1 / ell) * total


def fed_out(x, y, drawn, *, alpha, inverse):
    """Return x after steps corrected by the mean hypergradient.

    `inverse(x, y, first, factors)` is FedIHGP. Then (xi_i, zeta_i) and tau xis each.
    """
    first, factors, anchors, steps = drawn
    z = inverse(x, y, first, factors)
    h = _mean(
        upper_gradients(x, y, xi)[0] - cross_product(x, y, z, zeta)
        for xi, zeta in anchors
    )
    ends = []
    for xis in steps:
        x_i, tau = x, len(xis)
        for xi in xis:
            anchor, now = upper_gradients(x, y, xi)[0], upper_gradients(x_i, y, xi)[0]
            x_i = x_i - (alpha / tau) * (h - anchor + now)
        ends.append(x_i)
    return _mean(ends)


def light_fed_out(x, y, clients, *, alpha, theta):
    """Return x after steps along local hypergradients; tau bundles each."""
    ends = []
    for bundles in clients:
        x_i, tau = x, len(bundles)
        for bundle in bundles:
            x_i = x_i - (alpha / tau) * hypergradient(x_i, y, bundle, theta)
        ends.append(x_i)
    return _mean(ends)


def double_loop(x, y, rounds, *, alpha, beta, inverse):
    """Return x, y of the single-machine double loop (ALSET).

    A round draws (zetas, (xi, zetas of the inverse), (xi, zeta)): lower steps, then
    `inverse(x, y, fy, zetas)`, then one upper step at the fresh y.
    """
    for zetas, (for_fy, for_inverse), (xi, zeta_0) in rounds:
        for zeta in zetas:
            y = y - beta * lower_gradient(x, y, zeta)
        z = inverse(x, y, upper_gradients(x, y, for_fy)[1], for_inverse)
        x = x - alpha * (upper_gradients(x, y, xi)[0] - cross_product(x, y, z, zeta_0))
    return x, y


def _mean(values):
    return np.mean(list(values), axis=0)
