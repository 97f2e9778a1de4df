"""Tunes a named experiment: its steps and weights, or the options that have ranges."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedbilevel import algorithms
from fedbilevel._folders import SEARCH, TUNED, check_place, require_new
from fedbilevel.algorithms import AbstractAlgorithm, Entry
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.options import options_of
from fedbilevel.experiments.run_folder import (
    require_same_search,
    run_command,
    write_json,
)
from fedbilevel.experiments.searching import NamedSearch, Tuning
from fedbilevel.runtime import Watch
from fedbilevel.studies.setting import Keeping
from fedbilevel.studies.tuning import Tuned, tuned, tuning_seeds


@dataclass(frozen=True)
class NamedTuned:
    """The result of tuning, by names: the `experiment` with the chosen options.

    `trials` has the options of every trial, its mean judgment and its rounds.
    """

    found: Tuned
    experiment: Experiment
    options: dict[str, str]
    trials: list[tuple[dict[str, str], float, int]]

    @property
    def command(self) -> str:
        """The command for a run with the chosen options."""
        return run_command(asdict(self.experiment), "simulator")

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = self.found
        tried = [
            {"options": options, "value": value, "rounds": rounds}
            for options, value, rounds in self.trials
        ]
        return {
            "task": self.experiment.label,
            "algorithm": self.experiment.algorithm,
            "options": self.options,
            "command": self.command,
            "judged_by": found.judged_by,
            "seeds": list(found.seeds),
            "cost": found.cost,
            "unit": found.unit,
            "trials": tried,
        }


def tune(
    experiment: Experiment,
    tuning: Tuning | None = None,
    *,
    folder: Path | str | None = None,
    watch: Watch | None = None,
) -> NamedTuned:
    """Search options of an experiment's algorithm.

    Those that are given stay, but for ranges, such as 0.01..1, and lists, such as
    4,8,16, which are what is searched. Without any, steps and weights are. With a
    folder the same call continues there where an earlier one was interrupted.
    """
    asked = tuning or Tuning()
    settings = {"experiment": asdict(experiment), "tuning": asdict(asked)}
    folder = None if folder is None else Path(folder)
    if folder is not None:
        _check_folder(folder, settings)
    experiment.check()
    task, values, chosen = experiment.build_task()
    entry = algorithms.find(experiment.algorithm_for(task))
    about = (task.recommended, task.data.clients, chosen)
    named = search_of(experiment, entry, *about)
    search = named.search(asked.trials, asked.sampler)
    if search is None:
        raise InvalidInputError(
            f"there is nothing to tune: {entry.name} has no step or weight that was "
            "left open. Give a range, such as --set KEY=0.01..1."
        )
    middle = named.options(search.proposed(1, ())[0])
    for_task = {n: v for n, v in experiment.options.items() if n not in chosen}
    made = replace(experiment, algorithm=experiment.algorithm or task.algorithm)
    built = replace(made, options={**for_task, **middle}).bind(task, values)
    built.job()  # which warns where the limit will be off
    if folder is not None:
        write_json(folder / SEARCH, settings)
    found = tuned(
        built.setting,
        search,
        built.rounds,
        tuning_seeds([experiment.seed], asked.seeds),
        rungs=asked.rungs,
        keeping=None if folder is None else Keeping(folder, resume=True),
        watch=watch,
    )
    best = named.options(found.point)
    made = replace(made, options={**for_task, **best})
    result = NamedTuned(found, made, best, trials_of(named, found))
    if folder is not None:
        write_json(folder / TUNED, result.summary())
    return result


def search_of(
    experiment: Experiment,
    entry: Entry,
    recommended: Mapping[str, str],
    clients: int,
    chosen: Mapping[str, str],
) -> NamedSearch:
    """Return what is searched of an algorithm, by what a task recommends."""

    def build(options: Mapping[str, str]) -> AbstractAlgorithm:
        one = replace(experiment, algorithm=entry.name, options=options)
        return one.algorithm_by(entry, recommended, clients)

    usual = experiment.steps_of(recommended, entry.name)
    return NamedSearch(build, options_of(entry), usual, chosen)


def trials_of(
    named: NamedSearch, found: Tuned
) -> list[tuple[dict[str, str], float, int]]:
    """Return the options of every trial, what it came to, and its rounds."""
    return [(named.options(t.point), t.value, t.rounds) for t in found.trials]


def _check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise unless a folder is new, or holds this very search."""
    path = folder / SEARCH
    if not path.exists():
        require_new(folder)
        check_place(folder)
    require_same_search(path, settings)
