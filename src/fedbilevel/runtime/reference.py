"""The slow runtime: plain Python loops, nothing compiled, every failure has a place.

It computes the same numbers as the simulator and is meant to be read and to debug with.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel.algorithms import Phase, Turn
from fedbilevel.errors import StageError
from fedbilevel.runtime import _keys
from fedbilevel.runtime._exchange import (
    client_measurements,
    combine_measurements,
    weighted_mean,
)
from fedbilevel.runtime.driver import Found
from fedbilevel.runtime.job import Job, State, start_state

__all__ = ["ReferenceRuntime"]


class ReferenceRuntime:
    """Runs one client after the other, operation by operation."""

    name = "reference"
    compile_seconds = 0.0

    def __init__(self, job: Job) -> None:
        self.job = job

    def start(self) -> tuple[State, Found | None]:
        """Return the state before round 0, after any setup phases."""
        state, failure = start_state(self.job), None
        with jax.disable_jit():
            for number, phase in enumerate(self.job.algorithm.setup()):
                where = (_keys.SETUP, number)
                state, bad = self._exchange(state, phase, where, 0)
                if bad is not None and failure is None:
                    failure = (-1, number, bad)
        return state, failure

    def advance(self, state: State, start: int, stop: int, total: int, every: int):
        """Run rounds; return state, rows, and a failure (round, phase, client)."""
        rows, failure = [], None
        with jax.disable_jit():
            for index in range(start, stop):
                for number, phase in enumerate(self.job.algorithm.phases()):
                    where = (_keys.ROUNDS, number)
                    state, bad = self._exchange(state, phase, where, index)
                    if bad is not None and failure is None:
                        failure = (index, number, bad)
                if (index + 1) % every == 0 or index + 1 == total:
                    rows.append(self._measure(state, index))
        names = sorted(rows[0]) if rows else ()
        table = {name: np.asarray([row[name] for row in rows]) for name in names}
        return state, table, failure

    def fetch(self, state: State) -> State:
        """Return the state on the host."""
        return jax.tree.map(np.asarray, state)

    def load(self, state: State) -> State:
        """Take a fetched state."""
        return jax.tree.map(jnp.asarray, state)

    def _exchange(
        self, state: State, phase: Phase, where: tuple[int, int], index: int
    ) -> tuple[State, int | None]:
        job, clients, replies, bad = self.job, state.clients, [], []
        chosen = self._participants(where, index)
        message = self._stage(phase, "down", index, None, phase.down, state.server)
        for client in chosen:
            turn = Turn(_keys.client_key(job.key, *where, client), index)
            own = jax.tree.map(lambda leaf, k=client: leaf[k], clients)
            arguments = (message, own, job.oracle(client), turn)
            own, reply = self._stage(
                phase, "local", index, client, phase.local, *arguments
            )
            clients = jax.tree.map(
                lambda leaf, new, k=client: leaf.at[k].set(new), clients, own
            )
            replies.append(reply)
            if not bool(_tree.all_finite(reply)):
                bad.append(client)
        weights = job.data.weights[jnp.asarray(chosen)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)
        mean = weighted_mean(stacked, weights, lambda value: value)
        server = self._stage(phase, "up", index, None, phase.up, state.server, mean)
        return State(server, clients), min(bad, default=None)

    def _participants(self, where: tuple[int, int], index: int) -> list[int]:
        clients, count = self.job.data.clients, self.job.participants
        if count == clients:
            return list(range(clients))
        drawn = _keys.draw_cohort(self.job.key, *where, index, clients, count)
        return [int(client) for client in drawn]

    def _measure(self, state: State, index: int) -> dict[str, np.ndarray]:
        job, point = self.job, self.job.algorithm.point(state.server)
        last, values = job.algorithm.phases()[-1], []
        for client in range(job.data.clients):
            arguments = (job.oracle(client), point.x, point.y)
            measure = client_measurements
            values.append(
                self._stage(last, "measure", index, client, measure, *arguments)
            )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
        mean = weighted_mean(stacked, job.data.weights, lambda value: value)
        columns = combine_measurements(job, point.x, point.y, mean)
        return {name: np.asarray(value) for name, value in columns.items()}

    def _stage(
        self, phase: Phase, stage: str, index: int, client: int | None, function, *args
    ) -> PyTree:
        try:
            return function(*args)
        except Exception as error:
            who = "" if client is None else f", client {client}"
            raise StageError(
                f"round {index + 1}, phase '{phase.name}', stage '{stage}'{who}: "
                f"{type(error).__name__}: {error}"
            ) from error
