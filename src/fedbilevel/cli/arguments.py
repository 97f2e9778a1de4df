"""The arguments of the commands, read in groups that several commands share.

Those of experiments, searches, servers and sites are fields of `fedbilevel._schema`.

Typer makes options of a function's parameters. `takes` gives a command the arguments of
groups as if it had declared them, and calls it with what each group was read into:

    @takes(experiment=EXPERIMENT.without("data"))
    def command(experiment: "Experiment", as_json: AsJson = False) -> None: ...

Nothing here loads JAX before a command is called: help, and whatever is refused at
once, need none of it.
"""

import inspect
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fedbilevel._schema import WEIGHTS, Settings, Tuning, check_bounds, options_of
from fedbilevel._table_choices import TableChoices
from fedbilevel.cli import checks
from fedbilevel.errors import InvalidInputError

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

REQUIRED = inspect.Parameter.empty
_COLUMNS = "Which column of a table is what"
# Options of the tasks on tables that have arguments of their own, with their meanings.
TABLE = {one.name: known.meaning for one, known in options_of(TableChoices)}
_LISTED = "ignore"  # the one that may be repeated


class Argument(NamedTuple):
    """How typer reads an argument, and what it is if it is left out."""

    annotation: Any
    default: Any = REQUIRED


def option(
    kind: Any,
    default: Any,
    text: str,
    *,
    panel: str | None = None,
    metavar: str | None = None,
    spelled: str | None = None,
) -> Argument:
    """Declare an option of a type, under the name of its parameter or another one."""
    names = () if spelled is None else (spelled,)
    how = typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)
    return Argument(Annotated[kind, how], default)


def declared(kind: type, read: Callable[..., Any]) -> "Group":
    """Return the arguments that the fields of a dataclass declare."""
    arguments = {}
    for one, known in options_of(kind):
        typed, flag = known.typed or one.type, known.flag or one.name
        if one.default is MISSING:
            how = typer.Argument(help=known.meaning)
            arguments[flag] = Argument(Annotated[typed, how])
            continue
        # A type of its own stands for text, which is read here.
        default = one.default if known.typed is None else None
        shown = {n: getattr(known, n) for n in ("panel", "metavar", "spelled")}
        arguments[flag] = option(typed, default, known.meaning, **shown)
    return Group(arguments, read)


@dataclass(frozen=True)
class Group:
    """Arguments that are read together, by a function that is given them by name."""

    arguments: Mapping[str, Argument]
    read: Callable[..., Any]

    def only(self, *names: str) -> "Group":
        """Return a group of these arguments alone."""
        return replace(self, arguments={name: self.arguments[name] for name in names})

    def without(self, *names: str) -> "Group":
        """Return the group without these arguments."""
        return self.only(*(name for name in self.arguments if name not in names))

    def having(self, **arguments: Argument) -> "Group":
        """Return the group with more arguments, or with other ones in their place."""
        return replace(self, arguments={**self.arguments, **arguments})

    def defaulting(self, **values: Any) -> "Group":
        """Return the group with other values for what is left out."""
        changed = {n: self.arguments[n]._replace(default=v) for n, v in values.items()}
        return self.having(**changed)


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

        own = inspect.signature(command).parameters.items()
        every = {
            **{n: a for group in groups.values() for n, a in group.arguments.items()},
            **{n: Argument(p.annotation, p.default) for n, p in own if n not in groups},
        }
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=one.default,
                annotation=one.annotation,
            )
            for name, one in every.items()
        ]
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__annotations__ = {n: one.annotation for n, one in every.items()}
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
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


def of_table(*names: str, panel: str | None = None) -> dict[str, Argument]:
    """Return arguments of these names that say how a table is read."""
    kinds = {one: list[str] | None if one == _LISTED else str | None for one in names}
    return {n: option(kind, None, TABLE[n], panel=panel) for n, kind in kinds.items()}


def read_choices(**given: Any) -> TableChoices:
    """Return how a table is read; what was left out has its default."""
    return TableChoices(**_as_texts(given))


def _as_texts(given: Mapping[str, Any]) -> dict[str, str]:
    """Return what was given; columns to leave out may be given one by one."""
    if _LISTED in given:
        given = {**given, _LISTED: ",".join(given[_LISTED] or ()) or None}
    return {name: value for name, value in given.items() if value is not None}


_SETTINGS = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="an option of the task or the algorithm; may be repeated. A tuned one may "
        "be a range, KEY=0.01..1, or a list, KEY=4,8,16",
    ),
]
# Arguments that become `options` of an experiment.
_OPTIONS = {
    "data": option(
        str | None,
        None,
        "name, file or folder of the data; see `fedbilevel list data`",
    ),
    **of_table(*TABLE, panel=_COLUMNS),
    "settings": Argument(_SETTINGS, None),
}
EXPERIMENT = declared(Settings, read_experiment).having(**_OPTIONS)


def read_tuning(**given: Any) -> Tuning:
    """Return how much is tried."""
    check_bounds(Tuning, given)
    return Tuning(seeds=given.pop("tuning_seeds"), **given)


TUNING = declared(Tuning, read_tuning)


def read_site_tuning(trial_rounds: int, **given: Any) -> tuple[Tuning, int]:
    """Return how much is tried at sites, and how long a trial is."""
    at_least_one(trial_rounds=trial_rounds)
    return read_tuning(**given), trial_rounds


SITE_TUNING = replace(
    TUNING.without("rungs").having(
        trial_rounds=option(
            int, 10, "rounds of a trial", panel="Tuning of steps and weights"
        )
    ),
    read=read_site_tuning,
)
# There --patience has long been the seconds to wait for nodes.
FEDERATED = EXPERIMENT.without(
    *("runtime", "model_devices", "client_states", "checkpoint_rounds"),
    *("checkpoint_seconds", "patience", "dropout", "participation"),
).having(
    stop_patience=EXPERIMENT.arguments["patience"],
    clients=option(int, REQUIRED, "number of sites, K"),
)
THEOREMS = ("local-bsgvrm", "local-bsgm", "fedbioacc", "fednest")
THEOREM_ALGORITHM = option(str, THEOREMS[0], ", ".join(THEOREMS))

AsJson = Annotated[
    bool, typer.Option("--json", help="print one JSON object, nothing else")
]
NewFolder = Annotated[
    Path | None, typer.Option(help="new folder for checkpoints and result")
]
PlanFile = Annotated[
    Path | None, typer.Option(help="file made by `fedbilevel plan --out`")
]
Track = Annotated[
    str | None,
    typer.Option(
        metavar="KIND:PLACE",
        help="where every measured round is written: jsonl:FILE, tensorboard:FOLDER, "
        "mlflow:FOLDER or wandb:FOLDER (offline)",
    ),
]
Seeds = Annotated[int, typer.Option(help="random seeds of every point")]
Theorem = Annotated[
    int | None,
    typer.Option(help="1: LocalBSGM; 2, 3: LocalBSGVRM with constant, decaying step"),
]


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
