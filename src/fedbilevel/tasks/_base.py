"""The definition of a task, and the reading of its options."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import equinox as eqx
import numpy as np

from fedbilevel._registry import error_text
from fedbilevel._types import Lower, Metrics, Upper
from fedbilevel.datasets import Preparation
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.models import Predictor
from fedbilevel.problem import ClientData, Problem

# Noted with an option: files that every site keeps at a path of its own. They are
# compared by `Task(alike=...)`, and not by where they lie.
OWN_PLACE = "own place"
# All steps, where a task leaves them to what a run measures.
MEASURED = {"auto": "theta upper_step lower_step auxiliary_step"}
# The same but that of x, where its slopes say little of how far it must go.
MEASURED_BELOW = {"auto": "theta lower_step auxiliary_step"}
Point: TypeAlias = Mapping[str, np.ndarray]  # the leaves of x and y by name
_KINDS = (bool, int, float, str)  # of options
_WORDS = {"true": True, "false": False}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Take numbers, too, where settings are read as text."""
    return {name: str(value) for name, value in settings.items()}


def _static(default: Any) -> Any:
    """Return a field of a task that no program traces."""
    if isinstance(default, dict):
        return eqx.field(static=True, default_factory=lambda: dict(default))
    return eqx.field(static=True, default=default)


def settings(text: str) -> dict[str, str]:
    """Return NAME=VALUE pairs, as a command line has them, by name."""
    return dict(pair.split("=") for pair in text.split())


@runtime_checkable
class Averaged(Protocol):
    """Metrics that are answers of the problem which the clients have on average."""

    def of_data(self, data: ClientData) -> Metrics:
        """Return the answers for other data, or for other weights of its clients."""
        ...


@dataclass(frozen=True, eq=False)
class Origin:
    """Where the rows of a task come from.

    `summary` lists in plain data their source, the rows of every client, and encoded,
    filled and omitted columns. `places` has for each client the numbers of its training
    rows, lines or rows as `unit` says, in that source; `names` those of the same rows
    below it, where each is a file of its own. `by_rows` is False where losses count
    rows already: else clients count by theirs.
    """

    summary: Mapping[str, Any]
    unit: str = "row"
    places: tuple[np.ndarray, ...] = ()
    names: tuple[np.ndarray, ...] = ()
    by_rows: bool = True


@dataclass(frozen=True, eq=False)
class Tested:
    """Rows that no client has: raw features, and labels as clients have them.

    `site` has the number of each row's client, where a column says so.
    """

    features: np.ndarray
    label: np.ndarray
    site: np.ndarray | None


class Listed(NamedTuple):
    """A table to be kept with a result: the names of its columns, and its rows.

    `pictures` are images of the first rows, in bytes, where rows are such.
    """

    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    pictures: np.ndarray | None = None


class Option(NamedTuple):
    """An option of a task, for people."""

    default: Any
    meaning: str


class Task(eqx.Module):
    """A problem with everything needed to run it.

    `problem` are the two losses, `data` the rows of all clients, `x` and `y` the start.
    `metrics`, a function of (x, y), returns named numbers and may hold arrays (test
    data, closed forms). `headline` names the one to watch. `recommended` are settings
    for `fedbilevel run`: rounds, local_steps, batch, and the algorithm's options, with
    `auto` naming those steps that a run measures itself where it can, `auto:NAME` with
    what they are for one algorithm, such as `lower_step=1/L`. `shows_point` asks for x
    and y in reports, where they are small. `convex` is False where the lower level is
    not convex in y, so that an inverse Hessian says little. `algorithm` is the one to
    use when none is named. `calibration` has, for some algorithms, the parameters from
    which plans are scaled, with the `clients` and `iterations` they were chosen for.
    `conclusion`, a function of (task, point), reports more of a finished run from the
    named leaves of x and y, private ones stacked over clients; `concludes` names what
    it may report, each a "number" or "texts", a list of them: a server takes nothing
    else. `classes` names those of `label` in the rows, if there are any. `preparation`
    says how raw columns became the features of rows, where those are numbers in
    columns. `names` are those of the clients, where they have any; `origin` says where
    their rows are from, and `tested` are rows that no client has. `listing`, a function
    of (task, point), makes of the same point as `conclusion`, tables to be kept with a
    result, by the names of their files; `files`, a function of the same, makes the
    contents of other files, by their paths in the folder. `predictor` makes a model of
    a finished run that predicts. A lower headline is better. `tuned_by` names a metric
    that tuning may look at, one that knows no test rows, such as a closed form; without
    one it holds rows out. `alike`, a function of the task, returns fingerprints of what
    all sites of a federation must have alike, by the option that says where it is, such
    as a model.
    """

    problem: Problem
    data: ClientData
    x: Upper
    y: Lower
    metrics: Metrics | None = None
    headline: str = _static("upper_loss")
    recommended: Mapping[str, str] = eqx.field(
        static=True, converter=_as_text, default_factory=dict
    )
    shows_point: bool = _static(False)
    calibration: Mapping[str, Mapping[str, str]] = _static({})
    conclusion: Callable[["Task", Point], dict[str, Any]] | None = _static(None)
    concludes: Mapping[str, str] = _static({})
    convex: bool = _static(True)
    algorithm: str = _static("fedbio-controls")
    classes: tuple[str, ...] = _static(())
    preparation: Preparation | None = _static(None)
    names: tuple[str, ...] = _static(())
    origin: Origin | None = _static(None)
    tested: Tested | None = _static(None)
    listing: Callable[["Task", Point], dict[str, Listed]] | None = _static(None)
    files: Callable[["Task", Point], dict[str, bytes]] | None = _static(None)
    predictor: Predictor | None = _static(None)
    tuned_by: str = _static("")
    alike: Callable[["Task"], Mapping[str, str]] | None = _static(None)

    def __check_init__(self) -> None:
        if (self.conclusion is None) != (not self.concludes):
            raise InvalidInputError(
                "`Task(conclusion=..., concludes=...)`: give both or neither, the one "
                'with the names of what the other reports, each "number" or "texts".'
            )


def options_of(make: Callable[..., Task]) -> dict[str, Option]:
    """Return the options of a task with their defaults and meanings.

    They are the keyword arguments of `make`, annotated with what they mean. Further
    ones, `**table`, are annotated with the dataclass whose fields they are.
    """
    known = {}
    for one in inspect.signature(make).parameters.values():
        noted: Any = getattr(one.annotation, "__metadata__", ("",))[0]
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            known[one.name] = Option(one.default, noted)
        elif one.kind is inspect.Parameter.VAR_KEYWORD and is_dataclass(noted):
            for entry in fields(noted):
                known[entry.name] = Option(entry.default, entry.metadata["meaning"])
    return known


def own_places(make: Callable[..., Task]) -> tuple[str, ...]:
    """Return the options that say where each site has its copy of something."""
    return tuple(
        one.name
        for one in inspect.signature(make).parameters.values()
        if OWN_PLACE in getattr(one.annotation, "__metadata__", ())
    )


def option_defaults(make: Callable[..., Task]) -> dict[str, Any]:
    """Return the options of a task with their defaults."""
    known = {name: option.default for name, option in options_of(make).items()}
    for name, default in known.items():
        if type(default) not in _KINDS:
            raise InvalidInputError(
                f"option {name} of the task has no default, so its type is not known. "
                "Give it a number, a text, True or False."
            )
    return known


def built(
    make: Callable[..., Task], name: str, clients: int | None, values: Mapping[str, Any]
) -> Task:
    """Call a task's function, and say what is wrong with what it does."""
    given = () if clients is None else (clients,)
    try:
        inspect.signature(make).bind(*given, **values)
    except TypeError as error:
        raise InvalidInputError(
            f"task '{name}' cannot be made: {error}. Write it as `make(clients=8, *, "
            "option=default, ...)`."
        ) from error
    try:
        task = make(*given, **values)
    except FedbilevelError:
        raise
    except Exception as error:
        if make.__module__.startswith("fedbilevel."):
            raise  # a mistake in this package
        where = Path(inspect.getsourcefile(make) or "")
        raise InvalidInputError(
            f"task '{name}' cannot be made: {error_text(error, where)}."
        ) from error
    if not isinstance(task, Task):
        raise InvalidInputError(
            f"task '{name}' returned {type(task).__name__}, not a `fedbilevel.Task`."
        )
    return task


def read_options(
    make: Callable[..., Task], options: Mapping[str, str]
) -> dict[str, Any]:
    """Turn options written as text into the types of their defaults."""
    defaults = option_defaults(make)
    values = {}
    for name, text in options.items():
        kind = type(defaults[name])
        try:
            values[name] = _WORDS[text] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise InvalidInputError(
                f"option {name}='{text}' is not {_NAMES[kind]}."
            ) from None
    return {**defaults, **values}
