"""Runs the commands of docs/results.md again, and lists the figures that moved.

    python -m benchmarks.results [--out FOLDER] [--list] [SECTION ...]

A table belongs to the commands above it, and `benchmarks/sources.py` says how they are
measured. A column `command` picks one by the words after its `#`, a column in capitals
fills in the word of that name, and `SEED=0..7` after the `#` stands for as many runs. A
word in capitals without a column comes from the environment, as FOLDER=images does.

A column whose heading names a metric has figures, and so has `figure`, where a column
`metric` names it; the source knows other headings. A figure is a value, a mean +-
deviation over seeds, or several of them in a cell. It moved if it is further from the
measured one than two deviations, or than its last digit. FOLDER keeps what was run.
"""

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.sources import (
    NotMeasuredError,
    Reader,
    Records,
    Row,
    Source,
    source,
)

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
_NUMBER = r"-?\d[\d.]*(?:e-?\d+)?"
_FIGURE = re.compile(rf"({_NUMBER})(?: \+- ({_NUMBER}))?")
_OWN = re.compile(r"\b[A-Z]{4,}\b")  # what whoever types a command fills in


@dataclass(frozen=True)
class Figure:
    """A published figure: what is typed for it, and what is published."""

    section: str
    commands: tuple[str, ...]
    heading: str
    text: str
    row: Row = field(repr=False)

    @property
    def name(self) -> str:
        """Return the words of its row, and its heading."""
        words = [cell for cell in self.row.values() if not _FIGURE.match(cell)]
        return " ".join([*filter(None, words), self.heading])

    @property
    def source(self) -> Source | None:
        """Return what measures it, if anything does."""
        return source(self.commands[0]) if self.commands else None

    @property
    def reader(self) -> Reader | None:
        """Return what finds it in what its command left, if anything does."""
        return self.source and self.source.reader(self.row, self.heading)

    @property
    def bounds(self) -> list[tuple[float, float]]:
        """Return between which values every measured one has not moved."""
        assert self.source is not None
        found = []
        for text, spread in _FIGURE.findall(self.text):
            value, digits = float(text), text.partition("e")
            places = len(digits[0].partition(".")[2])
            last = 10.0 ** (int(digits[2] or 0) - places)
            wide = self.source.deviations * float(spread or 0)
            wide = max(wide, last, self.source.share * abs(value))
            found.append((value - wide, value + wide))
        return found

    def holds(self, now: list[float]) -> bool:
        """Return whether these numbers are still those of the page."""
        pairs = zip(self.bounds, now, strict=False)
        inside = [least <= value <= most for (least, most), value in pairs]
        return len(self.bounds) == len(now) and all(inside)


def published(text: str) -> Iterator[Figure]:
    """Yield the figures of all tables of a page, with the commands above them."""
    for section in text.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        commands: list[tuple[str, str]] = []
        # A block of commands, or a table, is what stands between empty lines.
        for block in re.split(r"\n\s*\n", section):
            lines = block.strip("\n").splitlines()
            if block.lstrip("\n").startswith("    "):
                commands = [_command(one) for one in lines]
            elif lines and lines[0].startswith("|"):
                head, _, *rows = [_cells(one) for one in lines]
                for row in rows:
                    named = dict(zip(head, row, strict=True))
                    yield from _figures(title, commands, named)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _command(line: str) -> tuple[str, str]:
    typed, _, words = line.strip().partition("  # ")
    return typed.strip(), words


def _figures(title: str, commands: list[tuple[str, str]], row: Row) -> Iterator[Figure]:
    label = row.get("command")
    ours = [one for one in commands if label in (None, one[1].partition(";")[0])]
    typed, words = ours[0] if ours else ("", "")
    for name, cell in row.items():
        typed = (
            re.sub(rf"\b{name}\b", cell.strip("`"), typed) if name.isupper() else typed
        )
    seeds = re.search(r"SEED=(\d+)\.\.(\d+)", words)
    numbers = range(int(seeds[1]), int(seeds[2]) + 1) if seeds else (0,)
    every = tuple(re.sub(r"\bSEED\b", str(seed), typed) for seed in numbers)
    # Columns in capitals and the first one name a row.
    for heading, cell in row.items():
        figure = Figure(title, every if typed else (), heading, cell, row)
        first = heading == next(iter(row)) and figure.reader is None
        if _FIGURE.match(cell) and not heading.isupper() and not first:
            yield figure


def measured(figure: Figure, folder: Path) -> list[float]:
    """Return the numbers that are now in a figure's cell."""
    read, found = figure.reader, Records()
    if figure.source is None or read is None:
        raise NotMeasuredError("no command has it")
    for written in figure.commands:
        command = _OWN.sub(lambda one: os.environ.get(one[0], one[0]), written)
        missing = _OWN.search(command)
        if missing:
            raise NotMeasuredError(f"put your {missing[0]} into the environment")
        found += figure.source.records(command, figure.row, folder)
    try:
        return read(found)
    # No record of that name, or none at all.
    except (KeyError, StopIteration, ValueError):
        raise NotMeasuredError("no result of this name") from None


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
    if asked.list:
        for one in figures:
            print(one.section, *one.commands[:1], one.name, one.text)
        return
    moved, unmeasured = 0, list[str]()
    for one in figures:
        command = one.commands[0] if one.commands else f"{one.section}: {one.name}"
        try:
            now = measured(one, asked.out)
        except NotMeasuredError as reason:
            unmeasured.append(f"{command}: {reason}".removesuffix(": "))
            continue
        if not one.holds(now):
            moved += 1
            told = ", ".join(f"{value:.4g}" for value in now)
            print(f"moved: {one.name} {one.text} is {told}: {command}", flush=True)
    for what in dict.fromkeys(unmeasured):
        print(f"not run: {what}")
    print(f"{moved} of {len(figures) - len(unmeasured)} measured figures moved.")


if __name__ == "__main__":
    main()
