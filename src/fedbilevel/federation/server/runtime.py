"""The server's side of a federation: runs the phases, exchange by exchange.

It is a runtime like the simulator, and makes the same numbers from the same key. Rows,
memories and private blocks are at the sites; here are the server's state, and the
record of participants of each exchange, from which the simulator can replay the run.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, UInt8

from fedbilevel.algorithms import Phase
from fedbilevel.channels import weighted_mean
from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.ledger import ServerReleases
from fedbilevel.federation.server.exchanges import Exchanges, Question, Stand
from fedbilevel.federation.server.guard import require_finite
from fedbilevel.federation.server.measuring import conclude, measure, willing
from fedbilevel.federation.server.requests import Answers
from fedbilevel.federation.server.roster import Roster
from fedbilevel.federation.wire import Header
from fedbilevel.runtime import keys
from fedbilevel.runtime.contract import Advance, Found, Runtime, Span
from fedbilevel.runtime.driver import rounds_in_python
from fedbilevel.runtime.exchange import asked_clients, server_columns
from fedbilevel.runtime.job import ABSENT, PRESENT, RENEWED, Job, start_server
from fedbilevel.runtime.phase_loop import phases_in_python
from fedbilevel.runtime.privacy import blocks_of, is_noisy, privacy_of_releases
from fedbilevel.runtime.stopping import Stopping

_DECLINED = {"measure", "measured", "limit"}  # reasons of sites that will not say


class Federated(eqx.Module):
    """The state of a federation's server; client states are not here.

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


class FederationRuntime(Runtime):
    """Runs rounds on the sites of a roster.

    `job` has no rows of anybody: see `blind_job`. `metrics` names what the sites
    measure. `left_out` is called with every reply that was not taken. `concludes` names
    what sites may report of a finished run, each a number or texts. `releases` counts
    what was asked for under noise. `made` gets every exchange: its number, its seconds,
    and its participants. Columns are what sites report in single numbers: the norm of
    the mean of gradients, which stay where they are, is none of them.
    """

    name = "flower"

    def __init__(
        self,
        job: Job,
        roster: Roster,
        metrics: tuple[str, ...],
        left_out: Callable[[dict[str, Any]], None] = lambda entry: None,
        concludes: Mapping[str, str] | None = None,
        releases: ServerReleases | None = None,
        made: Callable[[dict[str, Any]], None] = lambda exchange: None,
    ) -> None:
        self.job, self.roster, self.made = job, roster, made
        self.releases = releases or ServerReleases()
        self._named_columns = False
        self._blocks = blocks_of(job) if is_noisy(job) else {}
        self.exchanges = Exchanges(job, roster, metrics, left_out)
        self._concludes = concludes or {}
        self._durable = np.zeros(roster.clients, np.int64)

    def check(self, stopping: Stopping) -> None:
        """Raise where measurements are to end a run that no site measures."""
        if stopping.looks and not willing(self.exchanges, "measures"):
            raise InvalidInputError(
                f"{stopping.metric} is to end the run, but no site measures: with "
                "noise none may, and with masks its operator must allow it (`node "
                "--measure scalars`). Leave out target and patience, or let sites "
                "measure."
            )

    def fingerprint(self, every: int) -> str:
        """Return the name of the federation, which is its own."""
        return f"{self.roster.identity.federation} {every}"

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
        return phases_in_python(self.job, keys.SETUP, 0, self.blank(), self._exchange)

    def advance(self, state: Federated, span: Span) -> Advance:
        """Run some rounds."""

        def one_round(state: Federated, index: int) -> tuple[Federated, Found | None]:
            # The start of a round is kept before it, if anything is kept at all.
            self._durable = state.accepted
            where = (self.job, keys.ROUNDS, index)
            return phases_in_python(*where, state, self._exchange)

        method = self.job.algorithm
        return rounds_in_python(span, state, one_round, self._measure, method)

    def fetch(self, state: Federated) -> Federated:
        """Return the state; it is on the host already."""
        return state

    load = fetch

    def conclude(self, state: Federated, rounds: int) -> dict[int, dict[str, Any]]:
        """Return what clients have to say of a run that ended after so many rounds.

        Asked once, when it is known that the run ends here.
        """
        if not willing(self.exchanges, "concludes"):
            return {}
        where = self._point(state, "conclude", rounds)
        # The run is over, whatever was wrong with what they report.
        answers = self._answered(lambda: conclude(*where, self._concludes), bool)
        return dict(sorted(answers.taken.items()))

    def _exchange(
        self,
        state: Federated,
        phase: Phase,
        where: tuple[int, int],
        index: int,
        shown: int,
    ) -> tuple[Federated, int | None]:
        """Make one exchange; also return a client, if all replies were not finite."""
        exchanges, number = self.exchanges, len(state.attendance) + 1
        header = self.roster.header("exchange", round=shown + 1, exchange=number)
        asked = asked_clients(self.job, phase, where, index).tolist()
        question = exchanges.question(header, state.server, where, index, asked)
        began = time.monotonic()
        while True:
            answers = self._exchanged(question, state)
            state = replace(state, traffic=state.traffic + answers.traffic)
            reasons = {refusal.reason for refusal in answers.refused.values()}
            if not answers.taken and reasons == {"not-finite"}:
                return state, min(answers.refused)
            if exchanges.enough(answers, asked):
                exchanges.settled()
                made = {"exchange": number, "seconds": time.monotonic() - began}
                made |= {"took_part": sorted(answers.taken), "asked": len(asked)}
                self.made(made)
                return self._take_in(state, question, answers), None
            exchanges.pause(answers)

    def _exchanged(self, question: Question, state: Federated) -> Answers:
        """Ask once; what is asked for under noise is counted, whatever comes of it."""
        stand = self._stand(state)
        if not is_noisy(self.job):
            return self.exchanges.exchange(question, stand)
        blocks = self._blocks[question.link.where]
        self.releases.ask(blocks, len(question.asked))
        answers = self.exchanges.exchange(question, stand)
        taken = len(answers.taken)
        self.releases.settle(blocks, len(question.asked), taken, answers.came)
        return answers

    def privacy_spent(self) -> dict[str, float]:
        """Return epsilon and delta of all that was released; nothing without noise."""
        return privacy_of_releases(self.job, self.releases.counts)

    def _take_in(
        self, state: Federated, question: Question, answers: Answers
    ) -> Federated:
        """Take in the replies and record the participants."""
        share = self.exchanges.share(list(answers.taken))
        came = question.present(answers.taken)
        turn = replace(question.turn, present=came, weight=share)
        before = jax.tree.map(jnp.asarray, state.server)
        server = question.link.absorb(before, answers.reply, turn)
        require_finite(server, question.header, "the model")
        row = np.full((1, self.roster.clients), ABSENT, np.uint8)
        for client, (_, renewed) in answers.taken.items():
            row[0, client] = RENEWED if renewed else PRESENT
        return Federated(
            jax.tree.map(np.asarray, server),
            np.where(row[0] > ABSENT, question.header.exchange, state.accepted),
            np.concatenate([state.attendance, row]),
            state.traffic,
        )

    def _stand(self, state: Federated) -> Stand:
        return lambda client: (int(state.accepted[client]), int(self._durable[client]))

    def _point(
        self, state: Federated, kind: str, rounds: int
    ) -> tuple[Exchanges, Header, PyTree, Stand]:
        """Return what asks sites about the server's point after so many rounds."""
        header = self.roster.header(kind, round=rounds, exchange=len(state.attendance))
        return self.exchanges, header, state.server, self._stand(state)

    def _answered(
        self, ask: Callable[[], Answers], ends: Callable[[set[str]], object]
    ) -> Answers:
        """Ask until somebody answers, or refuses for reasons that end it."""
        while True:
            answers = ask()
            reasons = {refusal.reason for refusal in answers.refused.values()}
            if answers.taken or ends(reasons):
                return answers
            self.exchanges.pause(answers)

    def _measure(self, state: Federated, index: int) -> dict[str, np.ndarray]:
        """Let the sites measure, and average what they found."""
        exchanges = self.exchanges
        names = sorted(exchanges.measurement)
        clients = willing(exchanges, "measures")
        if not self._named_columns:
            self._named_columns = True
            self.roster.report(
                f"{len(clients)} of {self.roster.clients} clients measure "
                f"{', '.join(names)}; norms of gradients are not measured, since "
                "gradients stay at their sites"
            )
        answers = Answers()
        if clients:
            where = self._point(state, "measure", index + 1)
            answers = self._answered(lambda: measure(*where), _DECLINED.intersection)
        mean = dict.fromkeys(names, np.nan)
        if answers.taken:
            clients = sorted(answers.taken)
            values = [answers.taken[client] for client in clients]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
            mean = weighted_mean(stacked, exchanges.weights(clients))
        found = {**server_columns(self.job, state.server), **mean}
        return {name: np.asarray(value) for name, value in found.items()}
