"""The oracles of a sampled quadratic, in NumPy, from the drawn rows alone."""

import numpy as np


def upper_gradients(x, y, xi):
    """Return fx and fy of 0.5 ||y - b||^2 + (r/2) ||x||^2 + c'x over the rows."""
    fx = np.mean(xi["r"]) * x + xi["c"].mean(axis=0)
    return fx, y - xi["b"].mean(axis=0)


def lower_gradient(x, y, zeta):
    """Return gy of 0.5 y'Ay + x'Cy + a'y over the rows; A is symmetric."""
    A, C, a = (zeta[name].mean(axis=0) for name in ("A", "C", "a"))
    return A @ y + C.T @ x + a


def hessian_product(v, zeta):
    """Return (d2 g / dy dy) v, the same at every point."""
    return zeta["A"].mean(axis=0) @ v


def cross_product(v, zeta):
    """Return (d2 g / dx dy) v, the same at every point."""
    return zeta["C"].mean(axis=0) @ v


def hypergradient(x, y, bundle, theta):
    """Return the paper's stochastic hypergradient by its recursion, j = Q..1."""
    xi, zeta_0, factors = bundle
    fx, r = upper_gradients(x, y, xi)
    s = r.copy()
    for zeta in factors:
        r = r - theta * zeta["A"].mean(axis=0) @ r
        s = s + r
    return fx - theta * zeta_0["C"].mean(axis=0) @ s
