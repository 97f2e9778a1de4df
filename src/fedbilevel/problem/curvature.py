"""The largest curvature of the lower level, by power iteration on Hessian products."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Upper
from fedbilevel.problem.losses import Batch
from fedbilevel.problem.oracle import Oracle

__all__ = ["curvature_along", "largest_curvature", "some_direction"]


def some_direction(y: Lower, key: Key) -> Lower:
    """Return a random vector of length 1, shaped like y."""
    leaves, structure = jax.tree.flatten(y)
    keys = jr.split(key, len(leaves))
    drawn = [jr.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
    return _unit(jax.tree.unflatten(structure, drawn))[0]


def _unit(v: Lower) -> tuple[Lower, Array]:
    size = _tree.norm(v)
    # A Hessian of zeros leaves no direction, and must not make one of NaN.
    return _tree.scale(1 / jnp.where(size > 0, size, 1), v), size


def curvature_along(
    oracle: Oracle, x: Upper, y: Lower, v: Lower, zeta: Batch, times: int = 1
) -> tuple[Lower, Array]:
    """Return v after some products with the Hessian, and the length of the last one.

    v comes and goes as a vector of length 1, or of zeros where the Hessian has none.
    """

    def product(v: Lower, _: None) -> tuple[Lower, Array]:
        return _unit(oracle.hessian_product(x, y, v, zeta))

    v, sizes = jax.lax.scan(product, v, None, length=times)
    return v, sizes[-1]


@eqx.filter_jit
def largest_curvature(
    oracle: Oracle, clients: int, x: Upper, y: Lower, key: Key, iterations: int = 20
) -> Float[Array, " clients"]:
    """Estimate each client's largest lower curvature on one drawn batch, from below."""

    def of_client(client: Array) -> Array:
        own = eqx.tree_at(lambda one: one.client, oracle, client)
        draw, begin = jr.split(jr.fold_in(key, client))
        v = some_direction(y, begin)
        return curvature_along(own, x, y, v, own.draw_lower(draw), iterations)[1]

    return jax.lax.map(of_client, jnp.arange(clients))
