"""The fast runtime: one compiled program on all devices, also of other processes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime import compilation, program
from fedbilevel.runtime.compilation import Asked, MemoryPlan, Program
from fedbilevel.runtime.contract import Advance, Found, Runtime, Span
from fedbilevel.runtime.exchange import start_state
from fedbilevel.runtime.job import Job, State
from fedbilevel.runtime.layout import Layout, devices_for
from fedbilevel.runtime.products import evaluation, numbers_of_pass

# From about this many floats in a message on, one client at a time is faster on the CPU
# than all at once (softmax regression, 16 clients: 97 us a client step against 101 at
# 2,816 floats, 423 against 481 at 17,248; at 1,430 floats it is 206 against 123).
_LARGE_MESSAGE = 2048
# Numbers times rows of one pass. Before the first round there are some twenty, and code
# that was not optimized takes up to ten times as long: less than a second.
_BRIEF = 2 * 10**9  # numbers that a pass multiplies


class CompiledRuntime(Runtime):
    """Runs rounds inside one program: a run, or the runs of a sweep.

    `varying` is the algorithm and the key; a sweep has those of all runs, stacked.
    """

    name = "simulator"

    def __init__(self, job: Job, layout: Layout, varying: Any = None) -> None:
        self.job, self.layout = job, layout
        self._evaluation = evaluation(job)
        placed = layout.place_job(job)
        self._fixed = (layout, placed)
        self._varying = (placed.algorithm, placed.key)
        if varying is not None:
            self._varying = layout.place(varying, PartitionSpec())

    def _set_up(self, state: State) -> tuple[State, program.Failure | None]:
        """Run the phases before the first round, if there are any."""
        if not self.job.algorithm.setup():
            return state, None
        return self._run(self._asked_setup(state))

    def _advanced(self, state: State, span: Span) -> tuple[Advance, program.Failure]:
        asked = self._asked_rounds(state, span)
        state, (rows, used, failure, track, done) = self._run(asked)
        count = int(used)
        table = {name: np.asarray(column)[:count] for name, column in rows.items()}
        track = jax.tree.map(np.asarray, track)
        return Advance(state, table, int(done), track), failure

    def _asked_setup(self, state: State) -> Asked:
        brief = numbers_of_pass(self.job) <= _BRIEF
        return replace(self._asked_for(program.setup, state), brief=brief)

    def _asked_rounds(self, state: State, span: Span) -> Asked:
        """Ask for some rounds; inside of a program all numbers of a span are arrays."""

        def count(value: Any) -> jax.Array:
            return jax.device_put(np.asarray(value, np.int32))

        names = ("start", "stop", "total", "every", "limits")
        counts = {name: count(getattr(span, name)) for name in names}
        whole = replace(span, **counts, track=jax.tree.map(jnp.asarray, span.track))
        placed = self.layout.place(whole, PartitionSpec())
        return self._asked_for(program.advance, state, placed)

    def _asked_for(self, function: Any, state: State, *span: Span) -> Asked:
        """Ask for a program that may take over the memory of the state."""
        arguments = (self._varying, state, *span)
        how = (self._evaluation, False, program.result_like(state, *span))
        return Asked(function, self._fixed, arguments, (1,), *how)

    def _run(self, asked: Asked) -> Any:
        """Return the result of a program, compiled if it was not before."""
        return self._compiled(asked)(asked.fixed, *asked.arguments)

    def _compiled(self, asked: Asked) -> Program:
        run, seconds = compilation.compiled(asked)
        self.compile_seconds += seconds
        return run


class SimulatorRuntime(CompiledRuntime):
    """Runs rounds inside one program; `clients_at_once` bounds memory per device."""

    def __init__(self, job: Job, clients_at_once: int | None = None) -> None:
        super().__init__(job, layout_for(job, clients_at_once))

    def start(self) -> tuple[State, Found | None]:
        """Return the state before round 0, after any setup phases."""
        state, failure = self._set_up(self._first_state())
        return state, first_failure(failure)

    def advance(self, state: State, span: Span) -> Advance:
        """Run some rounds."""
        step, failure = self._advanced(state, span)
        return step._replace(place=first_failure(failure))

    def prepare(self, span: Span) -> None:
        """Trace what `advance` will run, and let it compile meanwhile."""
        asked = self._asked_rounds(self._first_state(), span)
        self.compile_seconds += compilation.prepare(asked)

    def memory(self, span: Span) -> MemoryPlan:
        """Return what the program of the rounds takes of each device; run nothing."""
        state, (_, job) = self._first_state(), self._fixed
        run = self._compiled(self._asked_rounds(state, span))
        total, working = run.bytes_needed()
        return MemoryPlan(
            frozen=compilation.held_bytes(job.problem.frozen),
            rows=compilation.held_bytes((job.data, job.metrics)),
            state=compilation.held_bytes(state),
            working=working,
            total=total,
            limit=compilation.limit_of(self.layout.mesh().local_devices[0]),
        )

    def fetch(self, state: State) -> State:
        """Return the state on the host, one entry per client."""
        return jax.tree.map(np.asarray, self.layout.fetch_state(state))

    def load(self, state: State) -> State:
        """Put a fetched state back on the devices."""
        return self.layout.place_state(jax.tree.map(jnp.asarray, state))

    def _first_state(self) -> State:
        # As one program: method by method it would be one for every step of theirs.
        asked = Asked(start_state, self.job, (), (), self._evaluation, brief=True)
        return self.layout.place_state(self._run(asked))


def first_failure(failure: program.Failure | np.ndarray | None) -> Found | None:
    """Return (round, phase, client) of the first failure, if there was one."""
    if failure is None or int(failure[2]) == program.NOBODY:
        return None
    index, phase, client = np.asarray(failure).tolist()
    return index, phase, client


def layout_for(job: Job, clients_at_once: int | None, sweeps: bool = False) -> Layout:
    """Return how the clients of a job are spread over the devices.

    For large messages on the CPU one client at a time is faster, else all at once. One
    at a time it is, too, where a problem bounds the rows that are worked on.
    """
    if clients_at_once is not None and clients_at_once < 1:
        raise InvalidInputError(
            f"clients_at_once={clients_at_once}: at least 1, or None to choose."
        )
    algorithm = job.algorithm
    server = jax.eval_shape(algorithm.init_server, job.x, job.y)
    floats = sum(leaf.size for leaf in jax.tree.leaves(algorithm.worked_on(server)))
    large = jax.default_backend() == "cpu" and floats >= _LARGE_MESSAGE
    bounded = job.problem.rows_at_once is not None
    at_once = clients_at_once or (1 if large or bounded else None)
    shared = job.problem.model_devices
    devices = devices_for(job.participants, shared)
    return Layout(job.clients, job.participants, devices, at_once, sweeps, shared)
