"""CSV as people have it: encoding, separator and decimal mark are those of the file.

`csv` of the standard library reads it, and what it does not know is detected here. A
library would not spare that: pandas and polars take encoding and decimal mark as given,
and polars the separator, too. They would read large files faster, and the core would
need tens of megabytes for it.

Nothing is guessed where two readings make different numbers: such a file is refused
until --decimal says which one is meant. So a file means the same at every site, and
when rows are predicted.
"""

import codecs
import contextlib
import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TextIO

from fedbilevel._table_choices import DECIMALS, SEPARATORS
from fedbilevel.datasets._files import opened
from fedbilevel.datasets.cells import Columns, as_text, is_gap, is_number, parse_number
from fedbilevel.errors import InvalidInputError

_SAMPLE = 2**16  # characters from which a separator is found
_TEXTS = 1_000  # different texts of a column from which a decimal mark is found
_SHOWN = 5  # problems of a kind that are quoted
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Cells(NamedTuple):
    """The header of a file, its rows, the line where each begins, and the dialect."""

    header: list[str]
    rows: list[list[str]]
    lines: list[int]
    encoding: str
    separator: str


def spelled(letter: str, known: Mapping[str, str]) -> str:
    """Return the name of a character, as options and sentences have it."""
    return {one: name for name, one in known.items()}.get(letter, repr(letter))


def read_cells(path: Path, encoding: str = "", separator: str = "") -> Cells:
    """Read the cells of a file, in the dialect that is given or else detected."""
    encoding = encoding or _encoding_of(path)
    with _as_text(path, encoding) as file:
        sample = file.read(_SAMPLE)
    said = _said(sample)
    separator = separator or said or _separator_of(sample)
    with _as_text(path, encoding) as file:
        if said:
            file.readline()
        reader = csv.reader(file, delimiter=separator, skipinitialspace=True)
        header = [name.strip() for name in next(reader, [])]
        # Programs that number rows leave the name of that column empty.
        header = [name or f"column {n}" for n, name in enumerate(header, 1)]
        lines, rows = _whole_rows(path, reader, len(header), int(bool(said)))
    return Cells(header, rows, lines, encoding, separator)


def _as_text(path: Path, encoding: str) -> TextIO:
    # Some programs mark UTF-8, too, by its first bytes.
    marked = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding
    return io.TextIOWrapper(opened(path), encoding=marked, newline="")


def _said(sample: str) -> str:
    """Return the separator of a first line `sep=;`, as Excel writes and reads it."""
    first = sample.partition("\n")[0].rstrip("\r").strip('"')
    return first[4] if len(first) == 5 and first.startswith("sep=") else ""


def _whole_rows(
    path: Path, reader, width: int, before: int
) -> tuple[list[int], list[list[str]]]:
    lines, rows, wrong = [], [], []
    while True:
        line = reader.line_num + before + 1
        row = next(reader, None)
        if row is None:
            break
        together = "".join(row)
        if "\0" in together:
            raise InvalidInputError(
                f"{path}, line {line}: it holds a byte 0, so it is no text. Save the "
                "table again, as UTF-8."
            )
        if len(row) == width:
            lines.append(line)
            # Most rows hold no space, and stripping each cell takes twice as long.
            plain = len(together.split()) == 1
            rows.append(row if plain else [text.strip() for text in row])
        elif row:
            wrong.append((line, len(row)))
    if wrong:
        listed = [f"line {line}: {count} values" for line, count in wrong[:_SHOWN]]
        rest = len(wrong) - len(listed)
        raise InvalidInputError(
            f"{path}, {'; '.join(listed)}{f'; and {rest} more such' if rest else ''}, "
            f"but the header names {width} columns. Check quotes and separators, or "
            "say --separator."
        )
    return lines, rows


def _encoding_of(path: Path) -> str:
    """Return the encoding of all bytes of a file, of which the first may say it."""
    with opened(path) as file:
        start = file.read(_SAMPLE)
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            return name
    # In these every second byte of most characters is 0.
    empty = [start[place::2].count(0) for place in (0, 1)]
    if max(empty) >= max(len(start) / 4, 1) and not min(empty):
        return "utf-16-be" if empty[0] else "utf-16-le"
    for encoding in ("utf-8", "cp1252"):
        decoder = codecs.getincrementaldecoder(encoding)()
        with opened(path) as file, contextlib.suppress(UnicodeDecodeError):
            while block := file.read(2**20):
                decoder.decode(block)
            decoder.decode(b"", final=True)
            return encoding
    return "latin-1"


def _separator_of(sample: str) -> str:
    """Return the separator by which most rows have as many cells as the header."""
    best = (0.0, 0, ",")
    for letter in SEPARATORS.values():
        widths, file = [], io.StringIO(sample, newline="")
        with contextlib.suppress(csv.Error):
            for row in csv.reader(file, delimiter=letter, skipinitialspace=True):
                widths += [len(row)] if row else []
        # Unless the sample is all, its last row may not be.
        widths = widths if len(sample) < _SAMPLE else widths[:-1]
        if widths and widths[0] > 1:
            alike = sum(width == widths[0] for width in widths) / len(widths)
            best = max(best, (alike, widths[0], letter), key=lambda one: one[:2])
    return best[2]


def decimal_of(source: str, columns: Columns, separator: str) -> str:
    """Return the decimal mark of columns of text.

    A column says it by numbers that would be none with the other mark, as 47,3 and
    1.234,5 have a comma. Where none says it, numbers such as 1.234 are read with a
    point in files separated by commas, and else are refused: they could be thousands.
    """
    votes: dict[str, list[str]] = {".": [], ",": []}
    unclear = []
    for name, values in columns.items():
        mark = "" if values.dtype.kind in "buif" else _vote(map(as_text, values))
        if mark in votes:
            votes[mark].append(name)
        elif mark:
            unclear.append((name, mark))
    if all(votes.values()):
        raise InvalidInputError(
            f"{source}: column '{votes[','][0]}' has a decimal comma, and column "
            f"'{votes['.'][0]}' a decimal point. Say which one holds for numbers with "
            "--decimal comma or --decimal point, or leave one of them out with "
            "--ignore."
        )
    if not any(votes.values()) and unclear and separator != ",":
        name, text = unclear[0]
        raise InvalidInputError(
            f"{source}: column '{name}' holds '{text:.40}', which is "
            f"{parse_number(text, '.'):g} with a decimal point and "
            f"{parse_number(text, ','):g} with a decimal comma. Say --decimal point or "
            "--decimal comma."
        )
    return "," if votes[","] else "."


def _vote(texts: Iterable[str]) -> str:
    """Return the mark of a column, a number of which two are made, or nothing."""
    different = _different(texts)
    first = {
        text: _marks(text) for text in islice(different, _TEXTS) if not is_gap(text)
    }
    if 2 * sum(map(bool, first.values())) <= len(first):
        return ""
    counts, unclear = Counter[str](), ""
    every = chain(first, different)
    marked = (text for text in every if "." in text or "," in text)
    for text in islice(marked, _TEXTS):
        fits = first[text] if text in first else _marks(text)
        counts[fits[0] if len(fits) == 1 else ""] += 1
        if len(fits) == 2:
            unclear = unclear or text
    if counts["."] == counts[","]:
        return unclear
    return max(DECIMALS.values(), key=lambda mark: counts[mark])


def _different(texts: Iterable[str]) -> Iterator[str]:
    seen = set[str]()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


def _marks(text: str) -> list[str]:
    """Return the decimal marks with which a text is a number."""
    return [mark for mark in DECIMALS.values() if is_number(text, mark)]
