"""Drives a runtime through its rounds: chunks, checkpoints, progress, ends, failures.

One driver serves a run, a sweep and a federation.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import numpy as np

from fedbilevel._folders import how_to_continue
from fedbilevel._types import Key
from fedbilevel.algorithms import AbstractAlgorithm, every_phase
from fedbilevel.errors import CheckpointError, InvalidInputError, NonFiniteError
from fedbilevel.runtime import checkpoint, mesh
from fedbilevel.runtime.checkpoint import Snapshot
from fedbilevel.runtime.counts import Ledger
from fedbilevel.runtime.job import Job
from fedbilevel.runtime.listening import (
    Listeners,
    OnRound,
    Watch,
    events_of,
    noting_interrupts,
)
from fedbilevel.runtime.program import CAPACITY
from fedbilevel.runtime.stopping import (
    BUDGET,
    RUNNING,
    Rule,
    Stopping,
    Track,
    affordable_rounds,
    tracked,
)
from fedbilevel.schedules import is_known

__all__ = [
    "Advance",
    "Checkpoints",
    "Found",
    "Outcome",
    "Runtime",
    "Span",
    "execute",
    "failure",
    "rounds_in_python",
]

_GLANCE = 0.5  # seconds between two looks of the host at the run
NEVER = Stopping()
Found = tuple[int, int, int]  # round, phase and client of a reply that is not finite


@dataclass(frozen=True)
class Span:
    """Rounds `start` to `stop` of `total`, measured every `every` rounds.

    `limits` are the rounds after which single runs of a sweep must end. With `ends` the
    rule may end a run before; `track` is how it stands.
    """

    start: int
    stop: int
    total: int
    every: int
    limits: np.ndarray
    rule: Rule
    track: Track
    ends: bool

    def is_due(self, done: int) -> bool:
        """Say whether there is a measurement after so many rounds."""
        last = done == self.total or bool((self.limits == done).any())
        return done % self.every == 0 or last

    def measured(self, done: int) -> np.ndarray:
        """Return the rounds up to `done` after which there is a measurement."""
        rounds = range(self.start + 1, done + 1)
        return np.asarray([r for r in rounds if self.is_due(r)], np.int64)


class Advance(NamedTuple):
    """What some rounds brought.

    `rows` have a row for every measurement; `done` counts the rounds that are over;
    `place` is where a reply was not finite, so that the run cannot go on.
    """

    state: Any
    rows: dict[str, np.ndarray]
    done: int
    track: Track
    place: Found | None = None


@runtime_checkable
class Runtime(Protocol):
    """What the driver asks of a runtime.

    `runs` is the shape of what a sweep carries, () for a single run; `roots` are the
    keys of the runs.
    """

    job: Job
    compile_seconds: float

    @property
    def runs(self) -> tuple[int, ...]:
        """The number of runs of a sweep, as a shape."""
        ...

    @property
    def roots(self) -> Sequence[Key]:
        """The keys of all runs."""
        ...

    def fingerprint(self, every: int) -> str:
        """Return what tells a run from all others, measured every so many rounds."""
        ...

    def blank(self) -> Any:
        """Return a state like those of a run."""
        ...

    def start(self) -> tuple[Any, Found | None]:
        """Return the state before the first round, and what failed on the way."""
        ...

    def advance(self, state: Any, span: Span) -> Advance:
        """Run some rounds."""
        ...

    def fetch(self, state: Any) -> Any:
        """Return a state on the host."""
        ...

    def load(self, state: Any) -> Any:
        """Take a fetched state."""
        ...


class Checkpoints(eqx.Module):
    """Where to keep checkpoints, and how often: by rounds, by seconds, or both.

    `part_of` is the folder of the study that the run is a part of.
    """

    folder: Path
    every_rounds: int | None = None
    every_seconds: float | None = None
    part_of: Path | None = None

    def __check_init__(self) -> None:
        for name in ("every_rounds", "every_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                option = name.replace("every", "checkpoint")
                raise InvalidInputError(
                    f"{option}={value} must be above 0, or None for never."
                )

    def due(self, rounds: int, seconds: float) -> bool:
        """Say whether one is due, given what passed since the last."""
        by_rounds = self.every_rounds is not None and rounds >= self.every_rounds
        by_time = self.every_seconds is not None and seconds >= self.every_seconds
        return by_rounds or by_time


class Outcome(eqx.Module):
    """The last state, the measured columns, the seconds spent, and how it ended.

    `ended` says why, in words. Of a sweep `track` has the reason and the last round of
    every run, and columns have an axis over runs.
    """

    state: Any
    columns: dict[str, np.ndarray]
    seconds: dict[str, float]
    ended: str = ""
    track: Track | None = None


def execute(
    runtime: Runtime,
    rounds: int,
    *,
    measure_every: int = 1,
    stopping: Stopping = NEVER,
    checkpoints: Checkpoints | None = None,
    watch: Watch | None = None,
    on_round: OnRound | None = None,
    begin: Snapshot | None = None,
) -> Outcome:
    """Run to the end, from the checkpoint if there is one, or else from `begin`.

    `watch(rounds done, rounds in all, newest measurements)` is called about twice a
    second, and `on_round(event)` then for every round that was measured since, in
    order, in the first process alone. If one of them raises KeyboardInterrupt, or
    somebody presses Ctrl-C, a checkpoint is written before that goes on. Where several
    processes have joined, all of them stop then.
    """
    check_rounds(rounds, measure_every)
    with noting_interrupts() as pressed:
        listeners = Listeners(watch, on_round, pressed)
        every = measure_every
        keeper = _Keeper(runtime, checkpoints, every, begin)
        return _driven(runtime, rounds, every, stopping, keeper, listeners)


def _driven(
    runtime: Runtime,
    rounds: int,
    measure_every: int,
    stopping: Stopping,
    keeper: "_Keeper",
    listeners: Listeners,
) -> Outcome:
    """Go through the rounds, chunk by chunk."""
    checkpoints = keeper.checkpoints
    _require_same_run(runtime, rounds, measure_every, stopping, checkpoints)
    limits = _limits(runtime, stopping, rounds)
    state, columns, done = keeper.begin(rounds)
    total = max(int(limits.max()), done)
    if done < total:
        columns = _due(columns, measure_every, limits)
    rule = Rule.of(stopping, limits if runtime.runs else limits[0])
    if columns:
        rule.check(columns)
    track = tracked(rule, columns, runtime.runs, measure_every)
    ends = stopping.looks or bool((limits < total).any())
    chunk, late, asked, untold = 1, False, "", len(columns.get("round", ()))
    while done < total and bool((np.asarray(track.reason) == RUNNING).any()):
        stop = int(min(total, done + chunk, keeper.latest_stop()))
        span = Span(done, stop, total, measure_every, limits, rule, track, ends)
        began, compiling = time.perf_counter(), runtime.compile_seconds
        step = runtime.advance(state, span)
        if step.place is not None:
            raise failure(
                runtime.job, step.place, keeper.last_good, due=checkpoints is not None
            )
        state, track = step.state, step.track
        columns = _extend(columns, step.rows, span.measured(step.done))
        spent = time.perf_counter() - began - (runtime.compile_seconds - compiling)
        chunk, due, late = mesh.decided_by_first(
            _next_chunk(step.done - done, spent, measure_every),
            keeper.due(step.done),
            stopping.seconds is not None and keeper.running() >= stopping.seconds,
        )
        done = step.done
        if due or late:
            keeper.keep(state, columns, done)
        events = events_of(columns, untold, total, keeper.running())
        untold += len(events)
        with keeper.keeping_on_failure(state, columns, done):
            interrupted = listeners.tell(events)
        if mesh.any_process(listeners.show(done, total, columns) or interrupted):
            keeper.keep(state, columns, done)
            raise KeyboardInterrupt(keeper.where_it_stands(done, rounds))
        asked = asked or next((one.reason for one in events if one.reason), "")
        if late or mesh.any_process(bool(asked)):
            # Not before the next measurement: the last round is always measured.
            total = min(total, -(-done // measure_every) * measure_every)
    keeper.keep(state, columns, done)
    reason = _reason(track, bool(late) or (done == total < rounds))
    told = stopping.told(reason, done, rounds)
    if asked and done < rounds:
        told = f"after round {done}: {asked}"
    return Outcome(runtime.fetch(state), columns, keeper.seconds(), told, track)


def _reason(track: Track, spent: bool) -> int:
    """Return why a run ended; of a sweep that of the run that ended last."""
    reasons, ended = np.atleast_1d(track.reason), np.atleast_1d(track.ended)
    if (reasons == RUNNING).any():
        return BUDGET if spent else RUNNING
    return int(reasons[np.argmax(ended)])


def _limits(runtime: Runtime, stopping: Stopping, rounds: int) -> np.ndarray:
    """Return how many rounds each run may make."""
    if stopping.bytes is None and stopping.samples is None:
        return np.full(len(runtime.roots), rounds, np.int32)
    ledger = Ledger(runtime.job)
    return affordable_rounds(stopping, rounds, ledger, runtime.roots)


def rounds_in_python(
    span: Span, state: Any, one_round: Callable, measure: Callable
) -> Advance:
    """Go through the rounds of a span one by one.

    `one_round(state, index)` returns the next state and, if there was one, a failure;
    `measure(state, index)` returns the columns of a round.
    """
    rows, track, done, place = [], span.track, span.start, None
    for index in range(span.start, span.stop):
        state, place = one_round(state, index)
        if place is not None:
            break
        done = index + 1
        if span.is_due(done):
            rows.append(measure(state, index))
            span.rule.check(rows[-1])
            track = track.seen(span.rule, rows[-1], np.asarray(True))
        if span.ends:
            track = track.after(span.rule, done)
            if int(track.reason) != RUNNING:
                break
    names = sorted(rows[0]) if rows else ()
    table = {name: np.asarray([row[name] for row in rows]) for name in names}
    return Advance(state, table, done, track, place)


def check_rounds(rounds: int, measure_every: int) -> None:
    """Raise unless both are at least 1."""
    if rounds < 1 or measure_every < 1:
        raise InvalidInputError(
            f"rounds={rounds}, measure_every={measure_every}: both must be at least 1."
        )


def _require_same_run(
    runtime: Runtime,
    rounds: int,
    every: int,
    stopping: Stopping,
    checkpoints: Checkpoints | None,
) -> None:
    """Raise if processes that joined were given different runs: they would wait."""

    def describe() -> str:
        kept = checkpoints and checkpoints.every_rounds
        ends = f"{rounds} {stopping}"
        return f"{runtime.fingerprint(every)} {ends} {kept} {not checkpoints}"

    mesh.require_same(describe, "run")


def failure(
    job: Job, found: Found, last_good: str | None = None, *, due: bool = False
) -> NonFiniteError:
    """Name the place of a reply that was not finite; round -1 is the setup."""
    index, number, client = found
    phases = job.algorithm.setup() if index < 0 else job.algorithm.phases()
    name = every_phase(phases)[number].name
    theta = _theta(job.algorithm)
    return NonFiniteError(index + 1, name, client, last_good, due=due, theta=theta)


def _theta(algorithm: AbstractAlgorithm) -> float | None:
    """Return the step of a method's Neumann series, if it has one."""
    for part in (algorithm, *vars(algorithm).values()):
        theta = getattr(part, "theta", None)
        if theta is not None and is_known(theta) and np.ndim(theta) == 0:
            return float(theta)
    return None


class _Keeper:
    """Keeps checkpoints and the time, for one call of `execute`."""

    def __init__(
        self,
        runtime: Runtime,
        checkpoints: Checkpoints | None,
        every: int,
        first: Snapshot | None = None,
    ) -> None:
        self.runtime, self.checkpoints, self.first = runtime, checkpoints, first
        self.fingerprint = runtime.fingerprint(every) if checkpoints else ""
        self.began = self.kept_at = time.perf_counter()
        self.kept_round, self.last_good = -1, None
        self.earlier: dict[str, float] = {}

    def begin(self, rounds: int) -> tuple[Any, dict[str, np.ndarray], int]:
        """Return the last checkpoint, what was handed over, or the start."""
        held = mesh.on_all(self._last)
        where = self.checkpoints and self.checkpoints.folder
        mesh.require_same(lambda: str(held and held.round), f"checkpoint in {where}")
        if held is None and self.first is not None:
            one = self.first
            return self.runtime.load(one.state), one.columns, one.round
        if held is None:
            state, found = self.runtime.start()
            if found is not None:
                raise failure(self.runtime.job, found)
            return state, {}, 0
        if held.round > rounds:
            raise CheckpointError(
                f"the checkpoint is already after round {held.round}, beyond the "
                f"{rounds} asked for. Ask for at least as many."
            )
        self.kept_round, self.earlier = held.round, held.seconds
        self.last_good = f"{self.checkpoints.folder}, after round {held.round}"  # pyright: ignore[reportOptionalMemberAccess]
        return self.runtime.load(held.state), held.columns, held.round

    def _last(self) -> Snapshot | None:
        if self.checkpoints is None:
            return None
        folder = self.checkpoints.folder
        return checkpoint.load(folder, self.runtime.blank(), self.fingerprint)

    def latest_stop(self) -> float:
        """Return the round at which the next checkpoint by rounds is due."""
        every = self.checkpoints.every_rounds if self.checkpoints else None
        return max(self.kept_round, 0) + every if every else float("inf")

    def due(self, done: int) -> bool:
        """Say whether a checkpoint is due."""
        seconds = time.perf_counter() - self.kept_at
        held = self.checkpoints
        return held is not None and held.due(done - max(self.kept_round, 0), seconds)

    def keep(self, state: Any, columns: dict[str, np.ndarray], done: int) -> None:
        """Write a checkpoint, if they are kept at all."""
        if self.checkpoints is None or done == self.kept_round:
            return
        folder = self.checkpoints.folder
        snapshot = Snapshot(self.runtime.fetch(state), columns, done, self.seconds())
        mesh.on_first(lambda: checkpoint.save(folder, snapshot, self.fingerprint))
        self.last_good = f"{folder}, after round {done}"
        self.kept_at, self.kept_round = time.perf_counter(), done

    @contextmanager
    def keeping_on_failure(
        self, state: Any, columns: dict[str, np.ndarray], done: int
    ) -> Iterator[None]:
        """Write a checkpoint before an error of somebody else goes on."""
        try:
            yield
        except Exception:
            self.keep(state, columns, done)
            raise

    def running(self) -> float:
        """Return the seconds of running so far, those before a resume included."""
        return self.seconds()["run"]

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent so far, those before a resume included."""
        compiling = self.runtime.compile_seconds
        running = max(time.perf_counter() - self.began - compiling, 0.0)
        now = {"compile": compiling, "run": running}
        return {name: now[name] + self.earlier.get(name, 0.0) for name in now}

    def where_it_stands(self, done: int, rounds: int) -> str:
        """Say how far the run came when it was asked to stop."""
        if self.checkpoints is None:
            kept = "Nothing was kept, as no folder was given."
        else:
            home = self.checkpoints.part_of or self.checkpoints.folder
            kept = f"Kept in {self.last_good}. {how_to_continue(home)}".rstrip()
        return f"After round {done} of {rounds}. {kept}"


def _next_chunk(rounds: int, spent: float, every: int) -> int:
    """Choose how many rounds take about one glance, and fit the buffer of rows."""
    wanted = int(rounds * _GLANCE / max(spent, 1e-6))
    return max(1, min(wanted, 8 * rounds, (CAPACITY - 1) * every))


def _due(
    columns: dict[str, np.ndarray], every: int, limits: np.ndarray
) -> dict[str, np.ndarray]:
    """Leave out the last measurement of a run that was to end there, and goes on now.

    A run of so many rounds from the start would not have made it.
    """
    if not columns:
        return columns
    rounds = columns["round"]
    due = (rounds % every == 0) | np.isin(rounds, limits)
    return {name: column[due] for name, column in columns.items()}


def _extend(
    columns: dict[str, np.ndarray], rows: dict[str, np.ndarray], measured: np.ndarray
) -> dict[str, np.ndarray]:
    if not len(measured):
        return columns
    fresh = {"round": measured, **rows}
    if not columns:
        return fresh
    return {name: np.concatenate([columns[name], fresh[name]]) for name in fresh}
