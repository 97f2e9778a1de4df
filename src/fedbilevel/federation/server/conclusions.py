"""What sites may tell of a run that has ended: numbers and texts they announced."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbilevel.federation.foreign import is_plain
from fedbilevel.federation.wire import RefusedError

KINDS = ("number", "texts")
_LONGEST_TEXT = 400  # letters
_MOST_TEXTS = 4096
_LARGEST_WHOLE = 2**53  # beyond it whole numbers are not exact


def read_conclusion(
    told: Mapping[str, Any], expected: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a site tells of a finished run; refuse what it did not announce."""
    for name, value in told.items():
        if name not in expected:
            raise RefusedError("conclusion", f"{name!r:.80} was not announced")
        right = _is_finite(value) if expected[name] == "number" else _are_texts(value)
        if not right:
            raise RefusedError("conclusion", f"{name} cannot be {value!r:.80}")
    return dict(told)


def _is_finite(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < _LARGEST_WHOLE
    return type(value) is float and math.isfinite(value)


def _are_texts(value: Any) -> bool:
    right = isinstance(value, list) and len(value) <= _MOST_TEXTS
    return right and all(is_plain(one, _LONGEST_TEXT) for one in value)


def together(conclusions: list[dict[str, Any]]) -> dict[str, Any]:
    """Average the numbers that sites concluded with; list what is no number."""
    names = {name for one in conclusions for name in one}
    merged = {}
    for name in sorted(names):
        values = [one[name] for one in conclusions if name in one]
        numbers = all(isinstance(value, int | float) for value in values)
        merged[name] = float(np.mean(values)) if numbers else values
    return merged
