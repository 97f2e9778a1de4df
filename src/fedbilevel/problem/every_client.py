"""Passes over all clients: some at a time, as many as a bounded memory holds.

One client at a time is slow where clients are many and small, and all at once needs the
rows of all of them, and a gradient for each, at the same time.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedbilevel import _tree
from fedbilevel.problem.data import Data
from fedbilevel.problem.losses import Problem, divided
from fedbilevel.problem.stored_rows import is_stored

_FLOATS = 2**20  # that are held at the same time


def weight_of_client(problem: Problem, data: Data, *points: PyTree) -> int:
    """Return how many numbers a pass over one client's rows holds, about."""
    if problem.rows_at_once is not None:
        return _FLOATS  # one client's rows are too many already
    leaves = jax.tree.leaves((data.upper, data.lower), is_leaf=is_stored)
    rows = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    return rows + 2 * sum(leaf.size for leaf in jax.tree.leaves(points))


def map_clients(function: Callable, items: PyTree, weight: int) -> PyTree:
    """Return the values of a function at every entry of `items`, stacked."""
    count = jax.tree.leaves(items)[0].shape[0]
    number = _chunks(count, weight)
    if number == 1:
        return jax.vmap(function)(items)
    chunks, _ = divided(items, number)
    values = jax.lax.map(jax.vmap(function), chunks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], values)


def summed(stack: PyTree, shares: Float[Array, " entries"]) -> PyTree:
    """Return the sum of entries by their shares; what has a share of 0 is left out."""

    def one(leaf: Array) -> Array:
        each = shares.astype(leaf.dtype).reshape((-1,) + (1,) * (leaf.ndim - 1))
        return jnp.sum(jnp.where(each > 0, each * leaf, 0), axis=0)

    return jax.tree.map(one, stack)


def mean_of_clients(
    function: Callable, items: PyTree, shares: Float[Array, " clients"], weight: int
) -> PyTree:
    """Return the sum of the values by their shares; only some are ever held.

    Entries whose share is 0 are left out whatever their values.
    """

    def part(items: PyTree, shares: Array) -> PyTree:
        return summed(jax.vmap(function)(items), shares)

    number = _chunks(shares.shape[0], weight)
    if number == 1:
        return part(items, shares)
    (items, shares), real = divided((items, shares), number)
    # Places that fill up the last chunk belong to no client.
    shares = jnp.where(real, shares, 0)
    first = jax.tree.map(lambda leaf: leaf[0], (items, shares))
    begin = _tree.zeros_like(jax.eval_shape(part, *first))

    def add(total: PyTree, chunk: tuple[PyTree, Array]) -> tuple[PyTree, None]:
        return _tree.add(total, part(*chunk)), None

    return jax.lax.scan(add, begin, (items, shares))[0]


def _chunks(count: int, weight: int) -> int:
    """Return in how many chunks so many entries are held, each of such a weight."""
    return -(-count // max(1, _FLOATS // max(weight, 1)))
