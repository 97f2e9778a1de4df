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
import jax.export
from jax.export import Exported

from fedbilevel import _evaluation
from fedbilevel._evaluation import Evaluation
from fedbilevel.runtime import compile_times, stored_traces
from fedbilevel.runtime.compile_times import equations
from fedbilevel.runtime.listening import COMPILING, RUNNING, tell
from fedbilevel.runtime.stored_traces import as_lists, from_lists, name_of

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
    like: Any = None,
) -> tuple["Program", float]:
    """Return `function(fixed, *arguments)` compiled for these shapes, and the seconds.

    Array leaves are inputs, so other values reuse the program; everything else in
    `fixed` and `arguments` identifies it, and where arrays lie follows from `fixed`.
    `donate` names arguments whose memory the result may take over, `evaluation` how the
    program is best written. A `brief` program, which runs once, is optimized less.
    `like` has modules where the result has them, of the same structure: with it the
    traced program is kept on disk for commands to come.
    """
    arrays, static = eqx.partition((fixed, *arguments), eqx.is_array)
    leaves, structure = jax.tree.flatten(static)
    shapes = [jax.typeof(leaf) for leaf in jax.tree.leaves(arrays)]
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
        return made.result(), 0.0
    tell(COMPILING)
    if mine:
        try:
            with _evaluation.using(evaluation):
                how = (donate, brief, jax.tree.map(lambda leaf: 0, like))
                made.set_result(_build(function, static, arrays, *how))
        except BaseException as error:
            with _changing:
                _programs.pop(identity, None)
            made.set_exception(error)
            raise
    program = made.result()
    tell(RUNNING)
    return program, time.perf_counter() - started


@dataclass(frozen=True)
class Program:
    """A compiled function of `fixed` and its arguments, and what it takes to run.

    One with `like` takes and returns lists in the place of modules.
    """

    executable: Any
    like: Any = None

    def __call__(self, fixed: Any, *arguments: Any) -> Any:
        """Run it; what is no array was compiled in."""
        inputs = eqx.filter((fixed, *arguments), eqx.is_array)
        if self.like is None:
            return self.executable(*inputs)
        return from_lists(self.executable(*as_lists(inputs)), self.like)

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
    like: Any,
) -> Program:
    def on_arrays(*inputs: Any) -> Any:
        return function(*eqx.combine(inputs, static))

    positions = tuple(position + 1 for position in donate)
    evaluation = _evaluation.current()
    name = None
    if like is not None:
        name = name_of(function, evaluation, eqx.combine(arrays, static))
    if name is None:
        traced = jax.jit(on_arrays, donate_argnums=positions).trace(*arrays)
        return Program(_finished(traced, equations(traced.jaxpr), brief))
    lists = as_lists(arrays)
    exported, size = _exported(on_arrays, name, arrays)
    traced = jax.jit(exported.call, donate_argnums=positions).trace(*lists)
    return Program(_finished(traced, size, brief), like)


def _exported(function: Callable, name: str, arrays: tuple) -> tuple[Exported, int]:
    """Return a traced program of lists and its equations, from disk if it is there."""
    kept = stored_traces.read(name)
    if kept is not None:
        return jax.export.deserialize(bytearray(kept.content)), kept.about["equations"]

    def on_lists(*inputs: Any) -> Any:
        return as_lists(function(*from_lists(inputs, arrays)))

    made, lists = jax.jit(on_lists), as_lists(arrays)
    size = equations(made.trace(*lists).jaxpr)
    exported = jax.export.export(made)(*lists)
    stored_traces.write(name, bytes(exported.serialize()), equations=size)
    return exported, size


def _finished(traced: Any, size: int, brief: bool) -> Any:
    """Compile a traced program of so many equations."""
    expected = compile_times.expected(size)
    if expected is not None:
        tell(f"{COMPILING}, at most about {math.ceil(expected)} s")
    started, loaded = time.perf_counter(), compile_times.loaded()
    options = _evaluation.hurried(0) if brief else None
    program = traced.lower().compile(compiler_options=options)
    if not brief and compile_times.loaded() == loaded:
        compile_times.note(size, time.perf_counter() - started)
    return program
