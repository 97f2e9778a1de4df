"""The search space of tuning: a table of options and bounds, or given ranges.

Steps and weights are multiples of what the task recommends, so that a search is the
same where that is a share of the curvature.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx

from fedbilevel._schema import Tuning as Tuning
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.errors import InvalidInputError
from fedbilevel.studies.searching import Point, Range, Search, Values


@dataclass(frozen=True)
class Dimension:
    """Options that are multiplied by one factor, from `low` to `high`.

    None of them becomes more than `most`.
    """

    name: str
    options: tuple[str, ...]
    low: float
    high: float
    most: float = math.inf


# All that is searched without ranges of one's own. One, unchanged, is in the middle.
SEARCHED = (
    Dimension("upper_step", ("upper_step",), 0.1, 10),
    Dimension("lower_step", ("lower_step", "auxiliary_step"), 0.25, 4),
    Dimension(
        "weight", ("upper_weight", "lower_weight", "auxiliary_weight"), 0.1, 10, most=1
    ),
)
_TO, _OR = "..", ","
_ROUNDED = 0.01


def is_searched(text: str) -> bool:
    """Say whether an option names several numbers: 0.01..1, or 4,8,16."""
    return _TO in text or _OR in text


def read_range(name: str, text: str) -> tuple[Range | Values, str]:
    """Read LOW..HIGH or A,B,C; return it with the unit that the numbers have."""
    if _TO not in text:
        return Values(tuple(part.strip() for part in text.split(_OR))), ""
    low, _, high = text.partition(_TO)
    wrong = InvalidInputError(
        f"option {name}='{text}': write a range as 0.01..1, or values as 4,8,16."
    )
    try:
        (first, unit), (last, same) = _parts(low), _parts(high)
    except ValueError:
        raise wrong from None
    if unit != same:
        raise wrong
    return Range(first, last), unit


def _parts(text: str) -> tuple[float, str]:
    """Return the number of an option and its unit: 0.5/L is 0.5 and /L."""
    if text == "auto":
        return 1.0, "*auto"
    number = re.match(r"[^/*]*", text.strip())
    amount = number.group() if number else ""
    return float(amount), text.strip()[len(amount) :]


@dataclass(frozen=True)
class NamedSearch:
    """The search space of an algorithm.

    `build(options)` makes it, `known` are the options that it takes, `recommended` what
    the task has for them, and `given` what was chosen, some as ranges or values.
    """

    build: Callable[[Mapping[str, str]], AbstractAlgorithm]
    known: Collection[str]
    recommended: Mapping[str, str]
    given: Mapping[str, str]

    @property
    def fixed(self) -> dict[str, str]:
        """The options that stay."""
        return {n: v for n, v in self.given.items() if not is_searched(v)}

    def search(self, trials: int, sampler: str) -> Search | None:
        """Return the search, or None where there is nothing to choose."""
        space = self._space()
        if not space:
            return None
        return Search(
            lambda **point: self.build(self.options(point)), space, trials, sampler
        )

    def options(self, point: Point) -> dict[str, str]:
        """Return the options of a point, with those that stay."""
        chosen = self.fixed
        for name, value in point.items():
            if name in self.given:
                chosen[name] = f"{value}{read_range(name, self.given[name])[1]}"
        for one in self._dimensions:
            chosen |= self._scaled(one, point[one.name])
        return chosen

    def require_within(self, options: Mapping[str, str]) -> None:
        """Raise unless this search may choose these options, and all of them."""
        able = {name for one in self._dimensions for name in self._scaled(one, 1.0)}
        able |= {name for name, text in self.given.items() if is_searched(text)}
        if not options.keys() <= able:
            odd = ", ".join(sorted(options.keys() - able))
            raise InvalidInputError(f"{odd}: not what is tuned.")
        for name, text in options.items():
            if not self._is_within(name, text):
                raise InvalidInputError(f"{name}={text}: outside of what is tuned.")

    def _is_within(self, name: str, text: str) -> bool:
        if name in self.given:
            space, unit = read_range(name, self.given[name])
            if isinstance(space, Values):
                return text in space.values
            low, high = space.low, space.high
        else:
            (one,) = (one for one in self._dimensions if name in one.options)
            amount, unit = _parts(self.recommended[name])
            low, high = one.low * amount, one.high * amount
        try:
            value, own = _parts(text)
        except ValueError:
            return False
        # Trial values are rounded to three digits.
        return own == unit and low * (1 - _ROUNDED) <= value <= high * (1 + _ROUNDED)

    def _space(self) -> dict[str, Range | Values]:
        own = {n: v for n, v in self.given.items() if is_searched(v)}
        if own:
            return {name: read_range(name, text)[0] for name, text in own.items()}
        return {one.name: Range(one.low, one.high) for one in self._dimensions}

    @cached_property
    def _dimensions(self) -> list[Dimension]:
        """Return the entries of the table that this algorithm has, without set ones."""
        if any(is_searched(text) for text in self.given.values()):
            return []
        usual = self.build(self.fixed)
        return [one for one in SEARCHED if not eqx.tree_equal(usual, self._at(one))]

    def _at(self, one: Dimension) -> Any:
        return self.build({**self.fixed, **self._scaled(one, one.low)})

    def _scaled(self, one: Dimension, factor: float) -> dict[str, str]:
        """Return the options of a dimension that the task recommends, multiplied."""
        open_options = self.recommended.keys() & set(self.known) - self.given.keys()
        scaled = {}
        for option in one.options:
            if option in open_options:
                amount, unit = _parts(self.recommended[option])
                value = min(amount * factor, max(one.most, amount))
                scaled[option] = f"{value:.3g}{unit}"
        return scaled
