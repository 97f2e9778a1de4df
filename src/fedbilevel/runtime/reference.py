"""The slow runtime: plain Python loops, nothing compiled, every failure has a place.

It computes the same numbers as the simulator and is meant to be read and to debug with.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel.algorithms import Phase, Phases, Turn, every_phase
from fedbilevel.channels import weighted_mean
from fedbilevel.errors import StageError
from fedbilevel.runtime import _keys
from fedbilevel.runtime._exchange import (
    Link,
    absorb,
    client_measurement,
    combine_measurements,
    reduce_replies,
)
from fedbilevel.runtime._walk import drawn_times, plain_loop, walk
from fedbilevel.runtime.checkpoint import fingerprint
from fedbilevel.runtime.driver import Found
from fedbilevel.runtime.job import (
    ABSENT,
    RENEWED,
    Job,
    State,
    start_kept,
    start_state,
)

__all__ = ["ReferenceRuntime"]


class ReferenceRuntime:
    """Runs one client after the other, operation by operation."""

    name = "reference"
    compile_seconds = 0.0

    def __init__(self, job: Job) -> None:
        self.job = job

    def mark(self, every: int) -> str:
        """Return the fingerprint of the job."""
        return fingerprint(self.job, every)

    def blank(self) -> State:
        """Return the state before the first exchange."""
        return start_state(self.job)

    def start(self) -> tuple[State, Found | None]:
        """Return the state before round 0, after any setup phases."""
        phases = self.job.algorithm.setup()
        with jax.disable_jit():
            return self._all_phases(
                phases, _keys.SETUP, 0, (start_state(self.job), None)
            )

    def advance(self, state: State, start: int, stop: int, total: int, every: int):
        """Run rounds; return state, rows, and a failure (round, phase, client)."""
        rows, carry = [], (state, None)
        with jax.disable_jit():
            for index in range(start, stop):
                phases = self.job.algorithm.phases()
                carry = self._all_phases(phases, _keys.ROUNDS, index, carry)
                if (index + 1) % every == 0 or index + 1 == total:
                    rows.append(self._measure(carry[0], index))
        names = sorted(rows[0]) if rows else ()
        table = {name: np.asarray([row[name] for row in rows]) for name in names}
        return carry[0], table, carry[1]

    def fetch(self, state: State) -> State:
        """Return the state on the host."""
        return jax.tree.map(np.asarray, state)

    def load(self, state: State) -> State:
        """Take a fetched state."""
        return jax.tree.map(jnp.asarray, state)

    def _all_phases(
        self, phases: Phases, stage: int, index: int, begin: tuple[State, Found | None]
    ) -> tuple[State, Found | None]:
        shown = index if stage == _keys.ROUNDS else -1

        def visit(carry, phase: Phase, number: int, turn: int):
            state, failure = carry
            state, bad = self._exchange(state, phase, (stage, number), turn, shown)
            fresh = failure is None and bad is not None
            return state, (shown, number, bad) if fresh else failure

        times = drawn_times(self.job.key, stage)
        return walk(phases, begin, index, visit, plain_loop, times)

    def _exchange(
        self, state: State, phase: Phase, where: tuple[int, int], turn: int, shown: int
    ) -> tuple[State, int | None]:
        job, kept, replies, bad = self.job, state.clients, [], []
        link = Link.of(job, phase, where)
        message = self._stage(phase, "down", shown, None, phase.down, state.server)
        chosen, renewed = self._participants(state, where, turn)
        for client in chosen:
            now = Turn(_keys.client_key(job.key, *where, client), turn)
            one = jax.tree.map(lambda leaf, k=client: leaf[k], kept)
            one = start_kept(job) if client in renewed else one
            arguments = (message, one, now, client)
            one, reply, finite = self._stage(
                phase, "local", shown, client, link.answer, *arguments
            )
            kept = jax.tree.map(
                lambda leaf, new, k=client: leaf.at[k].set(new), kept, one
            )
            replies.append(reply)
            if not bool(finite):
                bad.append(client)
        weights = job.data.weights[jnp.asarray(chosen)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)
        mean = reduce_replies(job, stacked, weights, _alone, _alone)
        arguments = (job, phase, state.server, mean)
        server = self._stage(phase, "up", shown, None, absorb, *arguments)
        done = None if state.exchanges is None else state.exchanges + 1
        return State(server, kept, done), min(bad, default=None)

    def _participants(
        self, state: State, where: tuple[int, int], index: int
    ) -> tuple[list[int], list[int]]:
        """Return who works in this exchange, and who of them begins anew."""
        clients, count = self.job.sites, self.job.participants
        if self.job.attendance is not None:
            came = np.asarray(self.job.attendance[state.exchanges])
            chosen, renewed = np.nonzero(came > ABSENT)[0], np.nonzero(came == RENEWED)
            return chosen.tolist(), renewed[0].tolist()
        if count == clients:
            return list(range(clients)), []
        drawn = _keys.draw_cohort(self.job.key, *where, index, clients, count)
        return [int(client) for client in drawn], []

    def _measure(self, state: State, index: int) -> dict[str, np.ndarray]:
        job, values = self.job, []
        last = every_phase(job.algorithm.phases())[-1]
        for client in range(job.sites):
            own = jax.tree.map(lambda leaf, k=client: leaf[k], state.clients.own)
            arguments = (job, client, state.server, own)
            values.append(
                self._stage(
                    last, "measure", index, client, client_measurement, *arguments
                )
            )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
        weights = job.data.weights[: job.sites]
        mean = weighted_mean(stacked, weights, _alone)
        columns = combine_measurements(job, state.server, mean)
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


def _alone(value: PyTree) -> PyTree:
    """Return what all devices hold: there is one."""
    return value
