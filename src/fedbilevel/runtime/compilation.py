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
# LLVM's optimizations, and the newer code generator for fusions, take longer than a
# program that runs once: on a CPU they are most of what compiling costs.
_BRIEFLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}
_programs: OrderedDict[Any, Any] = OrderedDict()


def compiled(
    function: Callable[..., Any],
    fixed: Any,
    arguments: tuple,
    donate: tuple[int, ...],
    evaluation: Evaluation,
    brief: bool = False,
) -> tuple[Callable[..., Any], float]:
    """Return `function(fixed, *arguments)` compiled for these shapes, and the seconds.

    Array leaves are inputs, so other values reuse the program; everything else in
    `fixed` and `arguments` identifies it, and where arrays lie follows from `fixed`.
    `donate` names arguments whose memory the result may take over, `evaluation` how the
    program is best written. A `brief` program, which runs once, is optimized less.
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
        brief,
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
            _programs[identity] = _build(function, static, arrays, donate, brief)
        seconds = time.perf_counter() - started
        tell(RUNNING)
        if len(_programs) > _LARGEST:
            _programs.popitem(last=False)
    _programs.move_to_end(identity)
    program = _programs[identity]

    def call(fixed: Any, *arguments: Any) -> Any:
        return program(*eqx.filter((fixed, *arguments), eqx.is_array))

    return call, seconds


def _build(
    function: Callable,
    static: Any,
    arrays: tuple,
    donate: tuple[int, ...],
    brief: bool,
):
    def on_arrays(*inputs: Any) -> Any:
        return function(*eqx.combine(inputs, static))

    positions = tuple(position + 1 for position in donate)
    traced = jax.jit(on_arrays, donate_argnums=positions).trace(*arrays)
    size = compile_times.equations(traced.jaxpr)
    expected = compile_times.expected(size)
    if expected is not None:
        tell(f"{COMPILING}, at most about {math.ceil(expected)} s")
    started, loaded = time.perf_counter(), compile_times.loaded()
    on_cpu = jax.default_backend() == "cpu"
    options = _BRIEFLY if brief and on_cpu else None
    program = traced.lower().compile(compiler_options=options)
    if not brief and compile_times.loaded() == loaded:
        compile_times.note(size, time.perf_counter() - started)
    return program
