"""Blocks of a point by level, and which of them never leave a client.

Whatever belongs to one level travels inside a `Pair` (or a `Triple`): points,
directions. So private blocks can be found in any message, and taken out of it.
"""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from fedbilevel._types import Pair

__all__ = ["NOTHING", "either", "is_any", "join", "only", "pick", "put", "split"]

NOTHING = Pair(False, False)
Blocks = TypeVar("Blocks", bound=Pair)


def pick(pair: Pair, names: Iterable[str]) -> dict[str, Any]:
    """Return some blocks by name."""
    return {name: getattr(pair, name) for name in names}


def put(pair: Blocks, values: dict[str, Any]) -> Blocks:
    """Return the pair with some blocks replaced."""
    return replace(pair, **values)


def only(pair: Blocks, names: Iterable[str]) -> Blocks:
    """Return the pair with None in place of all other blocks."""
    kept = set(names)
    return put(pair, {f.name: None for f in fields(pair) if f.name not in kept})


def either(a: Pair, b: Pair, x: PyTree, y: PyTree) -> Pair:
    """Mark a leaf of (x, y) private if one of two declarations does."""

    def spread(marks: Any, tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda mark, part: jax.tree.map(lambda _: bool(mark), part), marks, tree
        )

    def both(left: Any, right: Any, tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda u, v: u or v, spread(left, tree), spread(right, tree)
        )

    return Pair(both(a.x, b.x, x), both(a.y, b.y, y))


def is_any(private: Pair) -> bool:
    """Say whether some block is private."""
    return any(jax.tree.leaves(private))


def split(tree: PyTree, private: Pair) -> tuple[PyTree, PyTree]:
    """Return what may travel and what stays on its client, None in each other's place.

    z goes with y.
    """

    def marks(node: Any) -> Any:
        if not isinstance(node, Pair):
            return False
        own = {
            field.name: _where_present(
                private.x if field.name == "x" else private.y, getattr(node, field.name)
            )
            for field in fields(node)
        }
        return put(node, own)

    spec = jax.tree.map(marks, tree, is_leaf=lambda node: isinstance(node, Pair))
    own, public = eqx.partition(tree, spec)
    return public, own


def _where_present(marks: PyTree, block: PyTree) -> PyTree:
    # A block that does not travel at all, or was taken out before, has nothing to mark.
    return None if block is None else marks


def join(public: PyTree, own: PyTree) -> PyTree:
    """Put the blocks of one client back in."""
    return eqx.combine(public, own)
