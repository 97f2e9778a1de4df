"""The blocks of a reply as vectors: what is clipped, thinned out or scaled as one.

A block is one field of a `Pair` or a `Triple`: x, y or z of a point, or of a direction,
with all its leaves. Arrays that a reply holds outside of them are one block together:
phases that send a single x or y send it bare. Single numbers beside them are another.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fedbilevel._blocks import leaf_numbers

_ROUNDING = 1e-9  # so that 0.1 of 30 is 3, though 0.1 * 30 > 3 in floating point


def share_of(fraction: float, count: int) -> int:
    """Return the least whole number that is at least this fraction of `count`."""
    return math.ceil(fraction * count - _ROUNDING)


def count_blocks(tree: PyTree) -> int:
    """Return the number of blocks."""
    return len(leaf_numbers(tree))


def to_vectors(tree: PyTree) -> list[Array]:
    """Return each block as one vector, of the widest type among its leaves."""
    leaves = jax.tree.leaves(tree)
    vectors = []
    for numbers in leaf_numbers(tree):
        block = [leaves[number] for number in numbers]
        kind = max((leaf.dtype for leaf in block), key=lambda one: one.itemsize)
        vectors.append(jnp.concatenate([leaf.ravel().astype(kind) for leaf in block]))
    return vectors


def vector_shapes(tree: PyTree) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of these vectors, from arrays or from their shapes."""
    return jax.eval_shape(to_vectors, tree)


def are_single_numbers(tree: PyTree) -> list[bool]:
    """Say of each block whether it has no array: a scalar x, or a curvature."""
    leaves = jax.tree.leaves(tree)
    return [
        all(np.ndim(leaves[number]) == 0 for number in numbers)
        for numbers in leaf_numbers(tree)
    ]


def change_numbers(tree: PyTree, change: Callable[[Array], Array]) -> PyTree:
    """Return a tree in which leaves of real numbers are replaced, but single numbers.

    Whole numbers, and blocks that have no array, stay as they are.
    """
    leaves, structure = jax.tree.flatten(tree)
    blocks = zip(leaf_numbers(tree), are_single_numbers(tree), strict=True)
    for number in [n for numbers, alone in blocks if not alone for n in numbers]:
        if jnp.issubdtype(leaves[number].dtype, jnp.floating):
            leaves[number] = change(leaves[number])
    return jax.tree.unflatten(structure, leaves)


def from_vectors(vectors: list[Array], like: PyTree) -> PyTree:
    """Put the vectors of all blocks back into a tree of these shapes."""
    shapes, structure = jax.tree.flatten(like)
    leaves: list[Any] = [None] * len(shapes)
    for vector, numbers in zip(vectors, leaf_numbers(like), strict=True):
        first = 0
        for number in numbers:
            shape, last = shapes[number], first + shapes[number].size
            part = vector[first:last].reshape(shape.shape)
            leaves[number], first = part.astype(shape.dtype), last
    return jax.tree.unflatten(structure, leaves)


def change_blocks(tree: PyTree, change: Callable[[Array], Any]) -> PyTree:
    """Return a tree in which every block, as one vector, is replaced by another."""
    return from_vectors([change(vector) for vector in to_vectors(tree)], tree)
