"""Ranks algorithms by a metric over several seeds, and by what it cost to get there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from fedbilevel.result import Result

Results = Mapping[str, Sequence[Result]]
FEWEST = 5  # seeds of an interval
_COUNTED = ("exchanges", "bytes", "samples")
_RANKED_AT = (*_COUNTED, "seconds")


@dataclass(frozen=True)
class Standing:
    """One algorithm in a ranking: lower is better.

    `spread` is the standard deviation over seeds, None of a single one. `margin` is
    half of the mean's 95 % t interval, None of fewer than five. Rounds, exchanges,
    bytes, samples and seconds are those from which on the mean over seeds stays at the
    target or below; None if it ends above. `bound` says where samples are "at most" or
    "at least" that many.
    """

    algorithm: str
    mean: float
    spread: float | None
    margin: float | None
    seeds: int
    rounds: int | None
    exchanges: int | None
    bytes: int | None
    samples: int | None
    seconds: float | None
    bound: str = ""


def default_target(results: Results, metric: str) -> float:
    """Return the best end plus a tenth of its distance to the worst beginning.

    They begin before the first round, where that was measured.
    """
    best = min(_mean(many, metric)[-1] for many in results.values())
    firsts = [[one.from_start[metric][0] for one in many] for many in results.values()]
    worst = max(np.mean(first) for first in firsts)
    return float(best + 0.1 * (worst - best))


def ranking(
    results: Results, metric: str, target: float, equal: str = "trials"
) -> list[Standing]:
    """Rank algorithms by the final mean of a metric over seeds.

    With `equal` samples, bytes or seconds it is their mean at what all of them took.
    """
    most = equal_cost(results, equal)
    standings = [
        _standing(n, many, metric, target, _last(many, equal, most))
        for n, many in results.items()
    ]
    # Diverged runs are last, not first.
    return sorted(standings, key=lambda s: (not np.isfinite(s.mean), s.mean))


def equal_cost(results: Results, equal: str) -> float:
    """Return what all took of samples, bytes or seconds, if it is not zero."""
    if equal not in _RANKED_AT:
        return np.inf
    ends = [_costs(many, equal)[-1] for many in results.values()]
    return min((float(end) for end in ends if end > 0), default=np.inf)


def cost_said(results: Results, equal: str) -> str:
    """Say at what equal cost a ranking is; nothing if it is after the last round."""
    most = equal_cost(results, equal)
    return f"at {_amount(most)} {equal}" if np.isfinite(most) else ""


def sample_bound(results: Iterable[Result]) -> str:
    """Return "at most" where samples of a branch were counted that may not have run."""
    found = set()
    for one in results:
        kinds = one.counts.get("bounds")
        if isinstance(kinds, dict):
            found |= {str(b) for name, b in kinds.items() if name.endswith("_samples")}
    return ", ".join(sorted(found))


def tuning_said(spent: Any) -> str:
    """Say how much tuning there was, as results recorded it; nothing if none was."""
    if not isinstance(spent, dict) or not isinstance(spent.get("cost"), int | float):
        return ""
    budget, unit = spent.get("budget"), spent.get("unit")
    allowed = f" of {_amount(budget)}" if isinstance(budget, int | float) else ""
    return f"{spent.get('trials')} trials, {_amount(spent['cost'])}{allowed} {unit}"


def _amount(cost: float) -> str:
    return f"{cost:.3g}" if cost < 999.5 else f"{cost:,.0f}"


def _last(many: Sequence[Result], equal: str, most: float) -> int:
    """Return the last measurement at no more than this cost, the first at least."""
    if equal not in _RANKED_AT:
        return -1
    return max(int(np.searchsorted(_costs(many, equal), most, side="right")) - 1, 0)


def _costs(many: Sequence[Result], kind: str) -> np.ndarray:
    found = [seconds(r) if kind == "seconds" else r.columns[kind] for r in many]
    return stacked(found).mean(axis=0)


def _standing(
    name: str, many: Sequence[Result], metric: str, target: float, last: int
) -> Standing:
    ends = stacked([result.columns[metric] for result in many])[:, last]
    # Not the first touch: a mean of few seeds may be low by luck.
    above = np.flatnonzero(~(_mean(many, metric) <= target))
    reached = int(above[-1]) + 1 if len(above) else 0
    spread = float(np.std(ends, ddof=1)) if len(ends) > 1 else None
    half = margin(ends)
    costs: dict[str, Any] = dict.fromkeys(("rounds", "seconds", *_COUNTED))
    if reached < max(len(one.columns[metric]) for one in many):

        def at(columns: Sequence[np.ndarray]) -> np.ndarray:
            return stacked(columns)[:, reached]

        costs["rounds"] = int(at([one.columns["round"] for one in many]).max())
        costs["seconds"] = float(at([seconds(one) for one in many]).mean())
        for kind in _COUNTED:
            costs[kind] = round(float(at([r.columns[kind] for r in many]).mean()))
    about = (spread, None if half is None else float(half), len(ends))
    bound = sample_bound(many)
    return Standing(name, float(np.mean(ends)), *about, **costs, bound=bound)


def margin(values: np.ndarray) -> np.ndarray | None:
    """Return half the 95 % t interval of a mean over the first axis, from 5 values on.

    A deviation of fewer says too little: with two values the interval is 13 times it.
    """
    count = len(values)
    if count < FEWEST:
        return None
    return t_quantile(count - 1) * np.std(values, axis=0, ddof=1) / np.sqrt(count)


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, to three digits from 4 degrees on.

    By the expansion in 1/freedom (Abramowitz and Stegun, 26.7.5).
    """
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def about_seeds(seeds: int) -> str:
    """Say what a mean is of, and what follows it."""
    if seeds == 1:
        return "one seed"
    if seeds < FEWEST:
        return f"mean of {seeds} seeds (intervals need {FEWEST})"
    return f"mean of {seeds} seeds with its 95 % t interval"


def _mean(many: Sequence[Result], metric: str) -> np.ndarray:
    return stacked([result.columns[metric] for result in many]).mean(axis=0)


def stacked(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return columns as rows of one array; what ended early stays at its last value."""
    longest = max(len(column) for column in columns)
    return np.stack(
        [np.pad(one, (0, longest - len(one)), mode="edge") for one in columns]
    )


def seconds(result: Result) -> np.ndarray:
    """Return the seconds until each measurement, spread evenly over the rounds."""
    return seconds_at(result, result.columns["round"])


def seconds_at(result: Result, rounds: np.ndarray) -> np.ndarray:
    """Return the seconds until the ends of these rounds."""
    return result.seconds["run"] * rounds / rounds[-1]
