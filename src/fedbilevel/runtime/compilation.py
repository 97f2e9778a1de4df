"""Compiles ahead of time, once per program, and says how long one waited for it."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

from fedbilevel import _evaluation
from fedbilevel._evaluation import Evaluation
from fedbilevel.runtime import compile_times
from fedbilevel.runtime.listening import COMPILING, RUNNING, tell

_LARGEST = 64
# Several threads may ask for programs: whoever asks first compiles, the others wait.
_programs: OrderedDict[Any, Future] = OrderedDict()
_changing = threading.Lock()


def compiled(
    function: Callable[..., Any],
    fixed: Any,
    arguments: tuple,
    donate: tuple[int, ...],
    evaluation: Evaluation,
    brief: bool = False,
) -> tuple["Program", float]:
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
    started = time.perf_counter()
    with _changing:
        mine = identity not in _programs
        made = _programs.setdefault(identity, Future())
        _programs.move_to_end(identity)
        if len(_programs) > _LARGEST:
            _programs.popitem(last=False)
    if not mine and made.done():
        return Program(made.result()), 0.0
    tell(COMPILING)
    if mine:
        try:
            with _evaluation.using(evaluation):
                made.set_result(_build(function, static, arrays, donate, brief))
        except BaseException as error:
            with _changing:
                _programs.pop(identity, None)
            made.set_exception(error)
            raise
    program = made.result()
    tell(RUNNING)
    return Program(program), time.perf_counter() - started


@dataclass(frozen=True)
class Program:
    """A compiled function of `fixed` and its arguments, and what it takes to run."""

    executable: Any

    def __call__(self, fixed: Any, *arguments: Any) -> Any:
        """Run it; what is no array was compiled in."""
        return self.executable(*eqx.filter((fixed, *arguments), eqx.is_array))

    def bytes_needed(self) -> tuple[int, int]:
        """Return the bytes of a device in all, and those of intermediate values.

        Both are the compiler's: it lays out a program's memory before it runs.
        """
        told = self.executable.memory_analysis()
        held = told.argument_size_in_bytes + told.output_size_in_bytes
        working = told.temp_size_in_bytes
        return held + working - told.alias_size_in_bytes, working


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
    options = _evaluation.hurried(0) if brief else _evaluation.lasting()
    program = traced.lower().compile(compiler_options=options)
    if not brief and compile_times.loaded() == loaded:
        compile_times.note(size, time.perf_counter() - started)
    return program
