"""What a run or a comparison came to, in sentences."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.report.comparison import Standing, default_target, ranking
from fedbilevel.report.tables import show
from fedbilevel.result import Result
from fedbilevel.saved import Saved

__all__ = ["amount", "standings_of", "summary", "title_of"]


def title_of(saved: Saved) -> str:
    """Return what the page is about, in a line."""
    task = saved.every[0].task
    if not saved.compared:
        return f"{next(iter(saved.results))} on {task}"
    count = len(saved.results)
    return f"{count} algorithm{'s' * (count > 1)} compared on {task}"


def standings_of(saved: Saved) -> tuple[list[Standing], float | None]:
    """Return the ranking and the target that its costs are about."""
    if not saved.compared:
        return [], saved.target
    target = saved.target
    if target is None:
        target = default_target(saved.results, saved.headline)
    return ranking(saved.results, saved.headline, target), target


def summary(saved: Saved) -> list[str]:
    """Return the sentences, the most important first."""
    sentences = [saved.unfinished] if saved.unfinished else []
    if saved.compared:
        return sentences + _comparison(saved)
    return sentences + _run(saved.every[0], saved.headline)


def _run(result: Result, headline: str) -> list[str]:
    sentences = [_what_ran(result)]
    sentences += [f"Note: {event}." for event in result.events]
    if result.ended:
        sentences.append(f"It ended {result.ended}.")
    sentences.append(_went(result, headline))
    if "test_accuracy" in result.columns and headline != "test_accuracy":
        sentences.append(f"test_accuracy ended at {_last(result, 'test_accuracy')}.")
    sentences.append(_cost(result))
    counts = result.counts
    if counts.get("epsilon") is not None:
        sentences.append(
            f"What left the sites is private with epsilon {amount(counts['epsilon'])} "
            f"at delta {amount(counts.get('delta'))}."
        )
    return [one for one in sentences if one]


def _what_ran(result: Result) -> str:
    clients, config = result.config.get("clients"), result.config
    rounds = int(result.columns["round"][-1])
    text = f"{result.algorithm} ran {rounds:,} rounds on the task {result.task}"
    if not isinstance(clients, int):
        return f"{text}."
    part = config.get("participants") or clients
    who = "all of them" if part == clients else f"{part} of them"
    return f"{text} with {clients} sites, {who} in every exchange."


def _went(result: Result, headline: str) -> str:
    values, rounds = result.columns[headline], result.columns["round"]
    text = f"{headline}, the main metric, where lower is better, "
    if len(values) == 1:
        return f"{text}is {amount(values[-1])}."
    text += f"went from {amount(values[0])} after round {rounds[0]} to "
    text += f"{amount(values[-1])} after round {rounds[-1]}"
    if not np.isfinite(values).any():
        return f"{text}."
    best = int(np.nanargmin(values))
    if values[best] < values[-1]:
        text += f"; its best was {amount(values[best])} after round {rounds[best]}"
    return f"{text}."


def _cost(result: Result) -> str:
    counts, seconds = result.counts, result.seconds
    took = f"{amount(seconds['run'])} seconds"
    if seconds.get("compile"):
        took += f", after {amount(seconds['compile'])} seconds of compiling"
    if "bytes_up" not in counts:
        return f"It took {took}."
    up, down = counts["bytes_up"] / 1e6, counts["bytes_down"] / 1e6
    samples = sum(counts["samples"].values())
    return (
        f"It sent {amount(up + down)} MB ({amount(up)} up, {amount(down)} down), drew "
        f"{samples:,} samples and took {took}."
    )


def _comparison(saved: Saved) -> list[str]:
    standings, target = standings_of(saved)
    metric, first = saved.headline, standings[0]
    same = "the same data, start and cohorts for all"
    sentences = [
        f"{_listed([one.algorithm for one in standings])} ran on the task "
        f"{saved.every[0].task}, {_seeds(saved)}: {same}.",
        f"Lowest {metric}, the main metric: {first.algorithm} with "
        f"{mean_and_spread(first)}.",
    ]
    if len(standings) > 1:
        sentences.append(_second(first, standings[1]))
    sentences += _cheapest(standings, f"{metric} {amount(target)}")
    late = [one.algorithm for one in standings if one.seconds is None]
    if late:
        sentences.append(f"{_listed(late)} did not reach {metric} {amount(target)}.")
    still = [n for n, many in saved.results.items() if not _traffic(many)]
    if still:
        sentences.append(f"{_listed(still)} sent nothing: all rows were in one place.")
    sentences += [f"{name} diverged: {why}" for name, why in saved.diverged.items()]
    return sentences


def _cheapest(standings: Sequence[Standing], goal: str) -> list[str]:
    """Say who reached the target fastest, of those that keep rows where they are."""
    reached = [one for one in standings if one.seconds is not None and one.bytes]
    if not reached:
        return []
    quick = min(reached, key=lambda one: one.seconds or 0.0)
    small = min(reached, key=lambda one: one.bytes or 0)
    fast = f"{quick.algorithm} ({amount(quick.seconds)} seconds)"
    lean = f"{small.algorithm} ({amount((small.bytes or 0) / 1e6)} MB)"
    return [f"{goal} was reached fastest by {fast}, with the least traffic by {lean}."]


def _traffic(many: Sequence[Result]) -> float:
    """Return the bytes of the longest; what was not counted is not nothing."""
    return max(float(one.columns.get("bytes", np.ones(1))[-1]) for one in many)


def _second(first: Standing, second: Standing) -> str:
    text = f"Next: {second.algorithm} with {mean_and_spread(second)}"
    apart = second.mean - first.mean
    if first.seeds > 1 and apart < first.spread + second.spread:
        text += ", closer than the seeds are to each other"
    return f"{text}."


def mean_and_spread(one: Standing) -> str:
    """Return a mean with the deviation over seeds, if there are several."""
    if one.seeds < 2:
        return amount(one.mean)
    return f"{amount(one.mean)} \u00b1 {one.spread:.2g}"


def _seeds(saved: Saved) -> str:
    counts = {len(many) for many in saved.results.values()}
    if counts == {1}:
        return "from one random seed"
    if len(counts) == 1:
        return f"from {counts.pop()} random seeds each"
    return f"from {min(counts)} to {max(counts)} random seeds each"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _last(result: Result, name: str) -> str:
    return amount(result.columns[name][-1])


def amount(value: Any) -> str:
    """Write a number with four digits, whole numbers with their thousands."""
    if value is None or isinstance(value, str):
        return show(value)
    number = float(value)
    if not np.isfinite(number):
        return str(number)
    if number.is_integer() or abs(number) >= 10_000:
        return f"{number:,.0f}"
    return f"{number:.4g}"
