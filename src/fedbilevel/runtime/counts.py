"""Counts what a run costs from shapes and the traced program, without running it.

Floats and bytes come from the shapes of messages and replies. Where everyone takes part
in every exchange, a vector that is still as it was when last sent is not sent again;
in a cohort drawn anew a client may have seen none of it. Oracle calls and
samples come from the traced local program of one client: every oracle call is a named
inner function there, loops are multiplied by their length, and a call on stacked points
counts once per point. Totals are over all participants.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel._types import Key
from fedbilevel.algorithms import Phase, Phases, Repeat, Turn, every_phase
from fedbilevel.runtime import _keys
from fedbilevel.runtime._traced import SAMPLES, Exchange, trace
from fedbilevel.runtime._walk import Times, drawn_times, plain_loop, walk
from fedbilevel.runtime.job import Job

__all__ = ["Ledger", "count"]


def count(job: Job, rounds: int) -> dict[str, Any]:
    """Return rounds, exchanges, traffic, oracle calls and samples of a run."""
    return Ledger(job).summary(job.key, rounds)


class Ledger:
    """The costs of a job; every exchange is traced once.

    They depend on the key only where lengths are random.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._setup = _Stage(job, _keys.SETUP, job.algorithm.setup())
        self._rounds = _Stage(job, _keys.ROUNDS, job.algorithm.phases())

    def each(self, key: Key, rounds: int) -> tuple[Counter[str], list[Counter[str]]]:
        """Return what one participant does in the setup, and in each round."""
        before, known = self._setup.tally(
            0, frozenset(), self._setup.drawn_lengths(key, 1)
        )
        lengths = self._rounds.drawn_lengths(key, rounds)
        each, seen = [], {}
        for index in range(rounds):
            # Rounds that start alike and are as long cost the same.
            long = tuple(int(drawn[index]) for drawn in lengths.values())
            alike = (index == 0, known, long)
            if alike not in seen:
                seen[alike] = self._rounds.tally(index, known, lengths)
            tally, known = seen[alike]
            each.append(tally)
        return before, each

    def cumulative(self, key: Key, rounds: int) -> dict[str, np.ndarray]:
        """Return exchanges, bytes sent and samples drawn, in all, after each round."""
        before, each = self.each(key, rounds)

        def total(names: tuple[str, ...]) -> np.ndarray:
            values = [sum(tally[name] for name in names) for tally in (before, *each)]
            return np.cumsum(np.asarray(values, np.int64))[1:]

        return {
            "exchanges": total(("exchanges",)),
            "bytes": total(("bytes_down", "bytes_up")) * self.job.participants,
            "samples": total(SAMPLES) * self.job.participants,
        }

    def blocks(self, key: Key, rounds: int) -> np.ndarray:
        """Return the blocks of a reply in every exchange, one after the other."""
        before = self._setup.blocks(key, 1)
        return np.asarray(before + self._rounds.blocks(key, rounds), np.int64)

    def summary(self, key: Key, rounds: int) -> dict[str, Any]:
        """Return the totals of a run."""
        # Two rounds at least: later ones may find known what the first had to send.
        before, each = self.each(key, max(rounds, 2))
        total = Counter(dict.fromkeys(each[1], 0))
        for tally in (before, *each[:rounds]):
            total.update(tally)
        n, exchanges = self.job.participants, total.pop("exchanges", 0)
        kinds = ("floats_down", "floats_up", "bytes_down", "bytes_up")
        later = each[1:]
        mean = {
            kind: sum(tally[kind] for tally in later) / len(later) for kind in kinds
        }
        return {
            "rounds": rounds,
            "participants": n,
            "exchanges": exchanges,
            **{kind: total.pop(kind, 0) * n for kind in kinds},
            "per_client_and_round": {
                kind: int(value) if value.is_integer() else value
                for kind, value in mean.items()
            },
            "samples": {name: total.pop(name, 0) * n for name in SAMPLES},
            "calls": {name: value * n for name, value in sorted(total.items())},
        }


class _Stage:
    """The phases of a round, or of the setup."""

    def __init__(self, job: Job, stage: int, phases: Phases) -> None:
        self.job, self.stage, self.phases = job, stage, phases
        self.server = job.algorithm.init_server(job.x, job.y)
        self.memory = job.algorithm.init_client(job.x, job.y)
        self.costs: dict[tuple[int, bool], Exchange] = {}

    def drawn_lengths(self, key: Key, turns: int) -> dict[int, np.ndarray]:
        """Return how long each random `Repeat` is in every round."""
        times, lengths = drawn_times(key, self.stage), {}

        def gather(phases: Phases, first: int, turns: int) -> None:
            for entry in phases:
                if isinstance(entry, Phase):
                    first += 1
                    continue
                if entry.random:
                    every = jax.vmap(lambda turn, e=entry, f=first: times(e, f, turn))
                    lengths[first] = np.asarray(every(jnp.arange(turns)))
                gather(entry.phases, first, turns * entry.times)
                first += len(every_phase(entry.phases))

        gather(self.phases, 0, turns)
        return lengths

    def tally(
        self, index: int, known: frozenset[int], lengths: dict[int, np.ndarray]
    ) -> tuple[Counter[str], frozenset[int]]:
        """Add up one round from what clients know; return also what they know then."""
        tally: Counter[str] = Counter()

        def visit(known: frozenset[int], phase: Phase, number: int, turn: int):
            cost = self._cost(phase, number, turn == 0)
            tally.update(cost.calls)
            if self.job.algorithm.pools:
                return known
            tally.update(cost.traffic(known))
            # A cohort is drawn anew for every exchange: whoever comes may know nothing.
            everyone = self.job.participants == self.job.sites
            return cost.known_after(known) if everyone else frozenset()

        times = _known_times(lengths)
        known = walk(self.phases, known, index, visit, plain_loop, times)
        return tally, known

    def blocks(self, key: Key, turns: int) -> list[int]:
        """Return the blocks of a reply in every exchange, one after the other."""
        found: list[int] = []

        def visit(carry: None, phase: Phase, number: int, turn: int) -> None:
            found.append(self._cost(phase, number, turn == 0).blocks)

        times = _known_times(self.drawn_lengths(key, turns))
        for index in range(turns):
            walk(self.phases, None, index, visit, plain_loop, times)
        return found

    def _cost(self, phase: Phase, number: int, first: bool) -> Exchange:
        if (number, first) not in self.costs:
            key = _keys.client_key(self.job.key, self.stage, number, 0)
            turn = Turn(key, 0 if first else 1)
            self.costs[number, first] = trace(
                self.job, phase, self.server, self.memory, turn
            )
        return self.costs[number, first]


def _known_times(lengths: dict[int, np.ndarray]) -> Times:
    """Return how often a `Repeat` runs, given how long the random ones are."""

    def times(repeat: Repeat, first: int, turn: int) -> int:
        return int(lengths[first][turn]) if repeat.random else repeat.times

    return times
