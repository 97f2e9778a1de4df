"""What of a start is optimized, and what only belongs to it.

A model holds more than numbers: activation functions, flags, texts. They stay as they
are, and are put back wherever a loss or a metric sees the model.
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel._types import Lower, Upper
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem.losses import Fixed, Problem

__all__ = ["split_start"]


def split_start(
    problem: Problem, start: tuple[Upper, Lower]
) -> tuple[Problem, tuple[Upper, Lower]]:
    """Return a start of numbers alone, and the problem that knows the rest of it.

    Of an Equinox module the arrays are optimized, of any other tree all numbers.
    """
    (x, rest_x), (y, rest_y) = (_split(level) for level in start)
    if not jax.tree.leaves((rest_x, rest_y)):
        return problem, (x, y)
    fixed = (_fixed("x", rest_x), _fixed("y", rest_y))
    return replace(problem, fixed=fixed), (x, y)


def _split(level: PyTree) -> tuple[PyTree, PyTree]:
    def numbers(node: Any) -> Any:
        if isinstance(node, eqx.Module):
            return jax.tree.map(_is_array, node)
        return eqx.is_array_like(node)

    chosen = jax.tree.map(numbers, level, is_leaf=_is_module)
    return eqx.partition(level, chosen)


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray)


def _fixed(name: str, rest: PyTree) -> Fixed:
    leaves, structure = jax.tree.flatten(rest)
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            raise InvalidInputError(
                f"the start {name} holds a leaf of type {type(leaf).__name__}, which "
                "is neither a number nor something that can be kept as it is. Make it "
                "a static field of its module (`eqx.field(static=True)`), or leave it "
                "out."
            ) from None
    return Fixed(tuple(leaves), structure)
