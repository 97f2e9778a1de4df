"""The slow runtime: plain Python loops, nothing compiled, every failure has a place.

It computes the same numbers as the simulator and is meant to be read and to debug with.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedbilevel.algorithms import Phase, every_phase
from fedbilevel.channels import weighted_mean
from fedbilevel.errors import ClientStageError, StageError
from fedbilevel.runtime import exchange, keys
from fedbilevel.runtime.contract import Advance, Found, Runtime, Span
from fedbilevel.runtime.driver import rounds_in_python
from fedbilevel.runtime.job import ABSENT, PRESENT, Job, State, is_renewed
from fedbilevel.runtime.phase_loop import phases_in_python
from fedbilevel.runtime.progress import RUNNING, report


class ReferenceRuntime(Runtime):
    """Runs one client after the other, operation by operation."""

    name = "reference"

    def __init__(self, job: Job) -> None:
        self.job = job

    def start(self) -> tuple[State, Found | None]:
        """Return the state before round 0, after any setup phases."""
        report(RUNNING)
        with jax.disable_jit():
            blank = self.blank()
            return phases_in_python(self.job, keys.SETUP, 0, blank, self._exchange)

    def advance(self, state: State, span: Span) -> Advance:
        """Run some rounds."""

        def one_round(state: State, index: int) -> tuple[State, Found | None]:
            where = (self.job, keys.ROUNDS, index)
            return phases_in_python(*where, state, self._exchange)

        with jax.disable_jit():
            return rounds_in_python(
                span, state, one_round, self._measure, self.job.algorithm
            )

    def fetch(self, state: State) -> State:
        """Return the state on the host."""
        return jax.tree.map(np.asarray, state)

    def load(self, state: State) -> State:
        """Take a fetched state."""
        return jax.tree.map(jnp.asarray, state)

    def _exchange(
        self, state: State, phase: Phase, where: tuple[int, int], index: int, shown: int
    ) -> tuple[State, int | None]:
        job, link = self.job, exchange.Link.of(self.job, phase, where)
        ids = exchange.asked_clients(job, phase, where, index)
        asked, everybody = ids.tolist(), jnp.ones(ids.shape, bool)
        found = exchange.attendance(job, state, where, index, ids)
        came = [PRESENT] * len(asked) if found is None else found.tolist()
        turn = exchange.server_turn(job, where, index, ids, everybody)
        sent = self._stage(phase, "down", shown, None, link.sent, state.server, turn)
        kept, bad = state.clients, []
        replies: dict[int, PyTree] = {}
        for place, client in enumerate(asked):
            if came[place] == ABSENT:
                continue
            one = jax.tree.map(lambda leaf, k=client: leaf[k], kept)
            one = exchange.start_kept(job) if is_renewed(came[place]) else one
            mine = keys.client_turn(job.key, where, client, index)
            arguments = (exchange.for_place(sent, place), one, mine, client)
            at = (phase, "local", shown, client)
            one, replies[place], finite = self._stage(*at, link.answer, *arguments)
            kept = jax.tree.map(
                lambda leaf, new, k=client: leaf.at[k].set(new), kept, one
            )
            if not bool(finite):
                bad.append(client)
        # In the place of an absent client any reply will do: it weighs nothing.
        somebody = next(iter(replies.values()))
        filled = [replies.get(place, somebody) for place in range(len(asked))]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *filled)
        present = jnp.asarray(came) > ABSENT
        weights = jnp.where(present, job.data.weights[ids], 0)
        reply = link.reduced(stacked, weights)
        share = jnp.sum(weights) / jnp.sum(job.data.weights)
        turn = exchange.server_turn(job, where, index, ids, present, share)
        arguments = (state.server, reply, turn)
        server = self._stage(phase, "up", shown, None, link.absorb, *arguments)
        exchanges = None if state.exchanges is None else state.exchanges + 1
        return State(server, kept, exchanges), min(bad, default=None)

    def _measure(self, state: State, index: int) -> dict[str, np.ndarray]:
        job, values = self.job, []
        last = every_phase(job.algorithm.phases())[-1]
        for client in range(job.data.clients):
            own = jax.tree.map(lambda leaf, k=client: leaf[k], state.clients.own)
            at = (last, "measure", index, client, exchange.client_measurement)
            values.append(self._stage(*at, job, client, state.server, own))
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
        mean = weighted_mean(stacked, job.data.weights)
        columns = exchange.combine_measurements(job, state.server, mean)
        return {name: np.asarray(value) for name, value in columns.items()}

    def _stage(
        self, phase: Phase, stage: str, index: int, client: int | None, function, *args
    ) -> PyTree:
        try:
            return function(*args)
        except Exception as error:
            where = f"round {index + 1}, phase '{phase.name}', stage '{stage}'"
            what = f": {type(error).__name__}: {error}"
            if client is None:
                raise StageError(f"{where}{what}") from error
            raise ClientStageError(client, what, f"{where}, ") from error
