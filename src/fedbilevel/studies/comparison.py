"""Several algorithms in one setting: same data, start, samples and cohorts for all.

Each may be tuned first, by `tuning`, with other random seeds than those compared: with
as many trials as it asks for, or all at the cost of the dearest search.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Any

import jax
import numpy as np

from fedbilevel._files import naming_damage, write_atomically
from fedbilevel._folders import COMPARED, TUNING
from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.errors import DivergedError, InvalidInputError, unknown_name
from fedbilevel.problem import ClientData, Data, Problem
from fedbilevel.result import Result
from fedbilevel.runtime import Job, Sampling, Stopping, SweepRuntime, Watch
from fedbilevel.runtime.compilation import in_background
from fedbilevel.runtime.contract import Span
from fedbilevel.runtime.driver import NEVER
from fedbilevel.runtime.program import measured_at_start
from fedbilevel.studies.budgets import EQUAL, SECONDS, TRIALS, lengths_of, together
from fedbilevel.studies.presented import Comparison
from fedbilevel.studies.searching import Search
from fedbilevel.studies.seeds import compile_seeds, run_seeds, warm_up
from fedbilevel.studies.setting import Keeping, Setting
from fedbilevel.studies.single import warn_of_events
from fedbilevel.studies.tuning import Tuned, costs_of_trial, tuned, tuning_seeds
from fedbilevel.studies.validation import HELD_OUT

_TIMED = "timed.json"  # in its folder: the seconds of a trial, by method


@dataclass(frozen=True)
class Contender:
    """An algorithm of a comparison: one of `candidates`, or several to be tuned over.

    They are a sequence, or a `Search`. With `pools` it runs on the rows of all clients,
    as if they could be moved.
    """

    candidates: Search | Sequence[AbstractAlgorithm]
    pools: bool = False

    @staticmethod
    def of(given: Any) -> "Contender":
        """Take a contender, an algorithm, or candidates."""
        if isinstance(given, Contender):
            return given
        if isinstance(given, Search):
            return Contender(given)
        alone = isinstance(given, AbstractAlgorithm)
        return Contender((given,) if alone else tuple(given))

    @property
    def alone(self) -> AbstractAlgorithm | None:
        """The algorithm where there is nothing to tune."""
        many = self.candidates
        return None if isinstance(many, Search) or len(many) != 1 else many[0]

    @property
    def limited(self) -> Search | None:
        """The search that a budget limits; lists are tried as they are given."""
        many = self.candidates
        return many if isinstance(many, Search) and not many.is_list else None

    def placed(self, setting: Setting) -> Setting:
        """Return the setting with all rows in one place, for methods that allow it."""
        if not self.pools or not isinstance(setting.data, ClientData):
            return setting
        alone = {"participants": None, "participation": None}
        sampling = replace(setting.sampling, **alone)
        return replace(setting, data=setting.data.pooled(), sampling=sampling)


def compare(
    problem: Problem,
    data: Data,
    start: tuple[Upper, Lower],
    algorithms: Mapping[str, Any],
    *,
    rounds: int,
    seeds: Sequence[int] = tuple(range(5)),
    headline: str = "upper_loss",
    tuned_by: str = HELD_OUT,
    sampling: Sampling | None = None,
    metrics: Metrics | None = None,
    channel: Channel = PLAIN,
    measure_every: int | None = 1,
    stopping: Stopping = NEVER,
    equal: str = TRIALS,
    keeping: Keeping | None = None,
    watch: Watch | None = None,
) -> Comparison:
    """Run every algorithm from the same seeds.

    `algorithms` has, by name, an algorithm, a list of candidates or a `Search`, which
    are tuned over first, or a `Contender`. `tuned_by` is the headline of `tune`. With
    `equal` "samples", "bytes" or "seconds" searches have as many trials as cost what
    the dearest does, whatever the order; `config` of results has what each took. The
    seeds of an algorithm are one compiled program. With `keeping` results are saved as
    they come, and a comparison that was interrupted can be resumed: what is there is
    not run again. Every round is measured, so that costs are those of the round that
    reached a value; a `measure_every` of None measures as seldom as `run` does.
    """
    drawn = sampling or Sampling()
    setting = Setting(problem, data, start, metrics, headline, drawn, channel, tuned_by)
    contenders = {name: Contender.of(one) for name, one in algorithms.items()}
    found = compared(
        setting,
        contenders,
        rounds,
        seeds,
        equal=equal,
        keeping=keeping,
        measure_every=measure_every,
        stopping=stopping,
        watch=watch,
    )
    warn_of_events([one for many in found.results.values() for one in many])
    return found


def compared(
    setting: Setting,
    contenders: Mapping[str, Contender],
    rounds: int,
    seeds: Sequence[int],
    *,
    equal: str = TRIALS,
    keeping: Keeping | None = None,
    about: Callable[[str], None] = lambda name: None,
    tuning: Mapping[str, int] | None = None,
    watch: Watch | None = None,
    task: str = "custom",
    config: Mapping[str, Any] | None = None,
    **how: Any,
) -> Comparison:
    """Compare in a setting; `about(name)` is called before each of them.

    `tuning` has the `rungs` of a search, and its number of seeds, `count`. `how` says
    when runs are measured, and when they stop.
    """
    if not contenders or not seeds:
        raise InvalidInputError(
            "a comparison needs at least one algorithm and one seed."
        )
    if keeping is not None:
        keeping.opened()
    found = Comparison(setting.headline, equal=equal)
    settings = {name: one.placed(setting) for name, one in contenders.items()}
    searches = _Searches(rounds, seeds, keeping, equal, **(tuning or {}))
    searches.limit(settings, contenders)
    home = None if keeping is None else Path(keeping.folder)
    done = {name: _finished(home and home / name, seeds) for name in contenders}
    if home is not None and None in done.values():
        (home / COMPARED).unlink(missing_ok=True)
    jobs = {
        name: settings[name].job(one.alone)
        for name, one in contenders.items()
        if one.alone is not None and done[name] is None
    }
    ready = _compiled(jobs, rounds, seeds, how)
    for name, contender in contenders.items():
        about(name)
        here, finished = settings[name], done[name]
        if finished is not None:
            found.results[name] = finished
            searches.recall(name, contender, here)
            continue
        try:
            best = searches.best(name, contender, here, watch)
            runtime, first = ready.get(name) or compile_seeds(
                here.job(best), rounds, seeds, **how
            )
            warm_up(runtime, first)
            made = run_seeds(
                runtime.job,
                rounds,
                seeds,
                runtime=runtime,
                checkpoints=keeping and keeping.part(name),
                watch=watch,
                task=task,
                config={**(config or {}), **searches.spent(name)},
                **how,
            )
            start = measured_at_start(runtime.job)
            made = [replace(result, start=start) for result in made]
            found.results[name] = made
        except DivergedError as error:
            found.diverged[name] = error
            continue
        if home is not None:
            for result in made:
                result.save(home / name / f"seed-{result.config['seed']}")
    found.tuned.update(searches.tuned)
    if not found.results:
        raise next(iter(found.diverged.values()))
    if home is not None:
        # This file shows that all have finished.
        failed = {name: str(error) for name, error in found.diverged.items()}
        summary = {"metric": found.headline, "equal": equal, "diverged": failed}
        write_atomically(home / COMPARED, json.dumps(summary))
    return found


def _compiled(
    jobs: Mapping[str, Job],
    rounds: int,
    seeds: Sequence[int],
    how: Mapping[str, Any],
) -> dict[str, tuple[SweepRuntime, Span]]:
    """Compile the programs of methods that are not tuned, all at the same time.

    One program is compiled on one core: five methods of the `representation` task take
    120 s on an H200 one after the other. Nothing compiles beside a run: its seconds
    would depend on the order of the methods.
    """
    # Processes that joined must compile in the same order.
    if len(jobs) < 2 or jax.process_count() > 1:
        return {}
    made, free = {name: Future() for name in jobs}, Semaphore(os.cpu_count() or 1)

    def compile_one(job: Job) -> tuple[SweepRuntime, Span]:
        with free:
            return compile_seeds(job, rounds, seeds, **how)

    for name, job in jobs.items():
        in_background(partial(compile_one, job), made[name])
    wait(made.values())
    # An error here occurs again in the run, and is raised there.
    return {name: one.result() for name, one in made.items() if not one.exception()}


def _finished(folder: Path | None, seeds: Sequence[int]) -> list[Result] | None:
    """Return the results of an algorithm that an earlier comparison finished."""
    places = [] if folder is None else [folder / f"seed-{seed}" for seed in seeds]
    if not places or not all((place / "result.json").exists() for place in places):
        return None
    return [Result.load(place) for place in places]


class _Searches:
    """Tunes one contender after the other, all with as many trials or at one cost."""

    def __init__(
        self,
        rounds: int,
        seeds: Sequence[int],
        keeping: Keeping | None,
        equal: str = TRIALS,
        rungs: int = 1,
        count: int = 2,
    ) -> None:
        if equal not in EQUAL:
            raise unknown_name("kind of equal budget", equal, EQUAL)
        self.unit = "samples" if equal == TRIALS else equal
        self.equal = equal
        self.rounds, self.rungs, self.keeping = rounds, rungs, keeping
        self.seeds = tuning_seeds(seeds, count)
        self.budget: float | None = None
        self.by_rung: dict[str, np.ndarray] = {}
        self.tuned: dict[str, Tuned] = {}

    def limit(
        self, settings: Mapping[str, Setting], contenders: Mapping[str, Contender]
    ) -> None:
        """Let searches cost what the dearest does, be it finished already or not.

        Each is timed once: a comparison that is resumed has the seconds of its start.
        """
        if self.equal == TRIALS:
            return
        path = None
        if self.keeping is not None and self.unit == SECONDS:
            path = Path(self.keeping.folder) / _TIMED
        held = _timed(path) if path and path.exists() else {}
        lengths = lengths_of(self.rounds, self.rungs)
        for name, one in contenders.items():
            if one.limited is None:
                continue
            if name not in held or held[name][0] != lengths:
                about = (settings[name], one.limited, lengths, self.unit)
                held[name] = lengths, costs_of_trial(*about)
            by_rung = held[name][1]
            cost = together(by_rung, one.limited.count, len(self.seeds))
            self.by_rung[name], self.budget = by_rung, max(self.budget or 0, cost)
        if path:
            plain = {name: [ends, many.tolist()] for name, (ends, many) in held.items()}
            write_atomically(path, json.dumps(plain))

    def spent(self, name: str) -> dict[str, Any]:
        """Return what is recorded with the results of one that was tuned."""
        return {"tuning": self.tuned[name].spent()} if name in self.tuned else {}

    def recall(self, name: str, contender: Contender, setting: Setting) -> None:
        """Note the trials of a finished search again, from what was kept of it."""
        kept = self._kept(name)
        if kept is not None and kept.resume:
            self.best(name, contender, setting, None)

    def best(
        self, name: str, contender: Contender, setting: Setting, watch: Watch | None
    ) -> AbstractAlgorithm:
        """Return the best of the candidates; note the trials."""
        if contender.alone is not None:
            return contender.alone
        found = tuned(
            setting,
            contender.candidates,
            self.rounds,
            self.seeds,
            rungs=self.rungs,
            budget=None if contender.limited is None else self.budget,
            unit=self.unit,
            by_rung=self.by_rung.get(name),
            keeping=self._kept(name),
            watch=watch,
        )
        if found.budget is not None:
            found = replace(found, budget=round(found.budget, 3))
        self.tuned[name] = found
        return found.algorithm

    def _kept(self, name: str) -> Keeping | None:
        if self.keeping is None:
            return None
        folder = Path(self.keeping.folder) / name / TUNING
        study = self.keeping.folder
        return replace(self.keeping, folder=folder, resume=folder.exists(), study=study)


def _timed(path: Path) -> dict[str, tuple[list[int], np.ndarray]]:
    """Read after which rounds rungs end, and what a trial takes in each, by method."""
    with naming_damage(path):
        held = json.loads(path.read_text())
        found = {n: (list(ends), np.asarray(s, float)) for n, (ends, s) in held.items()}
        for ends, seconds in found.values():
            if seconds.shape != (len(ends),) or not (seconds >= 0).all():
                raise ValueError(f"{len(ends)} rungs do not take {seconds} s")
        return found
