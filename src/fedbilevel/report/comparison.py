"""Ranks algorithms by a metric over several seeds, and by what it cost to get there."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from fedbilevel.report.tables import show
from fedbilevel.result import Result

__all__ = [
    "Standing",
    "default_target",
    "ranking",
    "ranking_table",
    "seconds",
    "stacked",
    "trials_table",
]

Results = Mapping[str, Sequence[Result]]
_COUNTED = ("exchanges", "bytes", "samples")
_SHOWN = 9  # trials of an algorithm in a table; a file has all of them


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
    """Return what a tenth of the way from the best end to the worst beginning is."""
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
        first = reached[0]
        costs["rounds"] = int(
            stacked([r.columns["round"] for r in many])[:, first].max()
        )
        for kind in _COUNTED:
            at = stacked([result.columns[kind] for result in many])[:, first]
            costs[kind] = round(float(np.mean(at)))
        costs["seconds"] = float(np.mean(stacked([seconds(r) for r in many])[:, first]))
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


def ranking_table(standings: Sequence[Standing], metric: str, target: float) -> Table:
    """Return a ranking for a terminal, best first."""
    seeds = standings[0].seeds
    table = Table(
        title=f"{metric} after the last round, mean +- deviation of {seeds} seeds; "
        f"and the cost of reaching {target:.4g}",
        title_justify="left",
        # Bars between the columns would not leave room for them in 80 characters.
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("algorithm", no_wrap=True)
    for heading in (metric, "exchanges", "MB", "samples", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in standings:
        megabytes = None if one.bytes is None else one.bytes / 1e6
        table.add_row(
            one.algorithm,
            f"{one.mean:.4g} +- {one.spread:.1g}",
            show(one.exchanges),
            _short(megabytes),
            show(one.samples),
            _short(one.seconds),
        )
    return table


def _short(value: float | None) -> str:
    if value is None:
        return show(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def trials_table(
    trials: Mapping[str, Sequence[tuple[Mapping[str, str], float, int]]], metric: str
) -> Table:
    """Return the options tried for each algorithm, and what came of them.

    First is the best of those that ran longest.
    """
    table = Table(title=f"{metric} of what was tried", title_justify="left")
    table.add_column("algorithm")
    table.add_column("options")
    table.add_column("rounds", justify="right")
    table.add_column(metric, justify="right")
    for name, many in trials.items():
        ordered = sorted(
            many, key=lambda one: (not np.isfinite(one[1]), -one[2], one[1])
        )
        for place, (options, end, rounds) in enumerate(ordered[:_SHOWN]):
            told = " ".join(f"{key}={value}" for key, value in options.items())
            value = f"{end:.4g}" if np.isfinite(end) else "diverged"
            table.add_row("" if place else name, told, str(rounds), value)
        if ordered[_SHOWN:]:
            worse = f"{len(ordered) - _SHOWN} more, which ended earlier or worse"
            table.add_row("", worse, "", "")
        table.add_section()
    return table
