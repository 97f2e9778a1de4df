"""Compiles ahead of time, once per program, and says how long one waited for it."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import equinox as eqx
import jax

from fedbilevel import _evaluation
from fedbilevel._evaluation import Evaluation

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
    started = time.perf_counter()
    with _changing:
        mine = identity not in _programs
        made = _programs.setdefault(identity, Future())
        _programs.move_to_end(identity)
        if len(_programs) > _LARGEST:
            _programs.popitem(last=False)
    if mine:
        try:
            with _evaluation.using(evaluation):
                made.set_result(_build(function, static, arrays, donate))
        except BaseException as error:
            with _changing:
                _programs.pop(identity, None)
            made.set_exception(error)
            raise
    known = made.done() and not mine
    program = made.result()
    seconds = 0.0 if known else time.perf_counter() - started

    def call(fixed: Any, *arguments: Any) -> Any:
        return program(*eqx.filter((fixed, *arguments), eqx.is_array))

    return call, seconds


def _build(function: Callable, static: Any, arrays: tuple, donate: tuple[int, ...]):
    def on_arrays(*inputs: Any) -> Any:
        return function(*eqx.combine(inputs, static))

    positions = tuple(position + 1 for position in donate)
    return jax.jit(on_arrays, donate_argnums=positions).lower(*arrays).compile()
