"""Processor seconds of several programs, in turns, and rows of the table of peers."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table: what a peer took, and what we took for the same."""

    work: str
    peer: str
    ours: float  # processor seconds
    theirs: float
    ratio: tuple[float, float, float]  # quartiles of theirs / ours, turn by turn
    apart: float | None  # relative distance of the answers
    how: str


@dataclass(frozen=True)
class Failed:
    """What could not be run, and why."""

    work: str
    peer: str
    why: str


def processor_seconds(
    calls: Mapping[str, Call], turns: int = 15, block: float = 0.03
) -> dict[str, np.ndarray]:
    """Return the processor seconds of one call of each, all threads added up.

    They are timed in turns, in blocks of at least `block` seconds: an entry for each
    turn, so that those of one turn met the same machine.
    """
    repeats = {name: _repeats(call, block) for name, call in calls.items()}
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            spent[name].append(_spent(call, repeats[name]) / repeats[name])
    return {name: np.asarray(values) for name, values in spent.items()}


def quartiles(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """Return the quartiles of theirs / ours over the turns."""
    low, middle, high = np.quantile(theirs / ours, [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def paired(
    ours: Call, theirs: Call, our_times: int = 1, their_times: int = 1, turns: int = 7
) -> tuple[float, float, tuple[float, float, float]]:
    """Return both medians, and the quartiles of the ratio.

    A call does what is told of so many times.
    """
    spent = processor_seconds({"ours": ours, "theirs": theirs}, turns)
    mine, other = spent["ours"] / our_times, spent["theirs"] / their_times
    return float(np.median(mine)), float(np.median(other)), quartiles(mine, other)


def _repeats(call: Call, block: float) -> int:
    call()  # compiles, and fills caches
    count = 1
    while (spent := _spent(call, count)) < block:
        count = max(count + 1, int(count * min(10.0, 1.2 * block / max(spent, 1e-9))))
    return count


def _spent(call: Call, count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - began


def apart(ours: list, theirs: list) -> float:
    """Return ||theirs - ours|| / ||ours|| over all leaves."""
    mine, other = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])
        for leaves in (ours, theirs)
    )
    return float(np.linalg.norm(other - mine) / np.linalg.norm(mine))


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = ["| work | peer | ours ms | peer ms | ratio | answers apart | how |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        distance = "" if row.apart is None else f"{row.apart:.1e}"
        low, middle, high = (f"{one:.3g}" for one in row.ratio)
        lines.append(
            f"| {row.work} | {row.peer} | {1e3 * row.ours:.3g} | "
            f"{1e3 * row.theirs:.4g} | {middle} ({low} to {high}) | {distance} | "
            f"{row.how} |"
        )
    return "\n".join(lines)
