"""What a site may tell the server of its task.

The server takes only what is named here, of the type and within the bounds that stand
here, and refuses a site that tells anything else.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from fedbilevel import algorithms
from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.foreign import is_plain
from fedbilevel.federation.server.conclusions import KINDS
from fedbilevel.federation.wire import RefusedError
from fedbilevel.studies.validation import HELD_OUT

__all__ = ["check_facts"]

_LONGEST_NAME, _LONGEST_TEXT = 100, 400  # letters
_MOST = 4096  # names, or entries of a list
_LARGEST_SIZE = 2**31 - 1  # of rounds, local steps, batch
_SIZES = ("rounds", "local_steps", "batch")
_OWN_CODE = re.compile(r"own:[A-Za-z_][A-Za-z0-9_]*:[0-9a-f]{32}")
# Columns that every run has: no metric and no conclusion may go by their names.
_OWN = {"round", "upper_loss", "lower_gradient_norm", "exchanges", "bytes", "samples"}


def _is_name(value: Any) -> bool:
    return is_plain(value, _LONGEST_NAME)


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _are_names(value: Any) -> bool:
    """Say whether these are different names."""
    right = isinstance(value, list) and len(value) <= _MOST
    return right and all(map(_is_name, value)) and len(set(value)) == len(value)


def _are_settings(value: Any) -> bool:
    """Say whether these are options by name: numbers, texts, or lists of them."""
    if not isinstance(value, dict) or len(value) > _MOST:
        return False
    return all(_is_name(name) and _is_setting(one) for name, one in value.items())


def _is_setting(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= _MOST and not any(
            isinstance(one, list) or not _is_setting(one) for one in value
        )
    simple = value is None or isinstance(value, bool | int | float)
    return simple or is_plain(value, _LONGEST_TEXT)


def _are_recommended(value: Any) -> bool:
    """Say whether these are options of algorithms, as text, with all sizes of a run."""
    if not _are_settings(value) or not all(isinstance(v, str) for v in value.values()):
        return False
    return all(_is_size(value.get(size)) for size in _SIZES)


def _is_size(text: Any) -> bool:
    digits = isinstance(text, str) and text.isascii() and text.isdigit()
    return digits and len(text) <= 10 and 1 <= int(text) <= _LARGEST_SIZE


def _is_algorithm(value: Any) -> bool:
    """Say whether this names a method, and no file: what a site says runs none."""
    if not _is_name(value) or algorithms.is_file(value):
        return False
    if _OWN_CODE.fullmatch(value):
        return True  # compared with the server's own copy, and never looked up
    try:
        return not algorithms.find(value).pools
    except InvalidInputError:
        return False


def _are_private(value: Any) -> bool:
    """Say whether these are flags of the blocks of x, and of those of y."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(level, list) for level in value)
        and all(_is_flag(flag) for level in value for flag in level)
    )


def _is_concluding(value: Any) -> bool:
    return _are_settings(value) and all(kind in KINDS for kind in value.values())


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "algorithm": _is_algorithm,
    "recommended": _are_recommended,
    "headline": _is_name,
    "shows_point": _is_flag,
    "task": _are_settings,
    "classes": _is_name,
    "metrics": _are_names,
    "concludes": _is_concluding,
    "x": _are_names,
    "y": _are_names,
    "private": _are_private,
}


def _are_fingerprints(value: Any) -> bool:
    return _are_settings(value) and all(map(_is_name, value.values()))


# What decides between trials is told by sites that take steps from the server;
# fingerprints by those of a task that has more than rows.
_MAYBE: Mapping[str, Callable[[Any], bool]] = {
    "tuned_by": _is_name,
    "alike": _are_fingerprints,
}


def check_facts(facts: Mapping[str, Any], leaves: int) -> None:
    """Refuse what no site of ours tells of a task; `leaves` are those of x and y."""
    if set(facts) - set(_MAYBE) != set(_CHECKS):
        odd = ", ".join(sorted((set(facts) - set(_MAYBE)) ^ set(_CHECKS)))
        raise RefusedError("facts", f"tells not what is expected, apart in {odd}")
    for name, is_right in {**_CHECKS, **_MAYBE}.items():
        if name in facts and not is_right(facts[name]):
            raise RefusedError("facts", f"{name} cannot be {facts[name]!r:.80}")
    counts = [len(facts[level]) for level in ("x", "y")]
    if sum(counts) != leaves or [len(flags) for flags in facts["private"]] != counts:
        raise RefusedError(
            "facts", f"names {counts} blocks of x and y, but sends {leaves}"
        )
    shown = [*facts["metrics"], *facts["concludes"]]
    if len({*shown, *_OWN}) != len(shown) + len(_OWN):
        raise RefusedError("facts", "metrics or conclusions take names of others")
    if facts["headline"] not in {*facts["metrics"], *_OWN}:
        raise RefusedError("facts", "the headline is no metric")
    if facts.get("tuned_by", HELD_OUT) not in {*facts["metrics"], HELD_OUT}:
        raise RefusedError("facts", "what it is tuned by is no metric")
