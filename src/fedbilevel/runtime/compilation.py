"""Compiles ahead of time, once per program; says how long that took, and its memory."""

import atexit
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import equinox as eqx
import jax
from jaxtyping import PyTree

from fedbilevel import _evaluation
from fedbilevel._evaluation import Evaluation
from fedbilevel.runtime.progress import COMPILING, RUNNING, report
from fedbilevel.startup.compiled_programs import hurried, lasting
from fedbilevel.startup.stored_traces import as_lists, exported, from_lists, name_of

_LARGEST = 64
# Several threads may ask for programs: the first one compiles, the others wait.
_programs: OrderedDict[Any, Future] = OrderedDict()
_changing = threading.Lock()
_working: WeakSet[threading.Thread] = WeakSet()


@dataclass(frozen=True)
class Asked:
    """The program of `function(fixed, *arguments)` for some shapes.

    Array leaves are inputs, so other values reuse the program; everything else in
    `fixed` and `arguments` identifies it, and where arrays lie follows from `fixed`.
    `donate` names arguments whose memory the result may take over, `evaluation` how the
    program is best written. A `brief` program, which runs once, is optimized less.
    `like` has modules where the result has them, of the same structure: with it the
    traced program is kept on disk for commands to come.
    """

    function: Callable[..., Any]
    fixed: Any
    arguments: tuple
    donate: tuple[int, ...]
    evaluation: Evaluation
    brief: bool = False
    like: Any = None

    def parts(self) -> tuple[tuple, Any]:
        """Return what the program is given, and what is compiled into it."""
        return eqx.partition((self.fixed, *self.arguments), eqx.is_array)

    def identity(self) -> Any:
        """Return what two equal programs have in common."""
        arrays, static = self.parts()
        leaves, structure = jax.tree.flatten(static)
        return (
            self.function,
            self.donate,
            self.evaluation,
            self.brief,
            tuple(leaves),
            structure,
            tuple(jax.typeof(leaf) for leaf in jax.tree.leaves(arrays)),
            jax.tree.structure(arrays),
        )


def compiled(asked: Asked) -> tuple["Program", float]:
    """Return a program, and the seconds that one waited for it."""
    started, identity = time.perf_counter(), asked.identity()
    made, mine = _claimed(identity)
    if not mine and made.done():
        return made.result(), 0.0
    report(COMPILING)
    if mine:
        _make(asked, identity, made)
    program = made.result()
    report(RUNNING)
    return program, time.perf_counter() - started


def prepare(asked: Asked) -> float:
    """Trace a program here and let it compile meanwhile, for `compiled` to find.

    Two threads that trace at once take turns, and are both late. Return the seconds.
    """
    started, identity = time.perf_counter(), asked.identity()
    made, mine = _claimed(identity)
    if mine:
        report(COMPILING)
        _make(asked, identity, made)
        report(RUNNING)
    return time.perf_counter() - started


def _claimed(identity: Any) -> tuple[Future, bool]:
    """Return what will be the program, and whether it is the caller's to make."""
    with _changing:
        mine = identity not in _programs
        made = _programs.setdefault(identity, Future())
        _programs.move_to_end(identity)
        if len(_programs) > _LARGEST:
            _programs.popitem(last=False)
    return made, mine


def _make(asked: Asked, identity: Any, made: Future) -> None:
    """Trace here, and compile in the background; waiting threads get the error."""

    def forget() -> None:
        with _changing:
            _programs.pop(identity, None)

    def finish() -> Program:
        try:
            return Program(_finished(asked, lowered), like)
        except BaseException:
            forget()
            raise

    try:
        with _evaluation.using(asked.evaluation):
            lowered, like = _lowered(asked)
    except BaseException as error:
        forget()
        made.set_exception(error)
        raise
    in_background(finish, made)


def in_background(work: Callable[[], Any], made: Future) -> None:
    """Begin work in a thread, so that the one that waits for its result sees Ctrl-C.

    A compiler works for a minute and returns to no handler of signals.
    """

    def begin() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=copy_context().run, args=(begin,), daemon=True)
    _working.add(thread)
    thread.start()


@atexit.register
def _leave() -> None:
    """Let no compiler return to a Python that is gone, which would abort the process.

    After Ctrl-C it is not waited for: the process ends by that signal, as others do.
    """
    for thread in list(_working):
        if thread.is_alive() and getattr(sys, "last_type", None) is KeyboardInterrupt:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        thread.join()


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
        plan = self.executable.memory_analysis()
        held = plan.argument_size_in_bytes + plan.output_size_in_bytes
        working = plan.temp_size_in_bytes
        return held + working - plan.alias_size_in_bytes, working


def _lowered(asked: Asked) -> tuple[Any, Any]:
    """Return a traced program, and where its results have modules."""
    arrays, static = asked.parts()

    def on_arrays(*inputs: Any) -> Any:
        return asked.function(*eqx.combine(inputs, static))

    positions = tuple(position + 1 for position in asked.donate)
    name = None
    if asked.like is not None:
        name = name_of(asked.function, asked.evaluation, asked.fixed, asked.arguments)
    if name is None:
        return jax.jit(on_arrays, donate_argnums=positions).lower(*arrays), None
    traced = exported(on_arrays, name, arrays)
    called = jax.jit(traced.call, donate_argnums=positions)
    like = jax.tree.map(lambda leaf: 0, asked.like)
    return called.lower(*as_lists(arrays)), like


def _finished(asked: Asked, lowered: Any) -> Any:
    """Compile a traced program."""
    options = hurried(0) if asked.brief else lasting(asked.evaluation)
    return lowered.compile(compiler_options=options)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device that the compiled rounds take.

    `frozen` is what is never trained, `rows` those of the clients and of tests, `state`
    what server and clients carry, `working` all intermediate values of the rounds.
    `total` has some small inputs and outputs more. `limit` is what the device has, None
    if that is not known.
    """

    frozen: int
    rows: int
    state: int
    working: int
    total: int
    limit: int | None

    @property
    def fits(self) -> bool | None:
        """Say whether the device has that much, None if that is not known."""
        return None if self.limit is None else self.total <= self.limit


def held_bytes(tree: PyTree) -> int:
    """Return the bytes of arrays on the first of this process' devices."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def limit_of(device: Any) -> int | None:
    """Return the bytes that a program may take of a device."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
