"""Programs of the checks before a run: each runs once, so that it must compile soon."""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from fedbilevel.problem.stored_rows import is_stored
from fedbilevel.startup.compiled_programs import hurried
from fedbilevel.startup.stored_traces import as_lists, exported, name_of

T = TypeVar("T")
# Numbers that code which was not optimized at all soon works on. The curvatures of
# 10,000 clients with 25 million numbers take 1.6 s of processor time in the best code,
# which takes 6.9 s to compile; 1.9 after 1.2 s, and 6.8 after 0.5 s.
_FEW = 10**6


def runs_once(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function, with little effort: what it returns decides no trajectory.

    It returns arrays, in dictionaries or tuples, and no module.
    """

    @functools.wraps(function)
    def called(*arguments: Any) -> T:
        level = 0 if _numbers(arguments) <= _FEW else 1
        name = name_of(function, arguments)
        if name is None:
            return _program(function, level)(*arguments)
        arrays, static = eqx.partition(arguments, eqx.is_array)
        if name not in _stored:

            def on_arrays(*inputs: Any) -> T:
                return function(*eqx.combine(inputs, static))

            traced = exported(on_arrays, name, arrays)
            options: Any = {"compiler_options": hurried(level)}
            _stored[name] = jax.jit(traced.call, **options)
        return _stored[name](*as_lists(arrays))

    return called


# Programs of commands, by all that decides them; one command has few.
_stored: dict[str, Callable[..., Any]] = {}


@functools.cache
def _program(function: Callable[..., T], level: int) -> Callable[..., T]:
    # When it is called, and not before: only then it is known where programs run.
    options: Any = {"compiler_options": hurried(level)}
    return eqx.filter_jit(function, **options)


def _numbers(tree: PyTree) -> int:
    """Return how many numbers there are, those of rows in files among them."""
    leaves = jax.tree.leaves(tree, is_leaf=is_stored)
    counted = [leaf for leaf in leaves if is_stored(leaf) or eqx.is_array(leaf)]
    return sum(math.prod(leaf.shape) for leaf in counted)
