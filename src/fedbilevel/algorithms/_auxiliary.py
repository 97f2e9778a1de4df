"""What the methods with a linear-system variable z share: its directions, its ball."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Triple, Upper
from fedbilevel.problem import Batch, Oracle

__all__ = ["by_differences", "in_ball", "order_of_moves", "three_directions"]


def three_directions(oracle: Oracle, key: Key) -> Triple:
    """Draw independent samples for each line; return the maps nu, omega and q.

    omega is the slope of g, q that of 0.5 z'Hz - z'fy, and nu the hypergradient with
    the current z.
    """
    for_y, for_z, for_x = jr.split(key, 3)
    zeta = oracle.draw_lower(for_y)
    (xi_z, zeta_z), (xi_x, zeta_x) = _both(oracle, for_z), _both(oracle, for_x)

    def q(w: Triple) -> Lower:
        _, fy = oracle.upper_gradients(w.x, w.y, xi_z)
        return _tree.subtract(oracle.hessian_product(w.x, w.y, w.z, zeta_z), fy)

    def nu(w: Triple) -> Upper:
        fx, _ = oracle.upper_gradients(w.x, w.y, xi_x)
        return _tree.subtract(fx, oracle.cross_product(w.x, w.y, w.z, zeta_x))

    def omega(w: Triple) -> Lower:
        return oracle.lower_gradient(w.x, w.y, zeta)

    return Triple(nu, omega, q)


def by_differences(oracle: Oracle, distance: Array | None) -> Oracle:
    """Return an oracle whose products are differences of gradients, if asked for.

    hvp[v] = (gy(x, y + d v) - gy(x, y - d v)) / (2 d) and jvp[v] likewise with gx, on
    one batch, with d = distance / ||v||.
    """
    return oracle if distance is None else replace(oracle, radius=distance)


def _both(oracle: Oracle, key: Key) -> tuple[Batch, Batch]:
    upper, lower = jr.split(key)
    return oracle.draw_upper(upper), oracle.draw_lower(lower)


def order_of_moves(alternating: bool) -> tuple[Triple, ...]:
    """Return which blocks move together: y, then z, then x; or all of them at once."""
    if not alternating:
        return (Triple(True, True, True),)
    y, z = Triple(False, True, False), Triple(False, False, True)
    return (y, z, Triple(True, False, False))


def in_ball(w: Triple, radius: Array | None) -> Triple:
    """Return the point with z in a ball, if there is one."""
    if radius is None:
        return w
    size = _tree.norm(w.z)
    # The zero vector is inside every ball, and must not become 0/0.
    factor: Any = jnp.minimum(
        1, radius.astype(size.dtype) / jnp.where(size > 0, size, 1)
    )
    return Triple(w.x, w.y, _tree.scale(factor, w.z))
