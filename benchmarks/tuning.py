"""Sets the tuner against a full grid that may cost four times as much, task by task.

    python benchmarks/tuning.py [NAME ...]

Both search the same ranges, from the same seeds, by the same judge. The grid runs all
of its points to the end. Told is how far the tuner's value, by the judge, is above that
of the grid: 1 % is wanted. That favors the grid where runs are noisy, as the least of
more values is lower by luck. So the point that each takes is run from other seeds, too,
on all rows, and the mean headline of the task is told with its standard error.
"""

import sys
import time

import numpy as np

from fedbilevel.experiments import Experiment
from fedbilevel.experiments.searching import Tuning
from fedbilevel.experiments.tuning import named_search
from fedbilevel.runtime import configure
from fedbilevel.studies.searching import Range, Search, Values
from fedbilevel.studies.tuning import tuned, tuning_seeds

TASKS = {
    "quadratic": Experiment("quadratic", "fedbio", 4, rounds=90, local_steps=5),
    "minimax": Experiment("minimax", "fedbio", 4, rounds=90, local_steps=5),
    "regularization": Experiment(
        "regularization", "fedbio", 4, rounds=90, local_steps=5
    ),
    "loss-tuning": Experiment("loss-tuning", "fedbio", 4, rounds=45, local_steps=5),
    "cleaning": Experiment("cleaning", "fedbio", 4, rounds=45, local_steps=5),
}
RESULT_SEEDS = 8
TIMES = 4  # what the grid may cost, by what the tuner does
WITHIN = 0.01


def grid_of(search: Search, points: int) -> Search:
    """Return the largest full grid of a search with at most so many points."""
    side = int(points ** (1 / len(search.space)))
    shares = (np.arange(side) + 0.5) / side
    lists = {
        name: Values(tuple(one.at(share) for share in shares))
        for name, one in search.space.items()
        if isinstance(one, Range)
    }
    return Search(search.make, lists)


def measure(name: str, plan: Experiment) -> bool:
    asked = Tuning()
    task, values, given = plan.build_task()
    built = plan.bind(task, values)
    named = named_search(plan, task, built.entry, given)
    search = named.search(asked.trials, asked.sampler)
    assert search is not None
    seeds = tuning_seeds(range(RESULT_SEEDS), asked.seeds)
    began = time.perf_counter()
    quick = tuned(built.setting, search, built.rounds, seeds)
    between = time.perf_counter()
    each = quick.cost / (7 * asked.seeds)  # of a run to the end
    grid = grid_of(search, int(TIMES * quick.cost / each / asked.seeds))
    full = tuned(built.setting, grid, built.rounds, seeds, rungs=1)
    ended = time.perf_counter()
    print(f"{name}: judged by {quick.judged_by}, headline {task.headline}")
    best = {}
    for title, found, seconds in (
        ("tuner", quick, between - began),
        ("grid", full, ended - between),
    ):
        longest = max(trial.rounds for trial in found.trials)
        value = min(t.value for t in found.trials if t.rounds == longest)
        best[title] = value
        options = named.options(found.point)
        run = Experiment(**{**vars(plan), "options": {**plan.options, **options}})
        ends = [one.final[task.headline] for one in run.run_seeds(RESULT_SEEDS)]
        print(
            f"  {title}: {len(found.trials)} trials, {found.cost:,} {found.unit}, "
            f"{seconds:.0f} s; value {value:.5g}; headline {np.mean(ends):.5g} +- "
            f"{np.std(ends, ddof=1) / RESULT_SEEDS**0.5:.2g}; {options}",
            flush=True,
        )
    apart = best["tuner"] / best["grid"] - 1
    print(f"  apart by {apart:+.2%}", flush=True)
    return apart <= WITHIN


def main() -> None:
    configure()
    names = sys.argv[1:] or list(TASKS)
    within = [measure(name, TASKS[name]) for name in names]
    print(f"within {WITHIN:.0%} of the grid: {sum(within)} of {len(within)}")


if __name__ == "__main__":
    main()
