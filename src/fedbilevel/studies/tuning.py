"""Tries algorithms, to the end or by successive halving, and takes the best.

Trials that differ in numbers only are one compiled program, with all seeds. With rungs
all of them run briefly, and after each the best third continues from its state;
diverged trials never do. This is cheap, but favors steps that are good early and bad
late. Trials are judged on rows that are neither theirs nor those for testing, see
`validation`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from fedbilevel._files import naming_damage, write_atomically
from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.errors import (
    CheckpointError,
    DivergedError,
    InvalidInputError,
    unknown_name,
)
from fedbilevel.problem import Data, Problem
from fedbilevel.runtime import Job, Sampling, SweepRuntime, Watch, execute
from fedbilevel.runtime.checkpoint import Snapshot
from fedbilevel.runtime.driver import NEVER
from fedbilevel.runtime.sweeping import SweepState, single_outcomes
from fedbilevel.studies import budgets
from fedbilevel.studies.searching import Point, Search
from fedbilevel.studies.setting import Keeping, Setting
from fedbilevel.studies.validation import HELD_OUT, held_out, held_out_losses

_FORECAST = "forecast.json"  # in the folder of a search whose budget is in seconds
_OTHER_SEEDS = 2**16  # above those of results


@dataclass(frozen=True)
class Trial:
    """A candidate, `algorithm`, and its mean judgment over seeds, `value`.

    That is after `rounds` rounds, the last that it made, and infinite if a seed
    diverged. `point` is what the algorithm was made of, where there was a search, and
    `by_seed` has what each seed came to.
    """

    algorithm: AbstractAlgorithm
    value: float
    rounds: int = 0
    point: Point = field(default_factory=dict)
    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tuned:
    """The best `algorithm`, its `point`, and all `trials`, in their order.

    They were judged by `judged_by`, from these `seeds`; `cost` is what all of them
    took, in `unit`: samples, bytes, or seconds without those of compiling. `budget` is
    what they might take, if there was one.
    """

    algorithm: AbstractAlgorithm
    point: Point
    trials: list[Trial]
    judged_by: str
    seeds: tuple[int, ...]
    cost: float
    unit: str
    budget: float | None = None

    def spent(self) -> dict[str, Any]:
        """Return how much tuning there was, as plain data."""
        counts = {"trials": len(self.trials), "seeds": len(self.seeds)}
        return {**counts, "cost": self.cost, "unit": self.unit, "budget": self.budget}


def tuning_seeds(seeds: Sequence[int], count: int) -> list[int]:
    """Return seeds for tuning, none of which is one of a result's."""
    return [_OTHER_SEEDS + max(seeds) + number for number in range(count)]


def tune(
    problem: Problem,
    data: Data,
    start: tuple[Upper, Lower],
    candidates: Search | Sequence[AbstractAlgorithm],
    *,
    rounds: int,
    seeds: Sequence[int],
    headline: str = HELD_OUT,
    rungs: int = 1,
    budget: float | None = None,
    unit: str = "samples",
    sampling: Sampling | None = None,
    metrics: Metrics | None = None,
    channel: Channel = PLAIN,
    keeping: Keeping | None = None,
    watch: Watch | None = None,
) -> Tuned:
    """Try candidates from all seeds; take the one whose mean headline ends lowest.

    `candidates` are algorithms, or a `Search`, of which the later points follow from
    the earlier. All of them run to the end. With several `rungs` they begin with a part
    of the rounds, and the best third runs three times as long, and so on; the last are
    `rounds` long. With a `budget` a search has as many trials as together take so many
    samples, or bytes or seconds if that is the `unit`, at least one. Seconds are those
    of this machine, forecast from a few rounds of the first candidate.

    A fifth of each client's upper rows is held out, and judges: `headline` is
    "held_out_loss". It may also name one of the `metrics`, which are your own affair:
    one on test rows makes the test worthless. With `keeping` an interrupted search,
    called again with `resume`, continues where it stopped.
    """
    drawn = sampling or Sampling()
    setting = Setting(
        problem, data, start, metrics, "upper_loss", drawn, channel, headline
    )
    more = {"budget": budget, "unit": unit, "keeping": keeping, "watch": watch}
    return tuned(setting, candidates, rounds, seeds, rungs=rungs, **more)


def tuned(
    setting: Setting,
    candidates: Search | Sequence[AbstractAlgorithm],
    rounds: int,
    seeds: Sequence[int],
    *,
    rungs: int = 1,
    budget: float | None = None,
    unit: str = "samples",
    by_rung: np.ndarray | None = None,
    keeping: Keeping | None = None,
    watch: Watch | None = None,
) -> Tuned:
    """Tune in a setting; `by_rung` are `costs_of_trial`, where they are known."""
    if unit not in budgets.UNITS:
        raise unknown_name("unit of a budget", unit, budgets.UNITS)
    if not seeds or (not isinstance(candidates, Search) and not candidates):
        raise InvalidInputError("tuning needs at least one candidate and one seed.")
    if keeping is not None:
        keeping.opened()
    lengths = budgets.lengths_of(rounds, rungs)
    halving = _Halving(setting, lengths, list(seeds), unit, keeping, watch)
    count = candidates.count if isinstance(candidates, Search) else len(candidates)
    if isinstance(candidates, Search) and budget is not None:
        count = halving.affordable(candidates, budget, by_rung)
    trials = halving.first_rung(candidates, count)
    for rung, wanted in enumerate(budgets.counts_of(count, len(lengths))[1:], 1):
        finite = [one for one in trials if math.isfinite(one.value)]
        longest = [one for one in finite if one.rung == rung - 1]
        best = sorted(longest, key=lambda one: one.value)[:wanted]
        halving.extend(sorted(best, key=lambda one: one.number), rung)
    return replace(halving.concluded(trials, candidates), budget=budget)


def costs_of_trial(
    setting: Setting, search: Search, lengths: Sequence[int], unit: str
) -> np.ndarray:
    """Return what a trial costs in each rung, from one seed."""
    if setting.tuned_by == HELD_OUT:
        setting = replace(setting, data=held_out(setting.data)[0], metrics=None)
    return budgets.costs_of_rungs(setting.job(search.first()), lengths, unit)


@dataclass
class _Running:
    """A trial as it stands: its state holds all seeds, after the rung `rung`."""

    number: int
    algorithm: AbstractAlgorithm
    point: Point
    value: float = math.inf
    by_seed: tuple[float, ...] = ()
    rung: int = 0
    state: SweepState | None = None


class _Halving:
    """Runs the rungs of one search, each from where the last one ended."""

    def __init__(
        self,
        setting: Setting,
        lengths: Sequence[int],
        seeds: list[int],
        unit: str,
        keeping: Keeping | None,
        watch: Watch | None,
    ) -> None:
        self.lengths, self.seeds, self.keeping = lengths, seeds, keeping
        self.unit = unit
        self.judged, self.judged_by = None, setting.tuned_by
        if self.judged_by == HELD_OUT:
            data, self.judged = held_out(setting.data)
            # Other metrics may know test rows: they are not even computed.
            setting = replace(setting, data=data, metrics=None)
            self.judged_by = "upper_loss" if self.judged is None else HELD_OUT
        self.setting, self.watch = setting, watch
        self.cost, self.error = 0.0 if unit == budgets.SECONDS else 0, None

    def affordable(
        self, search: Search, budget: float, by_rung: np.ndarray | None
    ) -> int:
        """Return how many trials the budget pays for; a forecast of time is kept."""
        kept = None
        if by_rung is None:
            kept = self.keeping and Path(self.keeping.folder) / _FORECAST
            if kept and kept.exists():
                return _count_kept(kept, {"budget": budget, "unit": self.unit})
            job = self.setting.job(search.first())
            by_rung = budgets.costs_of_rungs(job, self.lengths, self.unit)
        count = search.count
        if by_rung.any():
            count = budgets.affordable(by_rung, len(self.seeds), budget)
        if kept and self.unit == budgets.SECONDS:
            held = {"trials": count, "budget": budget, "unit": self.unit}
            write_atomically(kept, json.dumps(held))
        return count

    def first_rung(
        self, candidates: Search | Sequence[AbstractAlgorithm], count: int
    ) -> list[_Running]:
        """Run the first rung of all trials, in as many batches as the search asks."""
        trials: list[_Running] = []
        if not isinstance(candidates, Search):
            trials = [_Running(n, one, {}) for n, one in enumerate(candidates)]
            self.extend(trials, 0)
            return trials
        for batch, size in enumerate(candidates.batches(count)):
            tried = [(one.point, one.value) for one in trials]
            points = candidates.proposed(size, tried, batch)
            fresh = [
                _Running(len(trials) + n, candidates.make(**point), point)
                for n, point in enumerate(points)
            ]
            self.extend(fresh, 0, batch)
            trials += fresh
        return trials

    def extend(self, trials: Sequence[_Running], rung: int, batch: int = 0) -> None:
        """Take trials through one more rung, and judge them."""
        for group in _alike(trials):
            place = f"rung-{rung}-batch-{batch}-trial-{group[0].number}"
            try:
                self._run(group, rung, place)
            except DivergedError as error:  # of all runs
                self.error = self.error or error
                for one in group:
                    one.value, one.rung = math.inf, rung

    def _run(self, group: Sequence[_Running], rung: int, place: str) -> None:
        many = [one.algorithm for one in group for _ in self.seeds]
        job = self.setting.job(many[0])
        timed = self.unit == budgets.SECONDS
        if not timed:
            each = budgets.costs_of_rungs(job, self.lengths, self.unit)[rung]
            self.cost += len(many) * int(each)
        several = self.seeds * len(group)
        runtime = SweepRuntime(job, algorithms=many, seeds=several)
        length, every = self.lengths[rung], self.lengths[-1]
        begin, outcome, judged = self._reached(group, rung), None, []
        for end in budgets.looks(length, 0 if begin is None else begin.round):
            part = f"{place}-round-{end}"
            outcome = execute(
                runtime,
                end,
                measure_every=every,
                checkpoints=self.keeping and self.keeping.part(part),
                watch=self.watch,
                begin=begin,
            )
            self.cost += outcome.seconds["run"] if timed else 0
            begin = Snapshot(outcome.state, {}, end, {})
            judged.append(self._judgments(job, outcome.state, outcome.columns))
        assert outcome is not None  # a trial is judged at least once
        found = single_outcomes(runtime, outcome, NEVER, length, every)
        errors = [one if isinstance(one, DivergedError) else None for one in found]
        self.error = self.error or next(filter(None, errors), None)
        values = np.mean(judged, axis=0)
        failed = np.asarray([one is not None for one in errors])
        values = np.where(failed | ~np.isfinite(values), np.inf, values)
        for turn, one in enumerate(group):
            own = slice(turn * len(self.seeds), (turn + 1) * len(self.seeds))
            one.by_seed, one.rung = tuple(values[own].tolist()), rung
            one.value = float(np.mean(values[own]))
            one.state = jax.tree.map(lambda leaf, own=own: leaf[own], outcome.state)

    def _reached(self, group: Sequence[_Running], rung: int) -> Snapshot | None:
        """Return where the last rung ended, of all trials of a group and all seeds."""
        if rung == 0:
            return None
        states = [one.state for one in group]
        state = jax.tree.map(lambda *leaves: np.concatenate(leaves), *states)
        return Snapshot(state, {}, self.lengths[rung - 1], {})

    def _judgments(
        self, job: Job, state: SweepState, columns: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return what every run came to, by the rows held out or by a column."""
        if self.judged is not None:
            return held_out_losses(job, self.judged, state.state)
        if self.judged_by not in columns:
            raise unknown_name("headline", self.judged_by, columns)
        return np.asarray(columns[self.judged_by][-1], float)

    def concluded(
        self,
        trials: Sequence[_Running],
        candidates: Search | Sequence[AbstractAlgorithm],
    ) -> Tuned:
        """Take the best of those that came farthest."""
        finite = [one for one in trials if math.isfinite(one.value)]
        if not finite:
            if self.error is not None:
                raise self.error
            raise InvalidInputError(
                f"all {len(trials)} trials diverged. Search smaller steps."
            )
        last = max(one.rung for one in finite)
        longest = [one for one in trials if one.rung == last]
        best = min(longest, key=lambda one: one.value)
        if isinstance(candidates, Search):
            best = longest[candidates.best([(o.point, o.value) for o in longest])]
        every = [
            Trial(o.algorithm, o.value, self.lengths[o.rung], o.point, o.by_seed)
            for o in trials
        ]
        about = (self.judged_by, tuple(self.seeds), round(self.cost, 3), self.unit)
        return Tuned(best.algorithm, best.point, every, *about)


def _alike(trials: Sequence[_Running]) -> list[list[_Running]]:
    """Group trials whose algorithms differ in numbers only."""
    groups: list[tuple[Any, list[_Running]]] = []
    for one in trials:
        static = eqx.filter(one.algorithm, eqx.is_array, inverse=True)
        alike = (many for other, many in groups if eqx.tree_equal(static, other))
        members = next(alike, None)
        if members is None:
            groups.append((static, members := []))
        members.append(one)
    return [members for _, members in groups]


def _count_kept(path: Path, asked: dict[str, Any]) -> int:
    """Return how many trials a search began with, if its budget was the same."""
    with naming_damage(path):
        held = json.loads(path.read_text())
        count, begun = held["trials"], {name: held[name] for name in asked}
        if type(count) is not int or count < 1:
            raise ValueError(f"{count!r:.40} trials")
        held = f"{begun['budget']:g} {begun['unit']}"
    if begun != asked:
        raise CheckpointError(
            f"{path.parent} holds a search with a budget of {held}, not of "
            f"{asked['budget']:g} {asked['unit']}. Continue with the budget of its "
            "start, or choose a new folder."
        )
    return count
