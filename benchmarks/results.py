"""Runs the commands of docs/results.md again, and lists the figures that moved.

    python -m benchmarks.results [--out FOLDER] [--list] [SECTION ...]

A figure of the page belongs to the commands above its table. A column `command` picks
one by the words after its `#`, a column in capitals fills in the word of that name, and
`SEED=0..7` after the `#` stands for as many runs. A column whose heading names a metric
has figures, and so has `figure`, where a column `metric` names it: a value, or a mean
+- deviation over seeds. A figure moved if it is further from the measured one than two
deviations, or than its last digit. What FOLDER holds is not run again.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean

from benchmarks.typed_command import type_command

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
_NUMBER = r"-?\d[\d.]*(?:e-?\d+)?"
_FIGURE = re.compile(rf"({_NUMBER})(?: \+- ({_NUMBER}))?")


@dataclass(frozen=True)
class Figure:
    """A published figure: what is typed for it, and where it is found afterwards."""

    section: str
    commands: tuple[str, ...]
    method: str
    metric: str
    text: str

    @property
    def bounds(self) -> tuple[float, float]:
        """Return between which values a measured one has not moved."""
        found = _FIGURE.match(self.text)
        assert found is not None
        value, digits = float(found[1]), found[1].partition("e")
        places = len(digits[0].partition(".")[2])
        last = 10.0 ** (int(digits[2] or 0) - places)
        wide = max(2 * float(found[2] or 0), last)
        return value - wide, value + wide


def published(text: str) -> Iterator[Figure]:
    """Yield the figures of a page that have a command."""
    for section in text.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        commands: list[tuple[str, str]] = []
        # A block of commands, or a table, is what stands between empty lines.
        for block in re.split(r"\n\s*\n", section):
            lines = block.strip("\n").splitlines()
            if block.lstrip("\n").startswith("    "):
                typed = [one for one in lines if one.startswith("    fedbilevel ")]
                commands = [_command(one) for one in typed]
            elif lines and lines[0].startswith("|") and commands:
                head, _, *rows = [_cells(one) for one in lines]
                for row in rows:
                    named = dict(zip(head, row, strict=True))
                    yield from _figures(title, commands, named)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _command(line: str) -> tuple[str, str]:
    typed, _, words = line.strip().removeprefix("fedbilevel ").partition("  # ")
    return typed.strip(), words


def _figures(
    title: str, commands: list[tuple[str, str]], row: dict[str, str]
) -> Iterator[Figure]:
    label = row.get("command")
    ours = [one for one in commands if label in (None, one[1].partition(";")[0])]
    if not ours:
        return
    typed, words = ours[0]
    for name, cell in row.items():
        typed = (
            re.sub(rf"\b{name}\b", cell.strip("`"), typed) if name.isupper() else typed
        )
    seeds = re.search(r"SEED=(\d+)\.\.(\d+)", words)
    numbers = range(int(seeds[1]), int(seeds[2]) + 1) if seeds else (0,)
    every = tuple(re.sub(r"\bSEED\b", str(seed), typed) for seed in numbers)
    method = row.get("method", "").strip("`")
    for name, cell in row.items():
        metric = re.search(r"`(\w+)`", row["metric"] if name == "figure" else name)
        if metric and _FIGURE.match(cell):
            yield Figure(title, every, method, metric[1], cell)


def measured(figure: Figure, folder: Path) -> float | str:
    """Return what a figure is now, or what went wrong."""
    missing = re.search(r"\b[A-Z]{4,}\b", figure.commands[0])
    if missing:
        return f"put your {missing[0]} into the command"
    values = []
    for command in figure.commands:
        # Commands are longer than a name may be.
        place = (
            folder / f"{command.split()[1]}-{sha256(command.encode()).hexdigest()[:12]}"
        )
        if not any(place.rglob("result.json")):
            wrong = type_command(command, place)[1]
            if wrong:
                return wrong
        inside = f"{figure.method}/**/result.json" if figure.method else "result.json"
        found = [json.loads(one.read_text()) for one in place.glob(inside)]
        values += [one["final"][figure.metric] for one in found]
    return fmean(values) if values else "no result of this name"


def main() -> None:
    """Measure what is asked for, and print what moved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("sections", nargs="*", default=[""], help="how titles begin")
    asked = parser.parse_args()
    figures = [
        one
        for one in published(PAGE.read_text())
        if one.section.startswith(tuple(asked.sections))
    ]
    moved, unmeasured = 0, dict[str, str]()
    for one in figures:
        if asked.list:
            print(one.section, *one.commands[:1], one.method, one.metric, one.text)
            continue
        now = measured(one, asked.out)
        least, most = one.bounds
        if isinstance(now, str):
            unmeasured[f"{one.commands[0]} {one.metric}"] = now
        elif not least <= now <= most:
            moved += 1
            told = f"{one.metric} {one.text} is {now:.4g}: {one.commands[0]}"
            print(f"moved: {told}", flush=True)
    for what, why in unmeasured.items():
        print(f"not measured: {what}: {why}")
    if not asked.list:
        print(f"{moved} of {len(figures) - len(unmeasured)} measured figures moved.")


if __name__ == "__main__":
    main()
