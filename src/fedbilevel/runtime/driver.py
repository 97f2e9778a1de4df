"""Drives a runtime through its rounds: chunks, checkpoints, progress, ends, failures.

One driver serves a run, a sweep and a federation.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import numpy as np

from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime import mesh, progress
from fedbilevel.runtime.checkpoint import Snapshot
from fedbilevel.runtime.checkpoint_schedule import Checkpoints, Keeper
from fedbilevel.runtime.contract import Advance, Runtime, Span, failure
from fedbilevel.runtime.counts import Ledger
from fedbilevel.runtime.program import CAPACITY
from fedbilevel.runtime.progress import Listeners, OnRound, Watch
from fedbilevel.runtime.stopping import (
    BUDGET,
    RUNNING,
    SPARSE,
    Rule,
    Stopping,
    Track,
    affordable_rounds,
    is_measured,
    spacing,
    tracked,
)

_GLANCE = 0.5  # seconds between two looks of the host at the run
NEVER = Stopping()


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
    measure_every: int | None = 1,
    stopping: Stopping = NEVER,
    checkpoints: Checkpoints | None = None,
    watch: Watch | None = None,
    on_round: OnRound | None = None,
    begin: Snapshot | None = None,
) -> Outcome:
    """Run to the end, from the checkpoint if there is one, or else from `begin`.

    A `measure_every` of None measures often at first, and ever more rarely then.
    `watch(rounds done, rounds in all, newest measurements)` is called about twice a
    second, and `on_round(event)` then for every round that was measured since, in
    order, in the first process alone. If one of them raises KeyboardInterrupt, or the
    user presses Ctrl-C, a checkpoint is written before it is raised again. Where
    several processes have joined, all of them stop then.
    """
    if rounds < 1 or (measure_every is not None and measure_every < 1):
        raise InvalidInputError(
            f"rounds={rounds}, measure_every={measure_every}: both must be at least 1."
        )
    every = spacing(measure_every)
    with progress.noting_interrupts() as pressed:
        listeners = Listeners(watch, on_round, pressed)
        keeper = Keeper(runtime, checkpoints, every, begin)
        return _driven(runtime, rounds, every, stopping, keeper, listeners)


def _driven(
    runtime: Runtime,
    rounds: int,
    every: int,
    stopping: Stopping,
    keeper: Keeper,
    listeners: Listeners,
) -> Outcome:
    """Go through the rounds, chunk by chunk."""
    checkpoints = keeper.checkpoints
    _require_same_run(runtime, rounds, every, stopping, checkpoints)
    first = first_span(runtime, rounds, every, stopping)
    state, columns, done = keeper.begin(rounds)
    total = max(first.total, done)
    if done < total:
        columns = _due(columns, every, first.limits)
    rule = first.rule
    if columns:
        rule.check(columns)
    track = tracked(rule, columns, runtime.runs, every)
    if runtime.job.algorithm.finishes and done:
        over = runtime.job.algorithm.finished(runtime.fetch(state).server)
        track = track.after(rule, done, over)
    chunk, late, asked, reported = 1, False, "", len(columns.get("round", ()))
    while done < total and bool((np.asarray(track.reason) == RUNNING).any()):
        stop = int(min(total, done + chunk, keeper.latest_stop()))
        span = replace(first, start=done, stop=stop, total=total, track=track)
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
            _next_chunk(step.done - done, spent, every),
            keeper.due(step.done),
            stopping.seconds is not None and keeper.running() >= stopping.seconds,
        )
        done = step.done
        if due or late:
            keeper.keep(state, columns, done)
        events = progress.events_of(columns, reported, total, keeper.running())
        reported += len(events)
        try:
            interrupted = listeners.notify(events)
        except Exception:  # of somebody else
            keeper.keep(state, columns, done)
            raise
        if mesh.any_process(listeners.show(done, total, columns) or interrupted):
            keeper.keep(state, columns, done)
            raise KeyboardInterrupt(keeper.where_it_stands(done, rounds))
        asked = asked or next((one.reason for one in events if one.reason), "")
        if late or mesh.any_process(bool(asked)):
            # Not before the next measurement: the last round is always measured.
            total = min(total, _next_measured(done, every))
    keeper.keep(state, columns, done)
    reason = _reason(track, bool(late) or (done == total < rounds))
    ended = stopping.why(reason, done, rounds)
    if asked and done < rounds:
        ended = f"after round {done}: {asked}"
    return Outcome(runtime.fetch(state), columns, keeper.seconds(), ended, track)


def first_span(
    runtime: Runtime,
    rounds: int,
    measure_every: int | None = 1,
    stopping: Stopping = NEVER,
) -> Span:
    """Return the first round of a run, as `execute` asks for it."""
    every = spacing(measure_every)
    limits = np.full(len(runtime.roots), rounds, np.int32)
    if stopping.bytes is not None or stopping.samples is not None:
        ledger = Ledger(runtime.job)
        limits = affordable_rounds(stopping, rounds, ledger, runtime.roots)
    total = int(limits.max())
    rule = Rule.of(stopping, limits if runtime.runs else limits[0])
    early = stopping.looks or runtime.job.algorithm.finishes
    ends = early or bool((limits < total).any())
    return Span(0, 1, total, every, limits, rule, Track.start(runtime.runs), ends)


def _reason(track: Track, spent: bool) -> int:
    """Return why a run ended; of a sweep that of the run that ended last."""
    reasons, ended = np.atleast_1d(track.reason), np.atleast_1d(track.ended)
    if (reasons == RUNNING).any():
        return BUDGET if spent else RUNNING
    return int(reasons[np.argmax(ended)])


def rounds_in_python(
    span: Span,
    state: Any,
    one_round: Callable,
    measure: Callable,
    algorithm: AbstractAlgorithm,
) -> Advance:
    """Go through the rounds of a span one by one.

    `one_round(state, index)` returns the next state and, if there was one, a failure;
    `measure(state, index)` returns the columns of a round.
    """
    rows, track, done, place = [], span.track, span.start, None
    measured = algorithm.measured
    for index in range(span.start, span.stop):
        state, place = one_round(state, index)
        if place is not None:
            break
        done = index + 1
        if span.is_due(done):
            rows.append(measure(state, index))
            span.rule.check(rows[-1])
            track = track.seen(span.rule, rows[-1], np.asarray(True))
            if rows[-1]:
                state = replace(state, server=measured(state.server, rows[-1], done))
        if span.ends:
            over = span.is_due(done) and algorithm.finished(state.server)
            track = track.after(span.rule, done, over)
            if int(track.reason) != RUNNING:
                break
    names = sorted(rows[0]) if rows else ()
    table = {name: np.asarray([row[name] for row in rows]) for name in names}
    return Advance(state, table, done, track, place)


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


def _next_chunk(rounds: int, spent: float, every: int) -> int:
    """Choose how many rounds take about one glance, and fit the buffer of rows.

    Of sparse measurements there are fewer than that in all rounds that can be counted.
    """
    wanted = min(int(rounds * _GLANCE / max(spent, 1e-6)), 8 * rounds)
    return max(1, wanted if every == SPARSE else min(wanted, (CAPACITY - 1) * every))


def _next_measured(done: int, every: int) -> int:
    """Return the first round from this one on after which there is a measurement."""
    return next(at for at in itertools.count(done) if is_measured(at, every))


def _due(
    columns: dict[str, np.ndarray], every: int, limits: np.ndarray
) -> dict[str, np.ndarray]:
    """Drop the last measurement of a run that was to end there, but continues now.

    A run of so many rounds from the start would not have made it.
    """
    if not columns:
        return columns
    rounds = columns["round"]
    due = is_measured(rounds, every) | np.isin(rounds, limits)
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
