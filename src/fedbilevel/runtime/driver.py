"""Drives a runtime through its rounds: chunks, checkpoints, progress, failures."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import equinox as eqx
import numpy as np

from fedbilevel.algorithms import every_phase
from fedbilevel.errors import CheckpointError, InvalidInputError, NonFiniteError
from fedbilevel.runtime import checkpoint, mesh
from fedbilevel.runtime._program import CAPACITY
from fedbilevel.runtime.checkpoint import Snapshot
from fedbilevel.runtime.job import Job

__all__ = ["Checkpoints", "Outcome", "Runtime", "execute"]

_GLANCE = 0.5  # seconds between two looks of the host at the run
Watch = Callable[[int, int, dict[str, float]], None]
Found = tuple[int, int, int]


class Runtime(Protocol):
    """What the driver asks of a runtime."""

    job: Job
    compile_seconds: float

    def mark(self, every: int) -> str:
        """Return what tells a run from all others, measured every so many rounds."""
        ...

    def blank(self) -> Any:
        """Return a state like those of a run."""
        ...

    def start(self) -> tuple[Any, Found | None]:
        """Return the state before the first round, and what failed on the way."""
        ...

    def advance(
        self, state: Any, start: int, stop: int, total: int, every: int
    ) -> tuple[Any, dict[str, np.ndarray], Found | None]:
        """Run some rounds."""
        ...

    def fetch(self, state: Any) -> Any:
        """Return a state on the host."""
        ...

    def load(self, state: Any) -> Any:
        """Take a fetched state."""
        ...


class Checkpoints(eqx.Module):
    """Where to keep checkpoints, and how often: by rounds, by seconds, or both."""

    folder: Path
    every_rounds: int | None = None
    every_seconds: float | None = None

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
    """The last state, the measured columns, and the seconds spent."""

    state: Any
    columns: dict[str, np.ndarray]
    seconds: dict[str, float]


def execute(
    runtime: Runtime,
    rounds: int,
    *,
    measure_every: int = 1,
    checkpoints: Checkpoints | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Run to the end, from the checkpoint if there is one.

    `watch(rounds done, rounds in all, newest measurements)` is called about twice a
    second; if it raises KeyboardInterrupt, a checkpoint is written before that goes on.
    Where several processes have joined, all of them stop then.
    """
    check_rounds(rounds, measure_every)
    _require_same_run(runtime, rounds, measure_every, checkpoints)
    keeper = _Keeper(runtime, checkpoints, measure_every)
    state, columns, done = keeper.begin(rounds)
    chunk = 1
    while done < rounds:
        stop = int(min(rounds, done + chunk, keeper.latest_stop()))
        began, compiling = time.perf_counter(), runtime.compile_seconds
        state, rows, found = runtime.advance(state, done, stop, rounds, measure_every)
        if found is not None:
            raise failure(runtime.job, found, keeper.last_good)
        columns = _extend(columns, rows, done, stop, rounds, measure_every)
        spent = time.perf_counter() - began - (runtime.compile_seconds - compiling)
        chunk, due = mesh.decided_by_first(
            _next_chunk(stop - done, spent, measure_every), keeper.due(stop)
        )
        done = stop
        if done == rounds or due:
            keeper.keep(state, columns, done)
        if mesh.any_process(_asked_to_stop(watch, done, rounds, columns)):
            keeper.keep(state, columns, done)
            raise KeyboardInterrupt(keeper.farewell(done, rounds))
    return Outcome(runtime.fetch(state), columns, keeper.seconds())


def check_rounds(rounds: int, measure_every: int) -> None:
    """Raise unless both are at least 1."""
    if rounds < 1 or measure_every < 1:
        raise InvalidInputError(
            f"rounds={rounds}, measure_every={measure_every}: both must be at least 1."
        )


def _require_same_run(
    runtime: Runtime, rounds: int, every: int, checkpoints: Checkpoints | None
) -> None:
    """Raise if processes that joined were given different runs: they would wait."""

    def describe() -> str:
        kept = checkpoints and checkpoints.every_rounds
        return f"{runtime.mark(every)} {rounds} {kept} {not checkpoints}"

    mesh.require_same(describe, "run")


def _asked_to_stop(
    watch: Watch | None, done: int, rounds: int, columns: dict[str, np.ndarray]
) -> bool:
    """Show how far the run is, and say whether it shall stop."""
    if watch is None:
        return False
    newest = {name: float(c[-1]) for name, c in columns.items() if len(c)}
    try:
        watch(done, rounds, newest)
    except KeyboardInterrupt:
        return True
    return False


def measured_rounds(start: int, stop: int, total: int, every: int) -> np.ndarray:
    """Return the rounds after which a run measures, counted from 1."""
    rounds = range(start + 1, stop + 1)
    return np.asarray([r for r in rounds if r % every == 0 or r == total], np.int64)


def failure(job: Job, found: Found, last_good: str | None = None) -> NonFiniteError:
    """Name the place of a reply that was not finite; round -1 is the setup."""
    index, number, client = found
    phases = job.algorithm.setup() if index < 0 else job.algorithm.phases()
    name = every_phase(phases)[number].name
    return NonFiniteError(index + 1, name, client, last_good)


class _Keeper:
    """Keeps checkpoints and the time, for one call of `execute`."""

    def __init__(
        self, runtime: Runtime, checkpoints: Checkpoints | None, every: int
    ) -> None:
        self.runtime, self.checkpoints = runtime, checkpoints
        self.mark = runtime.mark(every) if checkpoints else ""
        self.began = self.kept_at = time.perf_counter()
        self.kept_round, self.last_good = 0, None
        self.earlier: dict[str, float] = {}

    def begin(self, rounds: int) -> tuple[Any, dict[str, np.ndarray], int]:
        """Return the last checkpoint, or the start."""
        held = mesh.on_all(self._last)
        where = self.checkpoints and self.checkpoints.folder
        mesh.require_same(lambda: str(held and held.round), f"checkpoint in {where}")
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
        return checkpoint.load(self.checkpoints.folder, self.runtime.blank(), self.mark)

    def latest_stop(self) -> float:
        """Return the round at which the next checkpoint by rounds is due."""
        every = self.checkpoints.every_rounds if self.checkpoints else None
        return self.kept_round + every if every else float("inf")

    def due(self, done: int) -> bool:
        """Say whether a checkpoint is due."""
        seconds = time.perf_counter() - self.kept_at
        held = self.checkpoints
        return held is not None and held.due(done - self.kept_round, seconds)

    def keep(self, state: Any, columns: dict[str, np.ndarray], done: int) -> None:
        """Write a checkpoint, if they are kept at all."""
        if self.checkpoints is None:
            return
        folder = self.checkpoints.folder
        snapshot = Snapshot(self.runtime.fetch(state), columns, done, self.seconds())
        mesh.on_first(lambda: checkpoint.save(folder, snapshot, self.mark))
        self.last_good = f"{folder}, after round {done}"
        self.kept_at, self.kept_round = time.perf_counter(), done

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent so far, those before a resume included."""
        compiling = self.runtime.compile_seconds
        running = max(time.perf_counter() - self.began - compiling, 0.0)
        now = {"compile": compiling, "run": running}
        return {name: now[name] + self.earlier.get(name, 0.0) for name in now}

    def farewell(self, done: int, rounds: int) -> str:
        """Say where the run stands when it is asked to stop."""
        kept = f" Kept in {self.last_good}." if self.last_good else ""
        return f"After round {done} of {rounds}.{kept}"


def _next_chunk(rounds: int, spent: float, every: int) -> int:
    """Choose how many rounds take about one glance, and fit the buffer of rows."""
    wanted = int(rounds * _GLANCE / max(spent, 1e-6))
    return max(1, min(wanted, 8 * rounds, (CAPACITY - 1) * every))


def _extend(
    columns: dict[str, np.ndarray],
    rows: dict[str, np.ndarray],
    start: int,
    stop: int,
    total: int,
    every: int,
) -> dict[str, np.ndarray]:
    measured = measured_rounds(start, stop, total, every)
    if not len(measured):
        return columns
    fresh = {"round": measured, **rows}
    if not columns:
        return fresh
    return {name: np.concatenate([columns[name], fresh[name]]) for name in fresh}
