"""Docstrings as Markdown: prose with formulas, and listings on a grid.

Listings are indented. What begins under each other in two lines, after two spaces or
more in one of them, is aligned on the page, too.
"""

import re
from collections.abc import Iterator
from itertools import groupby

from formulas import inline, prose

__all__ = ["rendered"]

_START = re.compile(r"(?<= )\S")
_CONTINUED = re.compile(r"\s*[-+] ")
_RELATIONS, _SUMS = ("<- ", "-= ", "+= ", "= "), ("+ ", "- ")
_ALIKE = 4  # letters by which parts of two lines are taken to be aligned
_GAP = '<span class="gap"></span>'


def rendered(text: str) -> str:
    """Return a docstring with formulas and listings drawn; code stays code."""
    paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join(part for one in paragraphs for part in _parts(one))


def _parts(paragraph: str) -> Iterator[str]:
    """Return the prose, the listings and the commands of a paragraph."""
    groups = groupby(paragraph.split("\n"), lambda line: line.startswith("    "))
    for indented, lines in groups:
        text = "\n".join(lines)
        if "    fedbilevel " in text:
            yield text
        else:
            yield _listing(text.split("\n")) if indented else prose(text)


def _listing(lines: list[str]) -> str:
    """Draw lines on a grid, whose last column takes what is left of the page."""
    lines = list(_whole(line[4:] for line in lines))
    columns = _columns(lines)
    places = sorted(columns)
    indents = {_indent(line) for line in lines}
    tracks = ["minmax(1.5em, auto)" if end in indents else "auto" for end in places[1:]]
    cells = []
    for row, line in enumerate(lines):
        cuts = [place for place in places if row in columns[place]]
        for start, end in zip(cuts, [*cuts[1:], len(line)], strict=True):
            below = columns.get(end, set()) if end in cuts else set()
            gap = _GAP if below and all(_is_wide(lines[k], end) for k in below) else ""
            first = places.index(start) + 1
            last = places.index(end) + 1 if below else len(places) + 1
            area = f"{row + 1} / {first} / {row + 2} / {last}"
            text = _cell(line[start:end])
            cells.append(f'<span style="grid-area: {area}">{text}{gap}</span>')
    style = f"grid-template-columns: {' '.join([*tracks, '1fr'])}"
    return f'<div class="listing" style="{style}">{"".join(cells)}</div>'


def _whole(lines: Iterator[str]) -> Iterator[str]:
    """Join lines that docstrings break for want of room: in brackets, before a sign."""
    held = next(lines)
    for line in lines:
        if _CONTINUED.match(line) or held.count("(") > held.count(")"):
            held = f"{held} {line.strip()}"
        else:
            yield held
            held = line
    yield held


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_wide(line: str, place: int) -> bool:
    """Say whether two spaces or nothing stand before a place."""
    return not line[max(place - 2, 0) : place].strip()


def _columns(lines: list[str]) -> dict[int, set[int]]:
    """Return where columns begin, and which lines have a part that begins there."""
    found = {_indent(line): set[int]() for line in lines}
    starts = [
        {_indent(line), *(match.start() for match in _START.finditer(line))}
        for line in lines
    ]
    for row, line in enumerate(lines):
        for place in starts[row]:
            others = {k for k, one in enumerate(starts) if k != row and place in one}
            if _is_wide(line, place):
                aligned = {k for k in others if _aligned(line, lines[k], place)}
                if aligned or place in found:
                    found.setdefault(place, set()).update(aligned, {row})
    return found


def _aligned(wide: str, other: str, place: int) -> bool:
    """Say whether another line has a part under one that follows wide spaces."""
    part, below = wide[place:], other[place:]
    signs = any(
        part.startswith(one) and below.startswith(one) for one in (_RELATIONS, _SUMS)
    )
    return _is_wide(other, place) or signs or part[:_ALIKE] == below[:_ALIKE]


def _cell(text: str) -> str:
    """Draw a part of a line; wide spaces in it stay wide."""
    return _GAP.join(map(inline, re.split(r" {2,}", text.strip())))
