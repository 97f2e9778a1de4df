"""Compiles ahead of time, once per program, and says how long it took."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from fedbilevel import _evaluation
from fedbilevel._evaluation import Evaluation
from fedbilevel.runtime import compile_times
from fedbilevel.runtime.listening import COMPILING, RUNNING, tell

_LARGEST = 64
_programs: OrderedDict[Any, Any] = OrderedDict()


def compiled(
    function: Callable[..., Any],
    fixed: Any,
    arguments: tuple,
    donate: tuple[int, ...],
    evaluation: Evaluation,
) -> tuple[Callable[..., Any], float]:
    """Return `function(fixed, *arguments)` compiled for these shapes, and the seconds.

    Array leaves are inputs, so other values reuse the program; everything else in
    `fixed` and `arguments` identifies it, and where arrays lie follows from `fixed`.
    `donate` names arguments whose memory the result may take over, `evaluation` how the
    program is best written.
    """
    arrays, static = eqx.partition((fixed, *arguments), eqx.is_array)
    leaves, structure = jax.tree.flatten(static)
    shapes = [
        (leaf.shape, leaf.dtype, getattr(leaf.aval, "weak_type", False))
        for leaf in jax.tree.leaves(arrays)
    ]
    identity = (
        function,
        donate,
        evaluation,
        tuple(leaves),
        structure,
        tuple(shapes),
        jax.tree.structure(arrays),
    )
    seconds = 0.0
    if identity not in _programs:
        started = time.perf_counter()
        tell(COMPILING)
        with _evaluation.using(evaluation):
            _programs[identity] = _build(function, static, arrays, donate)
        seconds = time.perf_counter() - started
        tell(RUNNING)
        if len(_programs) > _LARGEST:
            _programs.popitem(last=False)
    _programs.move_to_end(identity)
    program = _programs[identity]

    def call(fixed: Any, *arguments: Any) -> Any:
        return program(*eqx.filter((fixed, *arguments), eqx.is_array))

    return call, seconds


def _build(function: Callable, static: Any, arrays: tuple, donate: tuple[int, ...]):
    def on_arrays(*inputs: Any) -> Any:
        return function(*eqx.combine(inputs, static))

    positions = tuple(position + 1 for position in donate)
    traced = jax.jit(on_arrays, donate_argnums=positions).trace(*arrays)
    size = compile_times.equations(traced.jaxpr)
    expected = compile_times.expected(size)
    if expected is not None:
        tell(f"{COMPILING}, at most about {math.ceil(expected)} s")
    started, loaded = time.perf_counter(), compile_times.loaded()
    program = traced.lower().compile()
    if compile_times.loaded() == loaded:
        compile_times.note(size, time.perf_counter() - started)
    return program
