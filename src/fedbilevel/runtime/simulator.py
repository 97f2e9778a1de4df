"""The fast runtime: one compiled program on all devices, also of other processes."""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedbilevel._types import Key
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime import program
from fedbilevel.runtime.checkpoint import fingerprint
from fedbilevel.runtime.compilation import Asked, Program, compiled, prepare
from fedbilevel.runtime.contract import Advance, Found, Span
from fedbilevel.runtime.exchange import start_state
from fedbilevel.runtime.job import Job, State
from fedbilevel.runtime.layout import Layout, devices_for
from fedbilevel.runtime.memory import MemoryPlan, held_bytes, limit_of
from fedbilevel.runtime.products import evaluation, rows_of_sample

__all__ = ["SimulatorRuntime"]

# From about this many floats in a message on, one client at a time is faster on the CPU
# than all at once (softmax regression, 16 clients: 97 us a client step against 101 at
# 2,816 floats, 423 against 481 at 17,248; at 1,430 floats it is 206 against 123).
_LARGE_MESSAGE = 2048


# Numbers times rows of one pass. Before the first round there are some twenty, and code
# that was not optimized takes up to ten times as long: less than a second.
_BRIEF = 10**6


class SimulatorRuntime:
    """Runs rounds inside one program; `clients_at_once` bounds memory per device."""

    name = "simulator"

    def __init__(self, job: Job, clients_at_once: int | None = None) -> None:
        if clients_at_once is not None and clients_at_once < 1:
            raise InvalidInputError(
                f"clients_at_once={clients_at_once}: at least 1, or None to choose."
            )
        self.job = job
        self.layout = layout_for(job, clients_at_once)
        self.compile_seconds = 0.0
        self._evaluation = evaluation(job)
        self._fixed = (self.layout, self.layout.place_job(job))
        self._varying = (self._fixed[1].algorithm, self._fixed[1].key)

    @property
    def runs(self) -> tuple[int, ...]:
        """The shape of a single run."""
        return ()

    @property
    def roots(self) -> Sequence[Key]:
        """The key of the run."""
        return (self.job.key,)

    def fingerprint(self, every: int) -> str:
        """Return the fingerprint of the job."""
        return fingerprint(self.job, every)

    def blank(self) -> State:
        """Return the state before the first exchange."""
        return start_state(self.job)

    def start(self) -> tuple[State, Found | None]:
        """Return the state before round 0, after any setup phases."""
        state, seconds = self._first_state()
        self.compile_seconds += seconds
        if not self.job.algorithm.setup():
            return state, None
        run = self._compile(
            program.setup, self._varying, state, donate=(1,), brief=is_brief(self.job)
        )
        state, failure = run(self._fixed, self._varying, state)
        return state, first_failure(failure)

    def advance(self, state: State, span: Span) -> Advance:
        """Run some rounds."""
        run, arguments = self._rounds(state, span)
        state, (rows, used, failure, track, done) = run(self._fixed, *arguments)
        count = int(used)
        table = {name: np.asarray(column)[:count] for name, column in rows.items()}
        track = jax.tree.map(np.asarray, track)
        return Advance(state, table, int(done), track, first_failure(failure))

    def prepare(self, span: Span, pool: Executor) -> None:
        """Trace what `advance` will run; let the pool compile it meanwhile."""
        state, seconds = self._first_state()
        arguments = (self._varying, state, placed_span(self.layout, span))
        asked = self._asked_for(program.advance, arguments, (1,))
        self.compile_seconds += seconds + prepare(asked, pool)

    def memory(self, span: Span) -> MemoryPlan:
        """Return what the program of the rounds takes of each device; run nothing."""
        (state, _), (_, job) = self._first_state(), self._fixed
        run, _ = self._rounds(state, span)
        total, working = run.bytes_needed()
        return MemoryPlan(
            frozen=held_bytes(job.problem.frozen),
            rows=held_bytes((job.data, job.metrics)),
            state=held_bytes(state),
            working=working,
            total=total,
            limit=limit_of(self.layout.mesh().local_devices[0]),
        )

    def fetch(self, state: State) -> State:
        """Return the state on the host, one entry per client."""
        return jax.tree.map(np.asarray, self.layout.fetch_state(state))

    def load(self, state: State) -> State:
        """Put a fetched state back on the devices."""
        return self.layout.place_state(jax.tree.map(jnp.asarray, state))

    def _first_state(self) -> tuple[State, float]:
        # As one program: method by method it would be one for every step of theirs.
        asked = Asked(start_state, self.job, (), (), self._evaluation, brief=True)
        begin, seconds = compiled(asked)
        return self.layout.place_state(begin(self.job)), seconds

    def _rounds(self, state: State, span: Span) -> tuple[Program, tuple]:
        arguments = (self._varying, state, placed_span(self.layout, span))
        return self._compile(program.advance, *arguments, donate=(1,)), arguments

    def _compile(self, function, *arguments, donate: tuple[int, ...], brief=False):
        run, seconds = compiled(self._asked_for(function, arguments, donate, brief))
        self.compile_seconds += seconds
        return run

    def _asked_for(
        self, function: Any, arguments: tuple, donate: tuple[int, ...], brief=False
    ) -> Asked:
        like = program.result_like(function, *arguments)
        how = (self._evaluation, brief, like)
        return Asked(function, self._fixed, arguments, donate, *how)


def placed_span(layout: Layout, span: Span) -> Any:
    """Return a span as the compiled program takes it."""

    def count(value: Any) -> jax.Array:
        return jax.device_put(np.asarray(value, np.int32))

    whole = program.Span(
        start=count(span.start),
        stop=count(span.stop),
        total=count(span.total),
        every=count(span.every),
        limits=count(span.limits),
        rule=span.rule,
        track=jax.tree.map(jnp.asarray, span.track),
        ends=span.ends,
    )
    return layout.place(whole, PartitionSpec())


def is_brief(job: Job) -> bool:
    """Say whether a pass of all clients over a batch is soon over on a CPU."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves((job.x, job.y)))
    return job.clients * rows_of_sample(job) * parameters <= _BRIEF


def first_failure(failure: program.Failure) -> Found | None:
    """Return (round, phase, client) of the first failure, if there was one."""
    if int(failure.client) == program.NOBODY:
        return None
    return int(failure.round), int(failure.phase), int(failure.client)


def layout_for(job: Job, clients_at_once: int | None, sweeps: bool = False) -> Layout:
    """Return how the clients of a job are spread over the devices.

    For large messages on the CPU one client at a time is faster, else all at once. One
    at a time it is, too, where a problem bounds the rows that are worked on.
    """
    algorithm = job.algorithm
    server = jax.eval_shape(algorithm.init_server, job.x, job.y)
    floats = sum(leaf.size for leaf in jax.tree.leaves(algorithm.worked_on(server)))
    large = jax.default_backend() == "cpu" and floats >= _LARGE_MESSAGE
    bounded = job.problem.rows_at_once is not None
    at_once = clients_at_once or (1 if large or bounded else None)
    shared = job.problem.model_devices
    devices = devices_for(job.participants, shared)
    return Layout(job.clients, job.participants, devices, at_once, sweeps, shared)
