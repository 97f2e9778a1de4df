"""Counts what a run costs from shapes and the traced program, without running it.

Floats and bytes come from the shapes of messages and replies. Where everyone takes part
in every exchange, a vector that is still as it was when last sent is not sent again;
in a cohort drawn anew a client may have seen none of it. Oracle calls and samples come
from the traced local program of one client (`traced_calls`). Totals are over all
participants. All rows of a client are as many samples; where clients of unequal sizes
are drawn, as many as those of the mean client.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from fedbilevel._types import Key
from fedbilevel.algorithms import Phase, Phases, Repeat, ServerTurn, every_phase
from fedbilevel.channels import count_blocks
from fedbilevel.problem import ClientData, Data, PooledData
from fedbilevel.runtime import keys, phase_loop
from fedbilevel.runtime.exchange import Link, common_leaves, for_place, server_turn
from fedbilevel.runtime.job import Job
from fedbilevel.runtime.sampling import Replies, counted_replies
from fedbilevel.runtime.traced_calls import SAMPLES, Bounds, count_calls
from fedbilevel.startup import stored_traces
from fedbilevel.startup.stored_traces import name_of

_Turn = Callable[[], ServerTurn]
_SOON = 10**6  # rows times parameters that are looked at in a millisecond
_TYPICAL = 8  # rounds whose mean is that of a run, where lengths are random
_BLOCK = 1024  # turns whose branches are found together


class ExchangeCost(NamedTuple):
    """The cost of one exchange for a participant.

    `down` lists the leaves of what is sent: which leaf of the server's state each is,
    if any, its floats and bytes. `replaced` are the leaves of that state which change.
    `up` are the floats and bytes that travel back, `blocks` those of the reply.
    `bounds` says which of the calls are a bound alone.
    """

    calls: dict[str, float]
    down: list[tuple[int | None, int, int]]
    up: tuple[int, int]
    replaced: list[int]
    blocks: int
    bounds: Bounds

    def traffic(self, known: frozenset[int]) -> Counter[str]:
        """Count what travels; what a client already holds is not sent again."""
        sent = [(f, b) for source, f, b in self.down if source not in known]
        return Counter(
            floats_down=sum(floats for floats, _ in sent),
            bytes_down=sum(size for _, size in sent),
            floats_up=self.up[0],
            bytes_up=self.up[1],
        )

    def known_after(self, known: frozenset[int]) -> frozenset[int]:
        """Return which leaves of the server's state clients hold after the exchange."""
        received = {source for source, _, _ in self.down if source is not None}
        return frozenset((known | received) - {*self.replaced})


def count(job: Job, rounds: int) -> dict[str, Any]:
    """Return rounds, exchanges, traffic, oracle calls and samples of a run."""
    return Ledger(job).summary(job.key, rounds)


class Ledger:
    """The costs of a job; every exchange is traced once.

    They depend on the key only where lengths are random.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._setup, self._rounds = (_Stage(job, k) for k in (keys.SETUP, keys.ROUNDS))

    def each(self, key: Key, rounds: int) -> tuple["Tally", list["Tally"]]:
        """Return what is done in the setup, and in each round."""
        (before,), known = self._setup.tallies(key, 1, frozenset())
        return before, self._rounds.tallies(key, rounds, known)[0]

    def cumulative(self, key: Key, rounds: int) -> dict[str, np.ndarray]:
        """Return exchanges, bytes sent and samples drawn, in all, after each round."""
        before, each = self.each(key, rounds)

        def total(*names: str) -> np.ndarray:
            values = [sum(one.total[name] for name in names) for one in (before, *each)]
            return np.cumsum(np.asarray(values, np.int64))[1:]

        return {
            "exchanges": total("exchanges"),
            "bytes": total("bytes_down", "bytes_up"),
            "samples": total(*SAMPLES),
        }

    def rounds_of_a_measurement(self) -> float:
        """Return how many rounds take about as long as one measurement, if above 1.

        It looks at all rows of both levels once. A sample of a round is looked at more
        often: a gradient alone is as long as two losses.
        """
        job, sizes = self.job, (self.job.data.upper_sizes, self.job.data.lower_sizes)
        rows = sum(float(np.sum(level)) for level in sizes) / 2
        of_client = 2 * rows / job.clients
        batch = sum(one or of_client / 2 for one in (job.upper_batch, job.lower_batch))
        size = sum(leaf.size for leaf in jax.tree.leaves((job.x, job.y)))
        if rows <= job.participants * batch or rows * size < _SOON:  # needs no trace
            return 1.0
        samples = self.cumulative(jr.key(0), _TYPICAL)["samples"][-1]
        return max(1.0, _TYPICAL * rows / max(float(samples), 1.0))

    def blocks(self, key: Key, rounds: int) -> np.ndarray:
        """Return the blocks of a reply in every exchange, one after the other."""
        before, each = self.each(key, rounds)
        return np.concatenate([tally.blocks for tally in (before, *each)]).astype(int)

    def summary(self, key: Key, rounds: int) -> dict[str, Any]:
        """Return the totals of a run."""
        # Two rounds at least: later ones may find known what the first had to send.
        before, each = self.each(key, max(rounds, 2))
        total = Counter(dict.fromkeys(each[1].total, 0))
        for tally in (before, *each[:rounds]):
            total.update(tally.total)
        exchanges = total.pop("exchanges", 0)
        kinds = ("floats_down", "floats_up", "bytes_down", "bytes_up")
        bounds, later = self._setup.bounds | self._rounds.bounds, each[1:]
        mean = {
            kind: sum(one.each[kind] for one in later) / len(later) for kind in kinds
        }
        return {
            "rounds": rounds,
            "participants": self.job.participants,
            "exchanges": exchanges,
            **{kind: total.pop(kind, 0) for kind in kinds},
            "per_client_and_round": {
                kind: int(value) if value.is_integer() else value
                for kind, value in mean.items()
            },
            "samples": {name: total.pop(name, 0) for name in SAMPLES},
            "calls": dict(sorted(total.items())),
            **({"bounds": dict(sorted(bounds.items()))} if bounds else {}),
        }


class Tally(NamedTuple):
    """The cost of a round for a client that takes part in all of it, and for all.

    `blocks` has those of a reply in every exchange, one after the other.
    """

    each: Counter[str]
    total: Counter[str]
    blocks: list[int]


class _Stage:
    """The phases of a round, or of the setup."""

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.stage = job, stage
        self.phases = job.phases(stage)  # once: of wrappers they take 50 ms
        self.cohorts = [job.cohort(phase) for phase in every_phase(self.phases)]
        # Only its shapes count, and shapes need no program.
        self.server = jax.eval_shape(job.algorithm.init_server, job.x, job.y)
        self.replies = counted_replies(job.chances, job.clients, stage)
        self.costs: dict[tuple[int, bool], ExchangeCost] = {}
        self.bounds: Bounds = {}
        # By phase and thousand turns, where a program has branches.
        self.branches: dict[tuple[int, int], tuple[Counter[str], Bounds]] = {}

    def drawn_lengths(self, key: Key, turns: int) -> dict[int, np.ndarray]:
        """Return how long each random `Repeat` is in every round."""
        times, lengths = phase_loop.drawn_times(key, self.stage), {}

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

    def tallies(
        self, key: Key, turns: int, known: frozenset[int]
    ) -> tuple[list[Tally], frozenset[int]]:
        """Add up every turn from what clients know; return also what they know then."""
        lengths, replies = self.drawn_lengths(key, turns), self.replies(key)
        times, period = _known_times(lengths), phase_loop.period_of(self.phases)
        found, seen = [], {}
        for index in range(turns):
            # Those that start alike, with the same phases as often, cost the same.
            long = tuple(
                tuple(drawn.reshape(turns, -1)[index]) for drawn in lengths.values()
            )
            apart = self.branches or self.job.chances is not None
            turn = index if apart else index % period
            alike = (index == 0, turn, known, long)
            if alike not in seen:
                seen[alike] = self.tally(index, known, times, replies)
            tally, known = seen[alike]
            found.append(tally)
        return found, known

    def tally(
        self,
        index: int,
        known: frozenset[int],
        times: phase_loop.Times,
        replies: Replies,
    ) -> tuple[Tally, frozenset[int]]:
        """Add up one turn from what clients know; return also what they know then."""
        tally = Tally(Counter(), Counter(), [])

        def visit(known: frozenset[int], phase: Phase, number: int, turn: int):
            cost = self._cost(phase, number, turn == 0)
            tally.blocks.append(cost.blocks)
            many = replies(number, turn, self.cohorts[number])
            self._add(tally, self._calls(cost, phase, number, turn), many)
            if not self.job.data.travels:
                return known
            self._add(tally, cost.traffic(known), many)
            tally.total["exchanges"] += 1
            # Those of a cohort drawn anew, or absent before, may know nothing.
            all_know = many == self.job.participants == self.job.clients
            return cost.known_after(known) if all_know else frozenset()

        how = (visit, phase_loop.plain_loop, times, self.phases)
        return tally, phase_loop.run_phases(self.job, self.stage, index, known, *how)

    def _add(self, tally: Tally, costs: Mapping[str, float], many: int) -> None:
        tally.each.update(costs)
        total = {name: round(many * value) for name, value in costs.items()}
        tally.total.update(total)

    def _calls(
        self, cost: ExchangeCost, phase: Phase, number: int, turn: int
    ) -> Mapping[str, float]:
        """Return the calls of one turn; with branches, of those which it takes."""
        if not cost.bounds:
            return cost.calls
        block, place = divmod(turn, _BLOCK)
        if (number, block) not in self.branches:
            turns = np.arange(_BLOCK, dtype=np.int32) + block * _BLOCK
            where = (self.stage, number)
            traced, _ = _traced_work(self.job, phase, where, self.server, None)
            self.branches[number, block] = count_calls(traced, self.job, turns)
        calls, bounds = self.branches[number, block]
        self.bounds |= bounds
        return {
            name: float(np.broadcast_to(many, _BLOCK)[place])
            for name, many in calls.items()
        }

    def _cost(self, phase: Phase, number: int, first: bool) -> ExchangeCost:
        """Return what an exchange costs, from disk if an equal job was counted."""
        if (number, first) in self.costs:
            return self.costs[number, first]
        known = (self.job, (self.stage, number), 0 if first else 1)

        def traced() -> bytes:
            cost = _trace(*known, phase, self.server)
            return json.dumps(cost, default=int).encode()  # NumPy's whole numbers

        name = name_of(_trace, *known, _most_rows(self.job.data))
        cost = ExchangeCost(*json.loads(stored_traces.kept(name, traced)))
        self.costs[number, first] = cost
        return cost


def _known_times(lengths: Mapping[int, np.ndarray]) -> phase_loop.Times:
    """Return how often a `Repeat` runs, given how long the random ones are."""

    def times(repeat: Repeat, first: int, turn: int) -> int:
        return int(lengths[first][turn]) if repeat.random else repeat.times

    return times


def _trace(
    job: Job, where: tuple[int, int], index: int, phase: Phase, server: PyTree
) -> ExchangeCost:
    """Trace one exchange, without computing anything."""
    link, turn = Link.of(job, phase, where), _turn_of(job, phase, where, index)
    traced, reply = _traced_work(job, phase, where, server, index)
    calls, bounds = count_calls(traced, job)
    public, reply = job.public(server), job.public(reply)
    down = _sent_leaves(link, public, turn)
    replaced = _replaced_leaves(link, public, reply, turn)
    floats, size = _weigh(job.channel.coded_shape(reply))
    width = job.channel.reduction.bytes_per_number
    up = (floats, size if width is None else width * floats)
    return ExchangeCost(dict(calls), down, up, replaced, count_blocks(reply), bounds)


def _turn_of(job: Job, phase: Phase, where: tuple[int, int], index: Any) -> _Turn:
    cohort = job.cohort(phase)
    ids, present = np.arange(cohort, dtype=np.int32), np.ones(cohort, bool)
    # Called where something is traced: elsewhere its key would be computed.
    return partial(server_turn, job, where, index, *map(jax.device_put, (ids, present)))


def _traced_work(
    job: Job, phase: Phase, where: tuple[int, int], server: PyTree, index: int | None
) -> tuple[Any, PyTree]:
    """Return a client's program and the shapes of its reply.

    Without an index the turn is an input, the last one.
    """

    def local(server: PyTree, data: Data, turn: Any = index):
        memory = job.algorithm.init_client(job.x, job.y)
        message = phase.message(server, _turn_of(job, phase, where, turn)())
        mine = keys.client_turn(job.key, where, 0, turn)
        oracle = replace(job.oracle(0), data=data)
        return phase.local(for_place(message, 0), memory, oracle, mine)[1]

    given = () if index is not None else (jax.ShapeDtypeStruct((), np.int32),)
    traced = jax.make_jaxpr(local, return_shape=True)
    return traced(server, _real(job.data), *given)


def _real(data: Data) -> Data:
    """Return the shapes of data whose largest client has no padding: it is no cost."""
    most = _most_rows(data)

    def cut(parts: ClientData) -> ClientData:
        upper, lower = (
            jax.tree.map(lambda leaf, rows=rows: leaf[:, :rows], level)
            for level, rows in zip((parts.upper, parts.lower), most, strict=True)
        )
        return replace(parts, upper=upper, lower=lower)

    if isinstance(data, PooledData):
        return PooledData(eqx.filter_eval_shape(cut, data.parts))
    return eqx.filter_eval_shape(cut, data)


def _most_rows(data: Data) -> list[int]:
    """Return how many rows of each level the largest client has."""
    return [int(np.asarray(one).max()) for one in (data.upper_sizes, data.lower_sizes)]


def _sent_leaves(link: Link, public: PyTree, turn: _Turn) -> list[tuple]:
    """Return what one participant is sent, leaf by leaf."""
    traced, shapes = jax.make_jaxpr(
        lambda server: link.sent(server, turn()), return_shape=True
    )(public)
    inputs, channel = traced.jaxpr.invars, link.job.channel
    own = jax.eval_shape(lambda sent: channel.sent(for_place(sent, 0)), shapes)
    common = common_leaves(shapes)
    leaves = zip(traced.jaxpr.outvars, jax.tree.leaves(own), common, strict=True)
    # Values that differ by participant are never known before.
    return [
        (inputs.index(leaf) if alike and leaf in inputs else None, *_weigh(shape))
        for leaf, shape, alike in leaves
    ]


def _replaced_leaves(
    link: Link, public: PyTree, reply: PyTree, turn: _Turn
) -> list[int]:
    """Return which leaves of the server's state an exchange changes."""
    cohort = link.job.cohort(link.phase)

    def taken_in(server: PyTree, reply: PyTree) -> PyTree:
        stacked = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (cohort, *leaf.shape)), reply
        )
        mean = link.reduced(stacked, jnp.ones(cohort))
        return link.absorb(server, mean if link.phase.gathers else reply, turn())

    after = jax.make_jaxpr(taken_in)(public, reply).jaxpr
    same = zip(after.invars, after.outvars, strict=False)
    return [i for i, (old, new) in enumerate(same) if old is not new]


def _weigh(tree: PyTree) -> tuple[int, int]:
    leaves = jax.tree.leaves(tree)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return (
        sum(leaf.size for leaf in floats),
        sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    )
