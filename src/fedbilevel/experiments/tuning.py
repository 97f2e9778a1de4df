"""Tunes a named experiment: its steps and weights, or the options that have ranges.

Steps and weights are multiples of what the task recommends, so that a search is the
same where that is a share of the curvature.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx

from fedbilevel import algorithms
from fedbilevel._folders import SEARCH, TUNED, check_place, require_new
from fedbilevel._schema import Tuning as Tuning
from fedbilevel.algorithms import AbstractAlgorithm, Entry
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import run_folder
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.options import options_of
from fedbilevel.runtime import Watch
from fedbilevel.studies.searching import Point, Range, Search, Values
from fedbilevel.studies.setting import Keeping
from fedbilevel.studies.tuning import Tuned, tuned, tuning_seeds


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
        own = {n: read_range(n, v)[0] for n, v in self.given.items() if is_searched(v)}
        space = own | {one.name: Range(one.low, one.high) for one in self._dimensions}
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

    @cached_property
    def _dimensions(self) -> list[Dimension]:
        """Return the entries of the table that this algorithm has, without set ones."""
        if any(is_searched(text) for text in self.given.values()):
            return []
        usual, found = self.build(self.fixed), []
        for one in SEARCHED:
            other = self.build({**self.fixed, **self._scaled(one, one.low)})
            if not eqx.tree_equal(usual, other):
                found.append(one)
        return found

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


@dataclass(frozen=True)
class NamedTuned:
    """The result of tuning, by names: the `experiment` with the chosen options.

    `trials` has the options of every trial, its mean judgment and its rounds.
    """

    found: Tuned
    experiment: Experiment
    options: dict[str, str]
    trials: list[tuple[dict[str, str], float, int]]

    @property
    def command(self) -> str:
        """The command for a run with the chosen options."""
        return run_folder.run_command(asdict(self.experiment), "simulator")

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = self.found
        names = ("options", "value", "rounds")
        tried = [dict(zip(names, one, strict=True)) for one in self.trials]
        return {
            "task": self.experiment.label,
            "algorithm": self.experiment.algorithm,
            "options": self.options,
            "command": self.command,
            "judged_by": found.judged_by,
            "seeds": list(found.seeds),
            "cost": found.cost,
            "unit": found.unit,
            "trials": tried,
        }


def tune(
    experiment: Experiment,
    tuning: Tuning | None = None,
    *,
    folder: Path | str | None = None,
    watch: Watch | None = None,
) -> NamedTuned:
    """Search options of an experiment's algorithm.

    Those that are given stay, but for ranges, such as 0.01..1, and lists, such as
    4,8,16, which are what is searched. Without any, steps and weights are. With a
    folder the same call continues there where an earlier one was interrupted.
    """
    asked = tuning or Tuning()
    settings = {"experiment": asdict(experiment), "tuning": asdict(asked)}
    folder = None if folder is None else Path(folder)
    if folder is not None:
        _check_folder(folder, settings)
    experiment.check()
    task, values, chosen = experiment.build_task()
    entry = algorithms.find(experiment.algorithm_for(task))
    about = (task.recommended, task.data.clients, chosen)
    named = search_of(experiment, entry, *about)
    search = named.search(asked.trials, asked.sampler)
    if search is None:
        raise InvalidInputError(
            f"there is nothing to tune: {entry.name} has no step or weight that was "
            "left open. Give a range, such as --set KEY=0.01..1."
        )
    middle = named.options(search.proposed(1, ())[0])
    for_task = {n: v for n, v in experiment.options.items() if n not in chosen}
    made = replace(experiment, algorithm=experiment.algorithm or task.algorithm)
    built = replace(made, options={**for_task, **middle}).bind(task, values)
    built.job()  # which warns where the limit will be off
    if folder is not None:
        run_folder.write_json(folder / SEARCH, settings)
    found = tuned(
        built.setting,
        search,
        built.rounds,
        tuning_seeds([experiment.seed], asked.seeds),
        rungs=asked.rungs,
        keeping=None if folder is None else Keeping(folder, resume=True),
        watch=watch,
    )
    best = named.options(found.point)
    made = replace(made, options={**for_task, **best})
    result = NamedTuned(found, made, best, trials_of(named, found))
    if folder is not None:
        run_folder.write_json(folder / TUNED, result.summary())
    return result


def search_of(
    experiment: Experiment,
    entry: Entry,
    recommended: Mapping[str, str],
    clients: int,
    chosen: Mapping[str, str],
) -> NamedSearch:
    """Return what is searched of an algorithm, by what a task recommends."""

    def build(options: Mapping[str, str]) -> AbstractAlgorithm:
        one = replace(experiment, algorithm=entry.name, options=options)
        return one.algorithm_by(entry, recommended, clients)

    usual = experiment.steps_of(recommended, entry.name)
    return NamedSearch(build, options_of(entry), usual, chosen)


def trials_of(
    named: NamedSearch, found: Tuned
) -> list[tuple[dict[str, str], float, int]]:
    """Return the options of every trial, what it came to, and its rounds."""
    return [(named.options(t.point), t.value, t.rounds) for t in found.trials]


def _check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise unless a folder is new, or holds this very search."""
    path = folder / SEARCH
    if not path.exists():
        require_new(folder)
        check_place(folder)
    run_folder.require_same_search(path, settings)
