"""Text of others as it may be shown: in a terminal, in a log, in a spreadsheet."""

import re
import unicodedata

_LONGEST = 400  # letters of anything that is shown
_MARKUP = re.compile(r"\[(?=[a-zA-Z#/@])")  # what rich would read as a style


def shown(text: str, most: int = _LONGEST) -> str:
    """Return a text of others as it may be printed or logged.

    It is one line of at most `most` letters and three dots, without control characters,
    and without what a terminal library would take for markup.
    """
    whole, text = len(text) <= most, text[:most]
    plain = (c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return _MARKUP.sub(r"\\[", "".join(plain)) + ("" if whole else "...")


def for_terminal(text: str) -> str:
    """Return a text with its lines and spaces, and with no code for a terminal.

    Escape sequences begin with a control character, which is spelled out.
    """
    return "".join(c if _is_harmless(c) else ascii(c)[1:-1] for c in text)


def _is_harmless(letter: str) -> bool:
    return (
        letter.isprintable() or letter == "\n" or unicodedata.category(letter) == "Zs"
    )
