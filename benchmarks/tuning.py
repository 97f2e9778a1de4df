"""Sets the tuner against a full grid that costs four times as much, task by task.

    python benchmarks/tuning.py [--repeats N] [NAME ...]

Both search the same ranges, from the same seeds, by the same judge, which are fixed
before anything runs: upper rows that are held out, or the exact gradient of a task
that has no rows, averaged over the last tenth of a trial. The grid has the ends of the
ranges, and runs all of its points to the end.

The least of more values is lower by luck alone, so values found while searching are not
compared. The point that each takes runs again from other seeds, the same for both, and
is judged as before. Told is how far the tuner's mean is above that of the grid, with
the standard error of the difference: 1 % is wanted. Repeats are searches from other
seeds again. Steps are what a run measures, or the task's numbers, times what is
searched.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np

from fedbilevel.experiments import Experiment
from fedbilevel.experiments.tuning import Tuning, search_of
from fedbilevel.runtime import configure
from fedbilevel.studies.searching import Range, Search, Values
from fedbilevel.studies.setting import Setting
from fedbilevel.studies.tuning import Tuned, tuned, tuning_seeds

ROUNDS = {
    "quadratic": 90,
    "minimax": 90,
    "regularization": 90,
    "loss-tuning": 45,
    "cleaning": 45,
    "representation": 45,
    "fairness": 45,
}
TASKS = {
    task: Experiment(task, "fedbio", 4, rounds=n, local_steps=5)
    for task, n in ROUNDS.items()
}
TIMES = 4  # what the grid may cost, by what the tuner does
WITHIN = 0.01
JUDGING = {"quadratic": 256, "minimax": 256}  # seeds; these are noisy, and quick
FEW = 16


def grid_of(search: Search, points: int) -> Search:
    """Return the largest full grid of a search with at most so many points."""
    side = int(points ** (1 / len(search.space)) + 1e-9)
    lists = {
        name: Values(tuple(one.at(share) for share in np.linspace(0, 1, side)))
        for name, one in search.space.items()
        if isinstance(one, Range)
    }
    return Search(search.make, lists)


def judged(
    setting: Setting, found: Sequence[Tuned], rounds: int, seeds: Sequence[int]
) -> np.ndarray:
    """Return what the points that were taken come to, from each of other seeds."""
    trials = tuned(setting, [one.algorithm for one in found], rounds, seeds).trials
    return np.asarray([trial.by_seed for trial in trials])


def measure(name: str, plan: Experiment, repeat: int) -> float:
    asked = Tuning()
    task, values, given = plan.build_task()
    built = plan.bind(task, values)
    usual, count = task.recommended, task.data.clients
    named = search_of(plan, built.entry, usual, count, given)
    search = named.search(asked.trials, asked.sampler)
    assert search is not None
    seeds = tuning_seeds([100 * repeat], asked.seeds)
    began = time.perf_counter()
    quick = tuned(built.setting, search, built.rounds, seeds)
    between = time.perf_counter()
    grid = grid_of(search, TIMES * asked.trials)
    full = tuned(built.setting, grid, built.rounds, seeds)
    ended = time.perf_counter()
    others = [10_000 + seed for seed in range(JUDGING.get(name, FEW))]
    ends = judged(built.setting, [quick, full], built.rounds, others)
    print(f"{name}: judged by {quick.judged_by}, {len(others)} other seeds")
    for title, found, seconds, own in (
        ("tuner", quick, between - began, ends[0]),
        ("grid", full, ended - between, ends[1]),
    ):
        print(
            f"  {title}: {len(found.trials)} trials, {found.cost:,} {found.unit}, "
            f"{seconds:.0f} s; {np.mean(own):.5g} +- "
            f"{np.std(own, ddof=1) / len(own) ** 0.5:.2g}; "
            f"{named.options(found.point)}",
            flush=True,
        )
    apart = np.mean(ends[0]) / np.mean(ends[1]) - 1
    ratio = (ends[0] - (1 + apart) * ends[1]) / np.mean(ends[1])
    error = np.std(ratio, ddof=1) / len(others) ** 0.5
    print(f"  apart by {apart:+.1%} +- {error:.1%}", flush=True)
    return float(apart)


def main() -> None:
    configure()
    words, repeats = sys.argv[1:], 1
    if words[:1] == ["--repeats"]:
        repeats, words = int(words[1]), words[2:]
    names, within = words or list(TASKS), 0
    for name in names:
        apart = [measure(name, TASKS[name], repeat) for repeat in range(repeats)]
        print(f"{name}: {np.median(apart):+.1%}, median of {repeats}", flush=True)
        within += np.median(apart) <= WITHIN
    print(f"within {WITHIN:.0%} of the grid: {within} of {len(names)}")


if __name__ == "__main__":
    main()
