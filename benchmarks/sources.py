"""Where the figures of docs/results.md come from: a declaration for each command.

A `Source` says what is read after its command, and which number of that is the figure
below a heading. A command that takes minutes is run if it left nothing yet. One that
takes hours is not run: its file is read, or the command is listed as not run. A new
benchmark on the page needs one entry in `SOURCES`.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.starting import timed
from benchmarks.typed_command import type_command

Row = dict[str, str]  # a row of the page by its headings
Records = list[dict[str, Any]]
Reader = Callable[[Records], list[float]]


class NotMeasuredError(Exception):
    """A command was not run, or left no figure; with the reason if there is one."""


@dataclass(frozen=True)
class Source:
    """How the figures of a kind of command are measured."""

    # What a command left for a row of the page, in a folder if it is run for this.
    records: Callable[[str, Row, Path], Records]
    # What finds the figure below a heading; None if the heading names no figure.
    reader: Callable[[Row, str], Reader | None]
    deviations: float = 2.0  # a figure moved if it is further away than these,
    share: float = 0.0  # than this part of it, and than its last digit


def source(command: str) -> Source | None:
    """Return what measures the figures of a command."""
    ours = (one for start, one in SOURCES.items() if command.startswith(f"{start} "))
    return next(ours, None)


def metric_of(row: Row, heading: str) -> str:
    """Return the metric below a heading, empty if it names none."""
    named = re.search(r"`(\w+)`", row["metric"] if heading == "figure" else heading)
    return named[1] if named else ""


def _place(command: str, folder: Path) -> Path:
    # Commands are longer than a name may be.
    typed = command.partition("fedbilevel ")[2]
    return folder / f"{typed.split()[1]}-{sha256(typed.encode()).hexdigest()[:12]}"


def _results(command: str, row: Row, folder: Path) -> Records:
    """Return the results of a run or of one method of a comparison, of all seeds."""
    place = _place(command, folder)
    if not any(place.rglob("result.json")):
        wrong = type_command(command.removeprefix("fedbilevel "), place)[1]
        if wrong:
            raise NotMeasuredError(wrong)
    method = row.get("method", "").strip("`")
    inside = f"{method}/**/result.json" if method else "result.json"
    return [json.loads(one.read_text()) for one in place.glob(inside)]


def _seconds(command: str, row: Row, folder: Path) -> Records:
    """Return what a command takes by the clock, without compiled programs on disk."""
    file = _place(command, folder / "seconds").with_suffix(".json")
    if not file.exists():
        with tempfile.TemporaryDirectory() as cache:
            words = command.removeprefix("time fedbilevel ").split()
            try:
                taken = timed(words, cache)[0]
            except subprocess.CalledProcessError as error:
                raise NotMeasuredError(str(error)) from error
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"seconds": taken}))
    return [json.loads(file.read_text())]


def _lines(command: str, row: Row, folder: Path) -> Records:
    """Return the lines of the file that a command wrote."""
    file = Path(next(one for one in command.split() if one.endswith(".jsonl")))
    if not file.exists():
        raise NotMeasuredError
    return [json.loads(line) for line in file.read_text().splitlines()]


def _lines_now(command: str, row: Row, folder: Path) -> Records:
    """Return the lines of a file, which the command writes where there is none."""
    try:
        return _lines(command, row, folder)
    except NotMeasuredError:
        words = [sys.executable, *command.split()[1:]]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise NotMeasuredError(done.stderr.strip()[-500:]) from None
        return _lines(command, row, folder)


COUNTS: dict[str, Callable[[dict[str, int]], float]] = {
    "exchanges": lambda counts: counts["exchanges"],
    "million floats, both ways": lambda counts: (
        (counts["floats_down"] + counts["floats_up"]) / 1e6
    ),
}


def _of_results(row: Row, heading: str) -> Reader | None:
    if heading in COUNTS:
        count = COUNTS[heading]
        return lambda found: [fmean(count(one["counts"]) for one in found)]
    worst = heading == "worst seed"
    every = [metric_of(row, one) for one in (row if worst else [heading])]
    metric = next(filter(None, every), "")
    if not metric:
        return None
    chosen = (min if "accuracy" in metric else max) if worst else fmean
    return lambda found: [chosen([one["final"][metric] for one in found])]


def _of_seconds(row: Row, heading: str) -> Reader | None:
    return (lambda found: [found[0]["seconds"]]) if heading == "seconds" else None


def _of_tables(row: Row, heading: str) -> Reader | None:
    deals = ("iid", "size", "dirichlet")

    def ratio(found: Records, name: str, chosen: Iterable[str]) -> float:
        ours = [one for one in found if one["table"] == row["table"]]
        ratios = [one[name] / one["pooled"] for one in ours if one["deal"] in chosen]
        return fmean(filter(math.isfinite, ratios))

    if heading == "pooled":
        return lambda found: [
            fmean(one["pooled"] for one in found if one["table"] == row["table"])
        ]
    if heading == "one strength":
        return lambda found: [ratio(found, heading, deals)]
    if heading == "largest site alone":
        return lambda found: [ratio(found, "largest site", [deal]) for deal in deals]
    deal = heading.lower()
    return (lambda found: [ratio(found, "ours", [deal])]) if deal in deals else None


def _of_adaptive(row: Row, heading: str) -> Reader | None:
    def read(found: Records) -> list[float]:
        begins = f"{row['method'].strip('`')} | {heading} | "
        ends = next(one["accuracy"] for one in found if one["row"].startswith(begins))
        return [fmean(ends), min(ends)]

    return read if heading in ("plain", "clip", "server adam", "local adam") else None


def _of_splits(row: Row, heading: str) -> Reader | None:
    def read(found: Records) -> list[float]:
        return [
            next(one[heading] for one in found if str(one["split"]) == row["split"])
        ]

    return None if heading in ("split", "chosen") else read


# Which source a command has, by how it begins.
SOURCES = {
    "fedbilevel": Source(_results, _of_results),
    "time fedbilevel": Source(_seconds, _of_seconds, share=0.3),
    # Its intervals are of 95 %; it takes hours, as does the next.
    "python -m benchmarks.tables": Source(_lines, _of_tables, deviations=1),
    "python benchmarks/adaptive.py": Source(_lines, _of_adaptive),
    "python benchmarks/architecture.py": Source(_lines_now, _of_splits),
}
