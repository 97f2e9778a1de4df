"""The fast runtime: one compiled program on all devices, also of other processes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime import _program
from fedbilevel.runtime._compile import compiled
from fedbilevel.runtime._layout import Layout, devices_for
from fedbilevel.runtime.checkpoint import fingerprint
from fedbilevel.runtime.driver import Found
from fedbilevel.runtime.job import Job, State, start_state

__all__ = ["SimulatorRuntime"]

# From about this many floats in a message on, one client at a time is faster on the CPU
# than all at once (softmax regression, 16 clients: 97 us a client step against 101 at
# 2,816 floats, 423 against 481 at 17,248; at 1,430 floats it is 206 against 123).
_LARGE_MESSAGE = 2048


class SimulatorRuntime:
    """Runs rounds inside one program; `clients_at_once` bounds memory per device."""

    name = "simulator"

    def __init__(self, job: Job, clients_at_once: int | None = None) -> None:
        if clients_at_once is not None and clients_at_once < 1:
            raise InvalidInputError(
                f"clients_at_once={clients_at_once}: at least 1, or None to choose."
            )
        self.job = job
        devices = devices_for(job.participants)
        at_once = clients_at_once or default_at_once(job)
        self.layout = Layout(job.sites, job.participants, devices, at_once)
        self.compile_seconds = 0.0
        self._fixed = (self.layout, self.layout.place_job(job))
        self._varying = (self._fixed[1].algorithm, self._fixed[1].key)

    def mark(self, every: int) -> str:
        """Return the fingerprint of the job."""
        return fingerprint(self.job, every)

    def blank(self) -> State:
        """Return the state before the first exchange."""
        return start_state(self.job)

    def start(self) -> tuple[State, Found | None]:
        """Return the state before round 0, after any setup phases."""
        state = self.layout.place_state(start_state(self.job))
        if not self.job.algorithm.setup():
            return state, None
        program = self._compile(_program.setup, self._varying, state, donate=(1,))
        state, failure = program(self._fixed, self._varying, state)
        return state, first_failure(failure)

    def advance(self, state: State, start: int, stop: int, total: int, every: int):
        """Run rounds; return state, rows, and a failure (round, phase, client)."""
        span = _program.Span(
            *(jnp.asarray(n, jnp.int32) for n in (start, stop, total, every))
        )
        span = self.layout.place(span, PartitionSpec())
        arguments = (self._varying, state, span)
        program = self._compile(_program.advance, *arguments, donate=(1,))
        state, (rows, used, failure) = program(self._fixed, *arguments)
        count = int(used)
        table = {name: np.asarray(column)[:count] for name, column in rows.items()}
        return state, table, first_failure(failure)

    def fetch(self, state: State) -> State:
        """Return the state on the host, one entry per client."""
        return jax.tree.map(np.asarray, self.layout.fetch_state(state))

    def load(self, state: State) -> State:
        """Put a fetched state back on the devices."""
        return self.layout.place_state(jax.tree.map(jnp.asarray, state))

    def _compile(self, function, *arguments, donate: tuple[int, ...]):
        program, seconds = compiled(function, self._fixed, arguments, donate)
        self.compile_seconds += seconds
        return program


def first_failure(failure: _program.Failure) -> Found | None:
    """Return (round, phase, client) of the first failure, if there was one."""
    if int(failure.client) == _program.NOBODY:
        return None
    return int(failure.round), int(failure.phase), int(failure.client)


def default_at_once(job: Job) -> int | None:
    """Return 1 for large messages on the CPU, else None: all at once."""
    server = jax.eval_shape(job.algorithm.init_server, job.x, job.y)
    floats = sum(leaf.size for leaf in jax.tree.leaves(server))
    large = jax.default_backend() == "cpu" and floats >= _LARGE_MESSAGE
    return 1 if large else None
