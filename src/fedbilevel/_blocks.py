"""Blocks of a point by level, and which of them never leave a client.

Whatever belongs to one level travels inside a `Pair` or a `Triple`: points,
directions. So private blocks can be found in any message, and taken out of it.
"""

from dataclasses import fields, replace
from typing import Any, TypeGuard

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel._types import AbstractBlocks, Pair

NOTHING = Pair(False, False)


def either(a: Pair, b: Pair, x: PyTree, y: PyTree) -> Pair:
    """Flag a leaf of (x, y) as private if one of two declarations does."""

    def both(left: Any, right: Any, tree: PyTree) -> PyTree:
        flags = [
            jax.tree.map(lambda own, part: jax.tree.map(lambda _: own, part), one, tree)
            for one in (left, right)
        ]
        return jax.tree.map(lambda u, v: bool(u or v), *flags)

    return Pair(both(a.x, b.x, x), both(a.y, b.y, y))


def is_any(private: Pair) -> bool:
    """Say whether some block is private."""
    return any(jax.tree.leaves(private))


def split(tree: PyTree, private: Pair) -> tuple[PyTree, PyTree]:
    """Return what may travel and what stays on its client, None in each other's place.

    All blocks but x go with y.
    """

    def flags(node: Any) -> Any:
        if not _is_blocks(node):
            return False
        # A block that does not travel at all, or was taken out before, has no flag.
        present = [name for name, block in vars(node).items() if block is not None]
        flagged = {name: private.x if name == "x" else private.y for name in present}
        return replace(node, **flagged)

    own, public = eqx.partition(tree, jax.tree.map(flags, tree, is_leaf=_is_blocks))
    return public, own


def _is_blocks(node: Any) -> TypeGuard[AbstractBlocks]:
    return isinstance(node, AbstractBlocks)


def combine(first: PyTree, second: PyTree) -> PyTree:
    """Fill the places that are empty in the first tree from the second."""
    return eqx.combine(first, second)


def leaf_numbers(tree: PyTree) -> list[list[int]]:
    """Return which leaves make up each block.

    A block is one field of a `Pair` or a `Triple`, with all its leaves. Arrays that
    are outside of them are one block together, and so are single numbers: of those, a
    curvature or a count, one says nothing about the size of another.
    """
    leaves, structure = jax.tree.flatten(tree)
    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    parts = jax.tree.leaves(numbered, is_leaf=_is_blocks)
    pairs = filter(_is_blocks, parts)
    inside = [getattr(pair, one.name) for pair in pairs for one in fields(pair)]
    outside = [part for part in parts if not _is_blocks(part)]
    arrays = [number for number in outside if np.ndim(leaves[number])]
    single = [number for number in outside if not np.ndim(leaves[number])]
    blocks = [jax.tree.leaves(block) for block in (*inside, arrays, single)]
    return [numbers for numbers in blocks if numbers]
