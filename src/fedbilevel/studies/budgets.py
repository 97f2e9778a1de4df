"""Costs of a search: how long its rungs are, and how many trials a budget pays for."""

from collections.abc import Sequence

import numpy as np

from fedbilevel.errors import DivergedError, InvalidInputError
from fedbilevel.runtime import Job, Ledger, SweepRuntime, execute

KEPT = 3  # one of so many continues
_MOST_TRIALS = 81  # of a cheap method beside a dear one
SECONDS = "seconds"
UNITS = ("samples", "bytes", SECONDS)  # of a budget
TRIALS = "trials"
EQUAL = (TRIALS, *UNITS)  # what searches of a comparison may have alike
_LOOKS, _APART = 5, 45  # times a trial is judged, one of so many of its rounds apart
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


def looks(rounds: int, begun: int = 0) -> list[int]:
    """Return after which rounds a trial is judged: five, over its last tenth.

    The mean of them counts. A single one may be low by luck, or because a run swings
    through its goal just then.
    """
    apart = max(rounds // _APART, 1)
    ends = [rounds - number * apart for number in reversed(range(_LOOKS))]
    return [end for end in ends if end > begun]


def costs_of_rungs(job: Job, lengths: Sequence[int], unit: str) -> np.ndarray:
    """Return what a run costs in each rung."""
    if unit == SECONDS:
        by_round, by_look = _seconds_of_round(job)
        begun = [0, *lengths[:-1]]
        many = [len(looks(*rung)) for rung in zip(lengths, begun, strict=True)]
        return by_round * np.diff(lengths, prepend=0) + by_look * np.asarray(many)
    every = Ledger(job).cumulative(job.key, lengths[-1])[unit]
    return np.diff(every[np.asarray(lengths) - 1], prepend=0)


def _seconds_of_round(job: Job) -> tuple[float, float]:
    """Return the seconds of a round and of a measurement, which a trial makes rarely.

    They are of second runs: the first ones compile.
    """
    try:
        runtime = SweepRuntime(job, seeds=[0])
        dense, sparse = (
            [execute(runtime, _TIMED, measure_every=every) for _ in range(2)][-1]
            for every in (1, _TIMED)
        )
    except DivergedError:
        return 0.0, 0.0
    spent = sparse.seconds["run"]
    by_look = max(dense.seconds["run"] - spent, 0.0) / (_TIMED - 1)
    return max(spent - by_look, 0.0) / _TIMED, by_look


def together(by_rung: np.ndarray, trials: int, seeds: int) -> float:
    """Return what so many trials cost, each from so many seeds."""
    return seeds * np.dot(counts_of(trials, len(by_rung)), by_rung).item()


def affordable(by_rung: np.ndarray, seeds: int, budget: float) -> int:
    """Return how many trials cost no more than that, at least one."""
    count = 1
    while count < _MOST_TRIALS and together(by_rung, count + 1, seeds) <= budget:
        count += 1
    return count
