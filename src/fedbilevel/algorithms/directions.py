"""Directions that methods share: samples are drawn first, then maps evaluate them.

A map with its sample fixed can be evaluated at two points. Functions that return one
map per block are for methods of one loop, where every block may move in its turn.
"""

from collections.abc import Callable

import jax.random as jr

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Pair, Triple, Upper
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.problem import Batch, Oracle


def both_samples(oracle: Oracle, key: Key) -> tuple[Batch, Batch]:
    """Draw an upper sample and, independent of it, a lower one."""
    for_xi, for_zeta = jr.split(key)
    return oracle.draw_upper(for_xi), oracle.draw_lower(for_zeta)


def hypergradient_and_slope(
    estimator: AbstractHypergradient, oracle: Oracle, key: Key
) -> Pair:
    """Draw independent b and zeta, and return h_k(.; b) and gy_k(.; zeta)."""
    for_bundle, for_zeta = jr.split(key)
    b, zeta = estimator.draw(oracle, for_bundle), oracle.draw_lower(for_zeta)
    return Pair(
        lambda w: estimator(oracle, w.x, w.y, b),
        lambda w: oracle.lower_gradient(w.x, w.y, zeta),
    )


def lower_slope(oracle: Oracle, key: Key) -> Pair:
    """Draw zeta and return the map gy_k(.; zeta), none for x."""
    zeta = oracle.draw_lower(key)
    return Pair(None, lambda w: oracle.lower_gradient(w.x, w.y, zeta))


def three_directions(oracle: Oracle, key: Key) -> Triple:
    """Draw independent samples for each line, and return the maps nu, omega and q.

    omega is the slope of g, q that of 0.5 z'Hz - z'fy, and nu the hypergradient with
    the current z.
    """
    for_y, for_z, for_x = jr.split(key, 3)
    omega = lower_slope(oracle, for_y).y
    q, nu = along_z(oracle, for_z), along_x(oracle, for_x)
    return Triple(nu, omega, q)


def along_x(oracle: Oracle, key: Key) -> Callable[[Triple], Upper]:
    """Draw xi and zeta; return the map of nu = fx - jvp[z]."""
    xi, zeta = both_samples(oracle, key)

    def nu(w: Triple) -> Upper:
        fx, _ = oracle.upper_gradients(w.x, w.y, xi)
        return _tree.subtract(fx, oracle.cross_product(w.x, w.y, w.z, zeta))

    return nu


def along_z(oracle: Oracle, key: Key) -> Callable[[Triple], Lower]:
    """Draw xi and zeta; return the map of q = hvp[z] - fy."""
    xi, zeta = both_samples(oracle, key)

    def q(w: Triple) -> Lower:
        _, fy = oracle.upper_gradients(w.x, w.y, xi)
        return _tree.subtract(oracle.hessian_product(w.x, w.y, w.z, zeta), fy)

    return q


def with_z(x: Upper, y: Lower) -> Triple:
    """Return (x, y) with the linear-system variable z = 0."""
    return Triple(x, y, _tree.zeros_like(y))
