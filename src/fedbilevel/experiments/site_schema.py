"""A site's report of its task: every field, declared once, with its check.

The server takes only the fields that stand here, of the type and within the bounds of
their checks, and refuses a site that reports anything else. A site writes the same
fields, and the server reads them by name.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedbilevel import algorithms
from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.refusals import RefusedError, is_plain
from fedbilevel.federation.server.measuring import KINDS
from fedbilevel.result import to_plain
from fedbilevel.runtime.job import OWN_COLUMNS
from fedbilevel.studies.validation import HELD_OUT

_LONGEST_NAME, _LONGEST_TEXT = 100, 400  # characters
_MOST = 4096  # names, or entries of a list
_LARGEST_SIZE = 2**31 - 1  # of rounds, local steps, batch
_SIZES = ("rounds", "local_steps", "batch")
_OWN_CODE = re.compile(r"own:[A-Za-z_][A-Za-z0-9_]*:[0-9a-f]{32}")


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


def _are_fingerprints(value: Any) -> bool:
    return _are_settings(value) and all(map(_is_name, value.values()))


def _reported(check: Callable[[Any], bool], **default: Any) -> Any:
    return field(metadata={"check": check}, **default)


@dataclass(frozen=True)
class SiteSchema:
    """The server's facts about the task; the server has no rows.

    `classes` is a fingerprint of what numbers of x and y mean. `x` and `y` name the
    blocks, `private` says which of them stay at the site. Sites that take steps from
    the server report `tuned_by`; sites of a task that has more than rows report
    fingerprints of that, `alike`. With `separate` the lower level is a sum over the
    first axis of y, of which methods may send less.
    """

    algorithm: str = _reported(_is_algorithm)
    recommended: Mapping[str, str] = _reported(_are_recommended)
    headline: str = _reported(_is_name)
    shows_point: bool = _reported(_is_flag)
    task: Mapping[str, Any] = _reported(_are_settings)
    classes: str = _reported(_is_name)
    metrics: list[str] = _reported(_are_names)
    concludes: Mapping[str, str] = _reported(_is_concluding)
    x: list[str] = _reported(_are_names)
    y: list[str] = _reported(_are_names)
    private: list[list[bool]] = _reported(_are_private)
    tuned_by: str | None = _reported(_is_name, default=None)
    alike: Mapping[str, str] | None = _reported(_are_fingerprints, default=None)
    separate: bool | None = _reported(_is_flag, default=None)

    def plain(self) -> dict[str, Any]:
        """Return the fields that a site reports, as JSON has them."""
        return to_plain({n: v for n, v in asdict(self).items() if v is not None})

    @staticmethod
    def check(reported: Mapping[str, Any], leaves: int) -> None:
        """Refuse what no site of ours reports; `leaves` is the number in x and y."""
        known = {one.name: one for one in fields(SiteSchema)}
        needed = {name for name, one in known.items() if one.default is not None}
        odd = (needed - set(reported)) | (set(reported) - set(known))
        if odd:
            names = ", ".join(sorted(odd))
            raise RefusedError("facts", f"has unexpected or missing fields: {names}")
        for name, value in reported.items():
            if not known[name].metadata["check"](value):
                raise RefusedError("facts", f"{name} cannot be {value!r:.80}")
        SiteSchema(**reported)._check_together(leaves)

    def _check_together(self, leaves: int) -> None:
        counts = [len(self.x), len(self.y)]
        if sum(counts) != leaves or [len(flags) for flags in self.private] != counts:
            raise RefusedError(
                "facts", f"names {counts} blocks of x and y, but sends {leaves}"
            )
        shown, own = [*self.metrics, *self.concludes], set(OWN_COLUMNS)
        if len({*shown, *own}) != len(shown) + len(own):
            raise RefusedError("facts", "metrics or conclusions take names of others")
        if self.headline not in {*self.metrics, *own}:
            raise RefusedError("facts", "the headline is no metric")
        if self.tuned_by not in {*self.metrics, HELD_OUT, None}:
            raise RefusedError("facts", "what it is tuned by is no metric")
