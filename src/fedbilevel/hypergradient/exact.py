r"""The dense solve, for small problems and as the yardstick of all other estimators.

    z = [d2g/dydy(x, y; zeta)]^-1 fy(x, y; xi),    h = fx - (d2g/dxdy) z

Bias: none beyond the samples; with all rows and y = y*(x) it is grad Phi_k(x).
"""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedbilevel._types import Key, Lower, Upper
from fedbilevel.hypergradient._base import (
    AbstractHypergradient,
    Bundle,
    assemble,
    frozen_bundle,
)
from fedbilevel.problem import Oracle


class Exact(AbstractHypergradient):
    """Build the lower Hessian column by column and solve with it."""

    def draw(self, oracle: Oracle, key: Key) -> Bundle:
        """Draw xi, zeta_0 and one batch for all products."""
        return frozen_bundle(oracle, key)

    def __call__(self, oracle: Oracle, x: Upper, y: Lower, bundle: Bundle) -> Upper:
        """Estimate the hypergradient at (x, y)."""
        fx, fy = oracle.upper_gradients(x, y, bundle.upper)
        flat, restore = ravel_pytree(fy)

        def column(unit: jax.Array) -> jax.Array:
            product = oracle.hessian_product(x, y, restore(unit), bundle.factors)
            return ravel_pytree(product)[0]

        hessian = jax.vmap(column)(jnp.eye(flat.size, dtype=flat.dtype))
        z = restore(jnp.linalg.solve(hessian, flat))
        return assemble(oracle, x, y, fx, z, bundle)
