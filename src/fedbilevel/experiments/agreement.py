"""The agreement of the server and the sites of a federation before it begins.

Settings: both sides compare fingerprints of them and of the algorithm. The task: a site
reports fields that are declared once, each with its check; the server takes these, of
the type and within the bounds of their checks, and refuses a site that reports anything
else. Steps, where a site takes them from the server: a trial of a search is a run of
its own, with steps, a seed and maybe rows that are held out, and the run itself is
given the steps that were chosen. All of it is in the hello.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from fedbilevel import algorithms, tasks
from fedbilevel._table_choices import FLAGS
from fedbilevel.algorithms import Entry
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.clients import agreed, decided, rows_of
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.run_folder import unlike
from fedbilevel.experiments.tuning import is_searched
from fedbilevel.federation.refusals import RefusedError, is_plain
from fedbilevel.federation.server.measuring import KINDS
from fedbilevel.result import to_plain
from fedbilevel.runtime.job import OWN_COLUMNS
from fedbilevel.studies.validation import HELD_OUT
from fedbilevel.tasks import Task
from fedbilevel.tasks._base import own_places

_LONGEST_NAME, _LONGEST_TEXT, _LONGEST_STEP = 100, 400, 40  # characters
_MOST, _MOST_STEPS = 4096, 32  # names, or entries of a list; steps of a hello
_LARGEST_SIZE = 2**31 - 1  # of rounds, local steps, batch
_LARGEST_SEED = 2**32 - 1
_SIZES = ("rounds", "local_steps", "batch")
_OWN_CODE = re.compile(r"own:[A-Za-z_][A-Za-z0-9_]*:[0-9a-f]{32}")


def local_options(task: str) -> tuple[str, ...]:
    """Return the options of a task that are each side's own business."""
    return (*FLAGS, *own_places(tasks.find(task)))


def shared_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that server and sites compare.

    Of a task or an algorithm in a file of one's own that is what stands in the file,
    wherever each side has it.
    """
    settings = experiment.shared()
    settings["task"] = tasks.identity(experiment.task)
    # Written as it was before rows were counted, so that such federations continue.
    weights = agreed(experiment)
    settings["weights"] = () if weights == "task" else weights
    if experiment.algorithm is not None:
        settings["algorithm"] = algorithms.identity(experiment.algorithm)
    own = local_options(experiment.task)
    options = {n: v for n, v in experiment.options.items() if n not in own}
    return {**settings, "options": options}


def without_files(
    settings: Mapping[str, Any], held: Mapping[str, str]
) -> dict[str, Any]:
    """Return settings that came from elsewhere, with no file named but by `held`.

    A site runs only code that its operator has named: in `held`, under task and
    algorithm.
    """
    own = dict(settings)
    for kind, is_file in (("task", tasks.is_file), ("algorithm", algorithms.is_file)):
        if kind in held:
            own[kind] = held[kind]
        elif is_file(str(own.get(kind))):
            raise InvalidInputError(
                f"the server runs the {kind} {tasks.label(str(own[kind]))} of a file. "
                "A site runs only code that it has itself: name your own copy of it, "
                f"{kind}=path/to/file.py:name, in the configuration of this node."
            )
    return own


def federated_entry(name: str) -> Entry:
    """Return an algorithm that can run where rows stay at the sites."""
    entry = algorithms.find(name)
    if entry.pools:
        raise InvalidInputError(
            f"'{name}' needs the rows of all clients in one place, so that it cannot "
            "run on sites. Simulate it, or choose another algorithm."
        )
    return entry


def meaning(task: Task, prepared: bool) -> dict[str, Any]:
    """Return what sites must agree on so that numbers of x and y mean the same.

    Each scales features by its own rows, unless all are `prepared` alike.
    """
    made = task.preparation if prepared else None
    known = {"classes": task.classes}
    return known if made is None else {**known, "preparation": made.to_json()}


def require_alike(
    one: tuple[str, Mapping[str, str]], other: tuple[str, Mapping[str, str]], all_: str
) -> None:
    """Raise where two sides have other models, or other tokenizers, by fingerprints."""
    (who, found), (whom, held) = one, other
    for name in sorted(unlike(held, found)):
        raise InvalidInputError(
            f"the {name} of {who} is not that of {whom}: their fingerprints are "
            f"{found.get(name)} and {held.get(name)}. Copy the same files to {all_}."
        )


def sized_here(experiment: Experiment) -> Experiment:
    """Return an experiment of a trial with as many sites as its data name, or 4."""
    if experiment.clients is not None:
        return experiment
    task = replace(experiment, weights="task").build_task()[0]
    return replace(experiment, clients=task.data.clients if task.names else 4)


def counted_here(experiment: Experiment) -> tuple[Experiment, str]:
    """Return an experiment of a trial with what sites count, and how to say it."""
    rows = None
    if experiment.weights in (None, "rows"):
        rows = rows_of(replace(experiment, weights="task").build_task()[0])
    weights, words = decided(experiment, rows, experiment.sites)
    return replace(experiment, weights=weights or agreed(experiment)), words


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
    right = isinstance(value, list) and [*map(type, value)] == [list, list]
    return right and all(_is_flag(flag) for level in value for flag in level)


def _settings_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: _are_settings(value) and all(map(check, value.values()))


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
    concludes: Mapping[str, str] = _reported(_settings_of(KINDS.__contains__))
    x: list[str] = _reported(_are_names)
    y: list[str] = _reported(_are_names)
    private: list[list[bool]] = _reported(_are_private)
    tuned_by: str | None = _reported(_is_name, default=None)
    alike: Mapping[str, str] | None = _reported(_settings_of(_is_name), default=None)
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


@dataclass(frozen=True)
class SiteSteps:
    """Steps as options write them, a seed, and whether sites hold rows out."""

    steps: Mapping[str, str]
    seed: int
    held_out: bool = False

    def applied(self, experiment: Experiment) -> Experiment:
        """Return an experiment with these steps, and this seed."""
        options = {**without_searched(experiment).options, **self.steps}
        return replace(experiment, options=options, seed=self.seed)

    @staticmethod
    def read(info: Mapping[str, Any]) -> "SiteSteps":
        """Read the steps of a hello; refuse what no server of ours would send."""
        steps, seed, apart = (info.get(n) for n in ("steps", "seed", "held_out"))
        right = set(info) == {"steps", "seed", "held_out"}
        right &= type(seed) is int and 0 <= seed <= _LARGEST_SEED
        right &= type(apart) is bool and isinstance(steps, dict)
        if not right or len(steps) > _MOST_STEPS:  # type: ignore[arg-type]
            raise RefusedError("steps", "has no steps, seed and rows to hold out")
        for name, text in steps.items():  # type: ignore[union-attr]
            if not is_plain(name, _LONGEST_STEP) or not is_plain(text, _LONGEST_STEP):
                raise RefusedError("steps", f"{name!r:.40} cannot be {text!r:.40}")
        return SiteSteps(steps, seed, apart)  # type: ignore[arg-type]


def without_searched(experiment: Experiment) -> Experiment:
    """Return an experiment without the ranges and lists that are to be searched."""
    searched = {n for n, text in experiment.method_options.items() if is_searched(text)}
    kept = {n: text for n, text in experiment.options.items() if n not in searched}
    return replace(experiment, options=kept)
