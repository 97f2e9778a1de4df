"""Text of others as it may be shown: in a terminal, in a log, in a spreadsheet."""

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST = 400  # characters of anything that is shown
_MARKUP = re.compile(r"\[(?=[a-zA-Z#/@])")  # what rich would read as a style

# Where a spreadsheet computes: a cell begins so, and is no number. Some split cells at
# other characters than those of the file, even in quotes.
_FORMULA = r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]"
_BARE = re.compile(rf"(^|[;\t\r\n])(?={_FORMULA})")
_MARKED = re.compile(rf"(^|[;\t\r\n])'(?={_FORMULA})")
_DIGITS = r"[+-]?(\d[\d,]*\.?\d*|\.\d+)([eE][+-]?\d+)?"
_NUMBER = re.compile(f"{_DIGITS}( \u00b1 {_DIGITS})?( ?%)?", re.ASCII)


def shown(text: str, most: int = _LONGEST) -> str:
    """Return a text of others as it may be printed or logged.

    It is one line of at most `most` characters and three dots, without control
    characters, and without what a terminal library would take for markup.
    """
    whole, text = len(text) <= most, text[:most]
    plain = (c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return _MARKUP.sub(r"\\[", "".join(plain)) + ("" if whole else "...")


def for_terminal(text: str) -> str:
    """Return a text with its lines and spaces, and with no code for a terminal.

    Escape sequences begin with a control character, which is spelled out.
    """
    return "".join(
        c
        if c.isprintable() or c == "\n" or unicodedata.category(c) == "Zs"
        else ascii(c)[1:-1]
        for c in text
    )


def csv_text(
    rows: Iterable[Sequence[Any]], *, separator: str = ",", line_end: str = "\n"
) -> str:
    """Write rows as CSV whose cells no spreadsheet computes.

    A text that begins like a formula has an apostrophe before it, and so does one that
    begins with apostrophes and such a character, so that `without_apostrophe` finds the
    text again. So it is behind a semicolon, a tab and an end of line. Numbers stay as
    they are, also as texts.
    """
    lines = []
    for row in rows:
        text = io.StringIO(newline="")
        # It quotes its own end of line alone, and readers end lines at others.
        writer = csv.writer(text, delimiter=separator, lineterminator="\r\n")
        writer.writerow([_as_cell(value) for value in row])
        lines.append(text.getvalue().removesuffix("\r\n") + line_end)
    return "".join(lines)


def _as_cell(value: Any) -> Any:
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    return _BARE.sub(r"\1'", value)


def without_apostrophe(cell: str) -> str:
    """Return the text that `csv_text` wrote as this cell."""
    return _MARKED.sub(r"\1", cell)
