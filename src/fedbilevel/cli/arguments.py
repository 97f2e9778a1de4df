"""The arguments of the commands, read in groups that several commands share.

All are declared by `option`: those of experiments, searches, servers and sites as
fields of `fedbilevel._schema`, those of one command as defaults of its parameters.

Typer makes options of a function's parameters. `takes` gives a command the arguments of
groups as if it had declared them, and calls it with what each group was read into:

    @takes(experiment=EXPERIMENT.without("data"))
    def command(experiment: "Experiment", as_json: bool = AS_JSON) -> None: ...

Nothing here loads JAX before a command is called: help, and whatever is refused at
once, need none of it.
"""

import inspect
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel._schema import (
    WEIGHTS,
    Option,
    Settings,
    Tuning,
    check_bounds,
    option,
    options_of,
)
from fedbilevel._table_choices import TableChoices
from fedbilevel.cli import checks
from fedbilevel.errors import HeterogeneityWarning, InvalidInputError

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

_COLUMNS = "Which column of a table is what"
# Options of the tasks on tables that have arguments of their own, with their meanings.
TABLE = {one.name: known.meaning for one, known in options_of(TableChoices)}
_LISTED = "ignore"  # the one that may be repeated


def argument(name: str, declared: Field, kind: Any = None) -> Parameter:
    """Return an argument, declared by `option`, as a parameter that typer reads.

    Of one command's own arguments, the `kind` is that of the command's parameter.
    """
    known = Option(**declared.metadata)
    about = {"help": known.meaning, "metavar": known.metavar}
    if known.spelled == "":  # what it is its place says
        how = typer.Argument(**about)
    else:
        # A flag of one command alone has no opposite: nothing else sets it.
        flag = f"--{name.replace('_', '-')}" if kind is bool else None
        names = filter(None, [known.spelled or flag])
        how = typer.Option(*names, rich_help_panel=known.panel, **about)
    # A list that is left out is None, as typer has it.
    defaults = {MISSING: Parameter.empty, (): None}
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=defaults.get(declared.default, declared.default),
        annotation=Annotated[known.typed or declared.type or kind, how],
    )


def declared(kind: type, read: Callable[..., Any] | None = None) -> "Group":
    """Return the arguments that the fields of a dataclass declare, read as one."""
    flags = {known.flag or one.name: one for one, known in options_of(kind)}

    def made(**given: Any) -> Any:
        check_bounds(kind, given)
        return kind(**{flags[flag].name: value for flag, value in given.items()})

    return Group({}, read or made).having(**flags)


@dataclass(frozen=True)
class Group:
    """Arguments that are read together, by a function that is given them by name."""

    arguments: Mapping[str, Parameter]
    read: Callable[..., Any]

    def only(self, *names: str) -> "Group":
        """Return a group of these arguments alone."""
        return replace(self, arguments={name: self.arguments[name] for name in names})

    def without(self, *names: str) -> "Group":
        """Return the group without these arguments."""
        return self.only(*(name for name in self.arguments if name not in names))

    def having(self, **more: Field) -> "Group":
        """Return the group with more arguments, or with other ones in their place."""
        made = {name: argument(name, one) for name, one in more.items()}
        return replace(self, arguments={**self.arguments, **made})

    def defaulting(self, **values: Any) -> "Group":
        """Return the group with other values for what is left out."""
        changed = {n: self.arguments[n].replace(default=v) for n, v in values.items()}
        return replace(self, arguments={**self.arguments, **changed})


def takes(
    *early: Callable[[checks.Given], None], **groups: Group
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the arguments of groups, before its own.

    Names are looked at, and what else is checked `early`, before anything is loaded.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            made = {}
            for check in (checks.names, *early):
                check(given)
            for name, group in groups.items():
                mine = {one: given.pop(one) for one in group.arguments}
                made[name] = group.read(**mine)
            command(**made, **given)

        every: dict[str, Parameter] = {}
        for group in groups.values():
            every |= group.arguments
        for name, own in inspect.signature(command).parameters.items():
            if name not in groups:
                every[name] = argument(name, own.default, own.annotation)
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__annotations__ = {n: one.annotation for n, one in every.items()}
        called.__signature__ = inspect.Signature([*every.values()])  # type: ignore[attr-defined]
        return called

    return decorate


def read_experiment(**given: Any) -> "Experiment":
    """Return the experiment that the arguments of a command say."""
    if "stop_patience" in given:
        given["patience"] = given.pop("stop_patience")
    check_bounds(Settings, given)
    given["wrappers"] = tuple(given.get("wrappers") or ())
    weights = given.pop("weights", None)
    if weights is not None:
        in_words = weights in WEIGHTS
        given["weights"] = weights if in_words else read_numbers("weights", weights)
    own = {n: given.pop(n, None) for n in ("data", *TABLE)}
    options = read_settings(given.pop("settings") or [])
    options = _as_texts(own) | options
    with holding_ctrl_c():
        from fedbilevel.experiments import Experiment

    return Experiment(**given, options=options)


@contextmanager
def holding_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C wait while libraries are read: one that is interrupted may crash."""
    if threading.current_thread() is not threading.main_thread():
        yield  # the other one gets it
        return
    pressed: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def _table_options(*names: str, panel: str | None = None) -> dict[str, Field]:
    """Return options of these names that say how a table is read."""
    kinds = {one: list[str] | None if one == _LISTED else str | None for one in names}
    return {n: option(None, TABLE[n], typed=k, panel=panel) for n, k in kinds.items()}


def of_table(*names: str, panel: str | None = None) -> Group:
    """Return arguments of these names that are read into how a table is read."""
    group = Group({}, lambda **given: TableChoices(**_as_texts(given)))
    return group.having(**_table_options(*names, panel=panel))


def _as_texts(given: Mapping[str, Any]) -> dict[str, str]:
    """Return what was given; columns to leave out may be given one by one."""
    if _LISTED in given:
        given = {**given, _LISTED: ",".join(given[_LISTED] or ()) or None}
    return {name: value for name, value in given.items() if value is not None}


SETTINGS = {one.name: one for one in fields(Settings)}
EXPERIMENT = declared(Settings, read_experiment).having(
    # These become `options` of an experiment.
    data=option(
        None,
        "name, file or folder of the data; see `fedbilevel list data`",
        typed=str | None,
    ),
    **_table_options(*TABLE, panel=_COLUMNS),
    settings=option(
        None,
        "an option of the task or the algorithm; may be repeated. A tuned one may be a "
        "range, KEY=0.01..1, or a list, KEY=4,8,16",
        typed=list[str] | None,
        spelled="--set",
        metavar="KEY=VALUE",
    ),
)
TUNING = declared(Tuning)


def read_site_tuning(trial_rounds: int, **given: Any) -> dict[str, Any]:
    """Return how much is tried at sites, and how long a trial is."""
    at_least_one(trial_rounds=trial_rounds)
    return {**asdict(TUNING.read(**given)), "rounds": trial_rounds}


SITE_TUNING = replace(
    TUNING.without("rungs").having(
        trial_rounds=option(
            10, "rounds of a trial", typed=int, panel="Tuning of steps and weights"
        )
    ),
    read=read_site_tuning,
)
# There --patience has long been the seconds to wait for nodes.
FEDERATED = EXPERIMENT.without(
    *("runtime", "model_devices", "client_states", "checkpoint_rounds"),
    *("checkpoint_seconds", "patience", "dropout", "participation"),
).having(
    stop_patience=SETTINGS["patience"],
    clients=option(MISSING, "number of sites, K", typed=int),
)
AS_JSON = option(False, "print one JSON object, nothing else", spelled="--json")
PLAN_FILE = option(None, "file made by `fedbilevel plan --out`")
TRACK = option(
    None,
    "where every measured round is written: jsonl:FILE, tensorboard:FOLDER, "
    "mlflow:FOLDER or wandb:FOLDER (offline)",
    metavar="KIND:PLACE",
)


def read_settings(settings: list[str]) -> dict[str, str]:
    """Read KEY=VALUE, dashes in an option's name being underscores."""
    options = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InvalidInputError(
                f"--set {text}: write KEY=VALUE, for example theta=0.1."
            )
        owner, dot, rest = name.rpartition(".")
        options[f"{owner}{dot}{rest.replace('-', '_')}"] = value
    return options


def read_numbers(name: str, text: str) -> list[float]:
    """Read numbers separated by commas, each above 0."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise InvalidInputError(
            f"--{name} {text}: write numbers above 0, separated by commas."
        )
    return numbers


def read_counts(name: str, text: str) -> list[int]:
    """Read whole numbers separated by commas, each at least 1."""
    numbers = read_numbers(name, text)
    if not all(number.is_integer() for number in numbers):
        raise InvalidInputError(f"--{name} {text}: write whole numbers.")
    return [int(number) for number in numbers]


def at_least_one(**counts: int | None) -> None:
    """Raise if one of the counts is below 1; None is left to the task."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InvalidInputError(
                f"--{name.replace('_', '-')} {value}: must be at least 1."
            )


_SEVERAL = "Several processes"


@dataclass(frozen=True)
class Hosts:
    """Where the first process is, how many there are, and which one this is."""

    coordinator: str | None = option(
        None,
        "where process 0 of several waits for the others; trusted networks only",
        panel=_SEVERAL,
        metavar="HOST:PORT",
    )
    processes: int | None = option(None, "how many processes compute", panel=_SEVERAL)
    process: int | None = option(None, "which of them this is, from 0", panel=_SEVERAL)

    def join_if_asked(self) -> None:
        """Join the other processes; without any of the three arguments stay alone."""
        if (self.coordinator, self.processes, self.process) == (None, None, None):
            return
        if self.coordinator is None or self.processes is None or self.process is None:
            raise InvalidInputError(
                "--coordinator, --processes and --process belong together: several "
                "processes need all three, one process needs none."
            )
        from fedbilevel.runtime import join

        join(self.coordinator, self.processes, self.process)
        if self.process > 0:
            # Process 0 says it.
            warnings.simplefilter("ignore", HeterogeneityWarning)


HOSTS = declared(Hosts)
