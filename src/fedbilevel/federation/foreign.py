"""Foreign input: JSON that is read strictly, and text that is shown safely."""

import json
import math
from typing import Any

from fedbilevel._text import shown as shown

_DEEPEST = 12  # levels of lists and objects in one another
_DIGITS = 20  # of a whole number: all below 2^64 have no more


def is_plain(text: Any, most: int) -> bool:
    """Say whether this is a text of at most `most` characters that shows as it is."""
    return isinstance(text, str) and shown(text, most) == text


def read_json(text: bytes) -> Any:
    """Return what a text in UTF-8 says, or raise ValueError.

    What JSON leaves open is refused: a name twice in an object, numbers that are not
    finite or too long for a computer's, halves of characters, endless nesting.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_number,
            parse_int=_whole,
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    _check(value, 0)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has a name twice")
    return made


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is beyond the range of numbers")
    return value


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a whole number has {len(text)} digits")
    return int(text)


def _check(value: Any, depth: int) -> None:
    """Raise for halves of characters, and for what lies too deep."""
    if isinstance(value, str):
        value.encode("utf-8")  # of a half a UnicodeEncodeError, which is a ValueError
    if not isinstance(value, dict | list):
        return
    if depth == _DEEPEST:
        raise ValueError("nested too deeply")
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    for one in inside:
        _check(one, depth + 1)
