"""Costs of a search: how long its rungs are, and how many trials a budget pays for."""

from collections.abc import Sequence

import numpy as np

from fedbilevel.errors import DivergedError, InvalidInputError
from fedbilevel.runtime import Job, Ledger, SweepRuntime, execute

KEPT = 3  # one of so many continues
_MOST_TRIALS = 81  # of a cheap method beside a dear one
SECONDS = "seconds"
UNITS = ("samples", "bytes", SECONDS)  # of a budget
_TIMED = 8  # rounds by which the seconds of a trial are forecast


def lengths_of(rounds: int, rungs: int) -> list[int]:
    """Return after how many rounds each rung ends."""
    if rounds < 1 or rungs < 1:
        raise InvalidInputError(
            f"rounds={rounds}, rungs={rungs}: both must be at least 1."
        )
    ends = [rounds // KEPT ** (rungs - 1 - rung) for rung in range(rungs)]
    return sorted({max(end, 1) for end in ends})


def counts_of(trials: int, rungs: int) -> list[int]:
    """Return how many trials each rung has."""
    return [-(-trials // KEPT**rung) for rung in range(rungs)]


def costs_of_rungs(job: Job, lengths: Sequence[int], unit: str) -> np.ndarray:
    """Return what a run costs in each rung."""
    if unit == SECONDS:
        return _seconds_of_round(job) * np.diff(lengths, prepend=0)
    every = Ledger(job).cumulative(job.key, lengths[-1])[unit]
    return np.diff(every[np.asarray(lengths) - 1], prepend=0)


def _seconds_of_round(job: Job) -> float:
    """Return the seconds of a round, of a second run: the first one compiles."""
    try:
        runtime = SweepRuntime(job, seeds=[0])
        spent = [execute(runtime, _TIMED).seconds["run"] for _ in range(2)]
    except DivergedError:
        return 0.0
    return spent[-1] / _TIMED


def together(by_rung: np.ndarray, trials: int, seeds: int) -> float:
    """Return what so many trials cost, each from so many seeds."""
    return seeds * np.dot(counts_of(trials, len(by_rung)), by_rung).item()


def affordable(by_rung: np.ndarray, seeds: int, budget: float) -> int:
    """Return how many trials cost no more than that, at least one."""
    count = 1
    while count < _MOST_TRIALS and together(by_rung, count + 1, seeds) <= budget:
        count += 1
    return count
