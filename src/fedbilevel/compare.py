"""Several algorithms on one task: same data, start, samples and cohorts for all.

Each may be tuned first: all combinations of some options are tried, with as many random
seeds as are compared, but others, and the one with the best mean headline is taken.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from fedbilevel import algorithms, tasks
from fedbilevel.errors import InvalidInputError, NonFiniteError, unknown_name
from fedbilevel.experiment import Experiment
from fedbilevel.result import Result
from fedbilevel.runtime.sweep import attempt
from fedbilevel.tasks._base import option_defaults

T = TypeVar("T")

__all__ = ["Comparison", "Trial", "compare"]


class Trial(NamedTuple):
    """Options that were tried, and the mean headline; infinite if a seed diverged."""

    options: dict[str, str]
    value: float


@dataclass(frozen=True)
class Comparison:
    """A result per seed for each algorithm, or where it diverged; and its trials."""

    results: dict[str, list[Result]] = field(default_factory=dict)
    diverged: dict[str, NonFiniteError] = field(default_factory=dict)
    trials: dict[str, list[Trial]] = field(default_factory=dict)


def compare(
    experiment: Experiment,
    names: Sequence[str],
    seeds: int,
    *,
    grid: Mapping[str, Sequence[str]] | None = None,
    watch: Callable[[str], None] = lambda name: None,
    folder: Path | None = None,
) -> Comparison:
    """Run every named algorithm from the same seeds.

    Options of the experiment go to each algorithm that knows them; `name.option` goes
    to one alone. So do those of the `grid`, each with the values to try. The seeds of
    an algorithm are one compiled program, and so are its trials; with a folder its
    results are saved there before the next one starts.
    """
    if not names or len(set(names)) < len(names) or seeds < 1:
        raise InvalidInputError(
            f"algorithms={','.join(names)}, seeds={seeds}: name each algorithm once, "
            "and ask for at least one seed."
        )
    known = {name: set(algorithms.find(name).option_names()) for name in names}
    for_task = set(option_defaults(tasks.find(experiment.task)))
    options = {
        name: _for_one(experiment.options, name, known, for_task) for name in names
    }
    points = {name: _points(_for_one(grid or {}, name, known, set())) for name in names}
    found = Comparison()
    for name in names:
        watch(name)
        one = replace(experiment, algorithm=name, options=options[name])
        try:
            found.results[name] = _tuned(one, points[name], seeds, found).run_seeds(
                seeds
            )
        except NonFiniteError as error:
            found.diverged[name] = error
            continue
        if folder is not None:
            for result in found.results[name]:
                result.save(folder / name / f"seed-{result.config['seed']}")
    if not found.results:
        raise next(iter(found.diverged.values()))
    return found


def _tuned(
    experiment: Experiment,
    points: Sequence[dict[str, str]],
    seeds: int,
    found: Comparison,
) -> Experiment:
    """Return the experiment with the best point of its grid; note the trials."""
    best = points[0]
    if len(points) > 1:
        unused = range(experiment.seed + seeds, experiment.seed + 2 * seeds)
        trials = _try_all(experiment, points, unused)
        found.trials[str(experiment.algorithm)] = trials
        best = min(trials, key=lambda trial: trial.value).options
    return replace(experiment, options={**experiment.options, **best})


def _points(grid: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    every = itertools.product(*grid.values())
    return [dict(zip(grid, values, strict=True)) for values in every]


def _try_all(
    experiment: Experiment, points: Sequence[dict[str, str]], seeds: Sequence[int]
) -> list[Trial]:
    """Run every point of a grid as one program; tell the headline of each."""
    first = replace(experiment, options={**experiment.options, **points[0]})
    task, job, config = first.job()
    many = [
        replace(first, options={**first.options, **point}).build_algorithm(task)
        for point in points
    ]
    outcomes = attempt(
        job,
        config["rounds"],
        algorithms=[one for one in many for _ in seeds],
        seeds=[*seeds] * len(many),
        measure_every=config["rounds"],
    )
    errors = [one for one in outcomes if isinstance(one, NonFiniteError)]
    if len(errors) == len(outcomes):
        raise errors[0]
    ends = [
        np.inf
        if isinstance(one, NonFiniteError)
        else float(one.columns[task.headline][-1])
        for one in outcomes
    ]
    means = np.reshape(ends, (len(points), len(seeds))).mean(axis=1)
    return [
        Trial(point, float(mean)) for point, mean in zip(points, means, strict=True)
    ]


def _for_one(
    options: Mapping[str, T],
    name: str,
    known: Mapping[str, set[str]],
    for_task: set[str],
) -> dict[str, T]:
    """Return the options that one algorithm, or the task, takes."""
    chosen: dict[str, T] = {}
    for option, value in options.items():
        owner, dot, rest = option.rpartition(".")
        if dot and owner not in known:
            raise unknown_name("algorithm of the option", owner, known)
        takers = for_task.union(*known.values()) if not dot else known[owner]
        if rest not in takers:
            raise unknown_name("option", rest, sorted(takers))
        mine = owner == name if dot else rest in for_task | known[name]
        if mine:
            chosen[rest] = value
    return chosen
