"""What the methods with a linear-system variable z share."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._blocks import put
from fedbilevel._types import Key, Lower, Pair, Triple, Upper
from fedbilevel.algorithms._single_loop import AbstractSingleLoop, Directions, Order
from fedbilevel.problem import Oracle
from fedbilevel.schedules import as_optional_number

__all__ = ["AbstractAuxiliary"]


class AbstractAuxiliary(AbstractSingleLoop):
    """A point (x, y, z), z tracking Hbar^-1 fybar as a third, averaged variable.

    `radius` bounds ||z|| (None: no bound); `alternating` moves y, then z, then x.
    """

    radius: Float[Array, "..."] | None = eqx.field(
        converter=as_optional_number, default=None, kw_only=True
    )
    alternating: bool = eqx.field(static=True, default=False, kw_only=True)

    def first_point(self, x: Upper, y: Lower) -> Triple:
        """Return (x, y, 0)."""
        return Triple(x, y, _tree.zeros_like(y))

    def order(self) -> Order:
        """Return y, z, x one after the other, or all at once."""
        return (("y",), ("z",), ("x",)) if self.alternating else (("x", "y", "z"),)

    def directions(self, oracle: Oracle, key: Key) -> Directions:
        """Draw independent samples for each line of the listing."""
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

        return {"x": nu, "y": omega, "z": q}

    def project(self, point: Pair) -> Pair:
        """Return the point with z in the ball, if one is asked for."""
        if self.radius is None:
            return point
        z: Any = point.z  # pyright: ignore[reportAttributeAccessIssue]
        size = _tree.norm(z)
        # The zero vector is inside every ball, and must not become 0/0.
        factor = jnp.minimum(
            1, self.radius.astype(size.dtype) / jnp.where(size > 0, size, 1)
        )
        return put(point, {"z": _tree.scale(factor, z)})


def _both(oracle: Oracle, key: Key) -> tuple[Any, Any]:
    upper, lower = jr.split(key)
    return oracle.draw_upper(upper), oracle.draw_lower(lower)
