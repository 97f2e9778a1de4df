"""The server's side of a federation: walks the phases, exchange by exchange.

It is a runtime like the simulator, and makes the same numbers from the same key. Rows,
memories and private blocks are at the sites; here are the server's state, and the
record of who took part in each exchange, from which the simulator can replay the run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, UInt8

from fedbilevel.algorithms import Phase, Phases
from fedbilevel.channels import weighted_mean
from fedbilevel.runtime import _keys
from fedbilevel.runtime._exchange import absorb, combine_measurements
from fedbilevel.runtime._walk import drawn_times, plain_loop, walk
from fedbilevel.runtime.driver import Found
from fedbilevel.runtime.federation.asking import Answers
from fedbilevel.runtime.federation.conversation import Conversation
from fedbilevel.runtime.federation.roster import Roster
from fedbilevel.runtime.job import ABSENT, PRESENT, RENEWED, Job, start_server

__all__ = ["Federated", "FederationRuntime"]


class Federated(eqx.Module):
    """What the server of a federation carries; what clients keep is not here.

    `accepted` is the last exchange of each client that was taken in, `attendance` has a
    row per exchange. `traffic` are bytes down, bytes up, and of both those that are not
    leaves, in exchanges; measurements are not counted.
    """

    server: PyTree
    accepted: Int[np.ndarray, " clients"]
    attendance: UInt8[np.ndarray, "exchanges clients"]
    traffic: Int[np.ndarray, "3"]

    def joined(self) -> PyTree:
        """Return the server's state; private blocks stay where they are."""
        return self.server


class FederationRuntime:
    """Runs rounds on the sites of a roster.

    `job` has no rows of anybody: see `fedbilevel.runtime.federation.plan`. `mark` tells
    the federation apart from others, `metrics` names what the sites measure. `left_out`
    is called with every reply that was not taken.
    """

    name = "flower"
    compile_seconds = 0.0

    def __init__(
        self,
        job: Job,
        roster: Roster,
        mark: str,
        metrics: tuple[str, ...],
        left_out: Callable[[dict[str, Any]], None] = lambda entry: None,
    ) -> None:
        self.job, self.roster, self._mark = job, roster, mark
        self.conversation = Conversation(job, roster, metrics, left_out)
        self.conclusions: dict[int, dict[str, Any]] = {}
        self._durable = np.zeros(roster.clients, np.int64)

    def mark(self, every: int) -> str:
        """Return the fingerprint of the run."""
        return f"{self._mark} {every}"

    def blank(self) -> Federated:
        """Return the state before the first exchange."""
        count = self.roster.clients
        return Federated(
            jax.tree.map(np.asarray, start_server(self.job)),
            np.zeros(count, np.int64),
            np.zeros((0, count), np.uint8),
            np.zeros(3, np.int64),
        )

    def start(self) -> tuple[Federated, Found | None]:
        """Return the state before round 0, after any setup phases."""
        phases = self.job.algorithm.setup()
        return self._all_phases(phases, _keys.SETUP, 0, (self.blank(), None))

    def advance(self, state: Federated, start: int, stop: int, total: int, every: int):
        """Run rounds; return state, rows, and a failure (round, phase, client)."""
        rows, failure = [], None
        for index in range(start, stop):
            # What a round starts from is kept before it, if anything is kept at all.
            self._durable = state.accepted
            phases = self.job.algorithm.phases()
            begin = (state, None)
            state, failure = self._all_phases(phases, _keys.ROUNDS, index, begin)
            if failure is not None:
                break
            if (index + 1) % every == 0 or index + 1 == total:
                rows.append(self._measure(state, index, final=index + 1 == total))
        names = sorted(rows[0]) if rows else ()
        table = {name: np.asarray([row[name] for row in rows]) for name in names}
        return state, table, failure

    def fetch(self, state: Federated) -> Federated:
        """Return the state; it is on the host already."""
        return state

    def load(self, state: Federated) -> Federated:
        """Take a state."""
        return state

    def _all_phases(
        self,
        phases: Phases,
        stage: int,
        index: int,
        begin: tuple[Federated, Found | None],
    ) -> tuple[Federated, Found | None]:
        shown = index if stage == _keys.ROUNDS else -1

        def visit(carry, phase: Phase, number: int, turn: int):
            state, failure = carry
            if failure is not None:
                return carry
            state, bad = self._exchange(state, phase, (stage, number), turn, shown)
            return state, None if bad is None else (shown, number, bad)

        times = drawn_times(self.job.key, stage)
        return walk(phases, begin, index, visit, plain_loop, times)

    def _exchange(
        self,
        state: Federated,
        phase: Phase,
        where: tuple[int, int],
        turn: int,
        shown: int,
    ) -> tuple[Federated, int | None]:
        """Make one exchange; also return a client, if all replies were not finite."""
        message = jax.tree.map(np.asarray, phase.down(state.server))
        header = replace(
            self.conversation.header("exchange", shown, len(state.attendance) + 1),
            stage=where[0],
            phase=where[1],
            name=phase.name,
            turn=turn,
        )
        chosen = self._participants(where, turn)
        while True:
            answers = self.conversation.exchange(
                header, phase, message, chosen, self._stand(state)
            )
            state = replace(state, traffic=state.traffic + answers.traffic)
            reasons = {refusal.reason for refusal in answers.refused.values()}
            if not answers.taken and reasons == {"not-finite"}:
                return state, min(answers.refused)
            if len(answers.taken) >= min(self.roster.terms.minimum, len(chosen)):
                return self._take_in(state, phase, answers, header.exchange), None
            self.conversation.pause(answers)

    def _take_in(
        self, state: Federated, phase: Phase, answers: Answers, exchange: int
    ) -> Federated:
        """Average the replies and record who took part."""
        server = absorb(self.job, phase, state.server, answers.mean)
        row = np.full((1, self.roster.clients), ABSENT, np.uint8)
        for client, (_, renewed) in answers.taken.items():
            row[0, client] = RENEWED if renewed else PRESENT
        return Federated(
            jax.tree.map(np.asarray, server),
            np.where(row[0] > ABSENT, exchange, state.accepted),
            np.concatenate([state.attendance, row]),
            state.traffic,
        )

    def _participants(self, where: tuple[int, int], turn: int) -> list[int]:
        clients, count = self.roster.clients, self.job.participants
        if count == clients:
            return list(range(clients))
        drawn = _keys.draw_cohort(self.job.key, *where, turn, clients, count)
        return [int(client) for client in drawn]

    def _stand(self, state: Federated):
        def stand(client: int) -> tuple[int, int]:
            return int(state.accepted[client]), int(self._durable[client])

        return stand

    def _measure(self, state: Federated, index: int, *, final: bool) -> dict[str, Any]:
        """Let the sites measure, and average what they found."""
        header = self.conversation.header("measure", index, len(state.attendance))
        header = replace(header, info={"final": True} if final else None)
        while True:
            answers = self.conversation.measure(
                header, state.server, self._stand(state)
            )
            if answers.taken:
                break
            self.conversation.pause(answers)
        clients = sorted(answers.taken)
        values = [answers.taken[client][0] for client in clients]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
        weights = self.conversation.weights(clients)
        mean = weighted_mean(stacked, weights, lambda value: value)
        if final:
            self.conclusions = {client: answers.taken[client][1] for client in clients}
        columns = combine_measurements(self.job, state.server, mean)
        return {name: np.asarray(value) for name, value in columns.items()}
