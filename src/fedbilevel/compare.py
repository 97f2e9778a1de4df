"""Several algorithms on one task: same data, start, samples and cohorts for all."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedbilevel import algorithms, tasks
from fedbilevel.errors import InvalidInputError, NonFiniteError, unknown_name
from fedbilevel.experiment import Experiment
from fedbilevel.result import Result
from fedbilevel.tasks._base import option_defaults

__all__ = ["compare"]


def compare(
    experiment: Experiment,
    names: Sequence[str],
    seeds: int,
    watch: Callable[[str], None] = lambda name: None,
    folder: Path | None = None,
) -> tuple[dict[str, list[Result]], dict[str, NonFiniteError]]:
    """Run every named algorithm from the same seeds; return a result per seed.

    Options of the experiment go to each algorithm that knows them; `name.option` goes
    to one alone. The seeds of an algorithm are one compiled program; with a folder its
    results are saved there before the next one starts. Algorithms that diverged are
    returned apart, with where they did.
    """
    if not names or len(set(names)) < len(names) or seeds < 1:
        raise InvalidInputError(
            f"algorithms={','.join(names)}, seeds={seeds}: name each algorithm once, "
            "and ask for at least one seed."
        )
    every = {name: _for_one(experiment, name, names) for name in names}
    results, diverged = {}, {}
    for name, one in every.items():
        watch(name)
        try:
            results[name] = one.run_seeds(seeds)
        except NonFiniteError as error:
            diverged[name] = error
            continue
        if folder is not None:
            for result in results[name]:
                result.save(folder / name / f"seed-{result.config['seed']}")
    if not results:
        raise next(iter(diverged.values()))
    return results, diverged


def _for_one(experiment: Experiment, name: str, names: Sequence[str]) -> Experiment:
    known = {other: set(algorithms.find(other).option_names()) for other in names}
    for_task = set(option_defaults(tasks.find(experiment.task)))
    chosen: dict[str, str] = {}
    for option, value in experiment.options.items():
        owner, dot, rest = option.rpartition(".")
        if dot and owner not in known:
            raise unknown_name("algorithm of the option", owner, known)
        takers = for_task.union(*known.values()) if not dot else known[owner]
        if rest not in takers:
            raise unknown_name("option", rest, sorted(takers))
        mine = owner == name if dot else rest in for_task | known[name]
        if mine:
            chosen[rest] = value
    return replace(experiment, algorithm=name, options=chosen)
