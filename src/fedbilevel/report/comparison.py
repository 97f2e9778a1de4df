"""Ranks algorithms by a metric over several seeds, and by what it cost to get there."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedbilevel.result import Result

Results = Mapping[str, Sequence[Result]]
_COUNTED = ("exchanges", "bytes", "samples")


@dataclass(frozen=True)
class Standing:
    """One algorithm in a ranking: lower is better.

    `spread` is the standard deviation over seeds. Rounds, exchanges, bytes, samples and
    seconds are those until the mean over seeds first reaches the target; None if it
    never does.
    """

    algorithm: str
    mean: float
    spread: float
    seeds: int
    rounds: int | None
    exchanges: int | None
    bytes: int | None
    samples: int | None
    seconds: float | None

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def default_target(results: Results, metric: str) -> float:
    """Return the best end plus a tenth of its distance to the worst beginning."""
    means = [_mean(many, metric) for many in results.values()]
    best, worst = min(m[-1] for m in means), max(m[0] for m in means)
    return float(best + 0.1 * (worst - best))


def ranking(results: Results, metric: str, target: float) -> list[Standing]:
    """Rank algorithms by the final mean of a metric over seeds."""
    standings = [_standing(n, many, metric, target) for n, many in results.items()]
    # What diverged is last, not first.
    return sorted(standings, key=lambda s: (not np.isfinite(s.mean), s.mean))


def _standing(
    name: str, many: Sequence[Result], metric: str, target: float
) -> Standing:
    ends = np.asarray([result.columns[metric][-1] for result in many])
    reached = np.flatnonzero(_mean(many, metric) <= target)
    spread = float(np.std(ends, ddof=1)) if len(ends) > 1 else 0.0
    costs: dict[str, Any] = dict.fromkeys(("rounds", "seconds", *_COUNTED))
    if len(reached):

        def at(columns: Sequence[np.ndarray]) -> np.ndarray:
            return stacked(columns)[:, reached[0]]

        costs["rounds"] = int(at([one.columns["round"] for one in many]).max())
        costs["seconds"] = float(at([seconds(one) for one in many]).mean())
        for kind in _COUNTED:
            costs[kind] = round(float(at([r.columns[kind] for r in many]).mean()))
    return Standing(name, float(np.mean(ends)), spread, len(ends), **costs)


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
    rounds = result.columns["round"]
    return result.seconds["run"] * rounds / rounds[-1]
