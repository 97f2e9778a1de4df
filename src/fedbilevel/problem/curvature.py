"""How much the two levels curve at a point, by power iterations.

The largest curvature of g is found by Hessian products. Where gradients are all that a
method asks for, f is weighed against g by differences of gradients.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from fedbilevel import _tree
from fedbilevel._types import Key, Lower, Rows, Scalar, Upper
from fedbilevel.problem import every_client
from fedbilevel.problem.every_client import map_clients, weight_of_client
from fedbilevel.problem.losses import Batch
from fedbilevel.problem.oracle import Oracle
from fedbilevel.problem.running_once import runs_once

_ITERATIONS = 20
_ROWS = 4096  # of all clients together, which are enough to weigh f against g
_REACH = 1e-2  # between the two places of a difference, half of it


def some_direction(y: Lower, key: Key) -> Lower:
    """Return a random vector of length 1, shaped like y."""
    return _unit(_tree.normal_like(key, y))[0]


def _unit(v: Lower) -> tuple[Lower, Array]:
    size = _tree.norm(v)
    # A Hessian of zeros leaves no direction, and must not make one of NaN.
    return _tree.scale(1 / jnp.where(size > 0, size, 1), v), size


def _powers(product: Callable, v: Lower, times: int) -> tuple[Lower, Array]:
    """Return v after some products, and the length of the last one."""
    v, sizes = jax.lax.scan(lambda v, _: _unit(product(v)), v, None, length=times)
    return v, sizes[-1]


def curvature_along(
    oracle: Oracle, x: Upper, y: Lower, v: Lower, zeta: Batch, times: int = 1
) -> tuple[Lower, Array]:
    """Return v after some products with the Hessian, and the length of the last one.

    v comes and goes as a vector of length 1, or of zeros where the Hessian has none.
    """
    return _powers(lambda v: oracle.hessian_product(x, y, v, zeta), v, times)


@runs_once
def largest_curvature(
    oracle: Oracle, clients: Int[Array, " some"], x: Upper, y: Lower, key: Key
) -> Float[Array, " some"]:
    """Estimate the largest lower curvature of clients, from below.

    Each is measured on one drawn batch.
    """

    def of_client(client: Array) -> Array:
        own = eqx.tree_at(lambda one: one.client, oracle, client)
        draw, begin = jr.split(jr.fold_in(key, client))
        v = some_direction(y, begin)
        return curvature_along(own, x, y, v, own.draw_lower(draw), _ITERATIONS)[1]

    weight = weight_of_client(oracle.problem, oracle.data, x, y)
    return map_clients(of_client, clients, weight)


@runs_once
def opposed_curvatures(
    oracle: Oracle, x: Upper, y: Lower, factor: Scalar, key: Key
) -> tuple[Scalar, Scalar]:
    """Return how much f and g curve along a direction where g - factor f curves little.

    It is looked for near where f curves most, in the means over all clients.
    """
    of_f, of_g = _mean_products(oracle, x, y, key)
    begin = some_direction(y, key)
    v, most = _powers(of_f, begin, _ITERATIONS)
    # Of what is taken from this multiple of v, the least curvature leaves most.
    shift = _powers(of_g, begin, _ITERATIONS)[1] + factor * most

    def rest(v: Lower) -> Lower:
        held = _tree.add_scaled(_tree.scale(shift, v), factor, of_f(v))
        return _tree.subtract(held, of_g(v))

    # Where f curves most g may, too, and a search that begins there would stay.
    start, _ = _unit(_tree.add(v, some_direction(y, jr.fold_in(key, 1))))
    v, _ = _powers(rest, start, 2 * _ITERATIONS)
    return _tree.dot(v, of_f(v)), _tree.dot(v, of_g(v))


def _mean_products(oracle: Oracle, x: Upper, y: Lower, key: Key):
    """Return the products of v with the mean Hessians of f and of g."""
    data = oracle.data
    few = replace(
        oracle,
        upper_batch=_few(data.upper, oracle.upper_batch),
        lower_batch=_few(data.lower, oracle.lower_batch),
    )
    share = data.weights / jnp.sum(data.weights)

    def own(client: Array) -> Oracle:
        return eqx.tree_at(lambda one: one.client, few, client)

    def draw(client: Array) -> tuple[Batch, Batch]:
        for_xi, for_zeta = jr.split(jr.fold_in(key, client))
        mine = own(client)
        return mine.draw_upper(for_xi), mine.draw_lower(for_zeta)

    clients = jnp.arange(data.clients)
    weight = weight_of_client(oracle.problem, data, x, y)
    drawn = map_clients(draw, clients, weight)

    def product(slope: Callable[..., Lower], v: Lower) -> Lower:
        def of_client(one: tuple[Array, tuple[Batch, Batch]]) -> Lower:
            client, batches = one
            ahead = slope(own(client), _tree.add_scaled(y, _REACH, v), *batches)
            behind = slope(own(client), _tree.add_scaled(y, -_REACH, v), *batches)
            return _tree.scale(0.5 / _REACH, _tree.subtract(ahead, behind))

        return every_client.mean_of_clients(of_client, (clients, drawn), share, weight)

    def fy(mine: Oracle, at: Lower, xi: Batch, _: Batch) -> Lower:
        return mine.upper_gradients(x, at, xi)[1]

    def gy(mine: Oracle, at: Lower, _: Batch, zeta: Batch) -> Lower:
        return mine.lower_gradient(x, at, zeta)

    return partial(product, fy), partial(product, gy)


def _few(rows: Rows, batch: int | None) -> int | None:
    """Return how many rows each client draws: all, where they are few."""
    clients, width = jax.tree.leaves(rows)[0].shape[:2]
    return None if clients * width <= _ROWS else max(_ROWS // clients, batch or 1)
