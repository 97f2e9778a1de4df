"""The oracles of bent quadratics, in NumPy, from the drawn rows alone.

    f = 0.5 ||y - b||^2 + (r/2) ||x||^2 + c'x + BEND (sum x) (sum y)
    g = 0.5 y'Ay + x'Cy + a'y + BEND (sum y^4 / 12 + ||x||^2 ||y||^2 / 4)

A quadratic has the same Hessian everywhere and its fx ignores y, which would hide a
derivative taken at a wrong point. Here every derivative depends on all of (x, y).
"""

import numpy as np

from tests.reference import quadratic_oracles

BEND = 0.04


def upper_gradients(x, y, xi):
    """Return fx and fy."""
    fx, fy = quadratic_oracles.upper_gradients(x, y, xi)
    return fx + BEND * np.sum(y), fy + BEND * np.sum(x)


def lower_gradient(x, y, zeta):
    """Return gy."""
    straight = quadratic_oracles.lower_gradient(x, y, zeta)
    return straight + BEND * (y**3 / 3 + (x @ x) * y / 2)


def hessian_product(x, y, v, zeta):
    """Return (d2 g / dy dy) v."""
    straight = quadratic_oracles.hessian_product(v, zeta)
    return straight + BEND * (y**2 + (x @ x) / 2) * v


def cross_product(x, y, v, zeta):
    """Return (d2 g / dx dy) v."""
    return quadratic_oracles.cross_product(v, zeta) + BEND * (y @ v) * x


def hypergradient(x, y, bundle, theta):
    """Return the stochastic Neumann hypergradient by its recursion, j = Q..1."""
    xi, zeta_0, factors = bundle
    fx, r = upper_gradients(x, y, xi)
    s = r
    for zeta in factors:
        r = r - theta * hessian_product(x, y, r, zeta)
        s = s + r
    return fx - theta * cross_product(x, y, s, zeta_0)


def lower_gradients(x, y, zeta):
    """Return gx and gy."""
    gx = zeta["C"].mean(axis=0) @ y + BEND * (y @ y) * x / 2
    return gx, lower_gradient(x, y, zeta)
