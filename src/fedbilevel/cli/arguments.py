"""The arguments of the commands: each is declared once, and read in groups.

Typer makes options of a function's parameters. `takes` gives a command the arguments of
groups as if it had declared them, and calls it with what each group was read into:

    @takes(experiment=EXPERIMENT.without("data"))
    def command(experiment: "Experiment", as_json: AsJson = False) -> None: ...

Nothing here loads JAX before a command is called: help, and whatever is refused at
once, need none of it.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fedbilevel._table_choices import TableChoices
from fedbilevel.cli import checks
from fedbilevel.errors import InvalidInputError

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment
    from fedbilevel.experiments.searching import Tuning

__all__ = [
    "EXPERIMENT",
    "FEDERATED",
    "TABLE",
    "THEOREM_ALGORITHM",
    "Argument",
    "AsJson",
    "Group",
    "NewFolder",
    "PlanFile",
    "Seeds",
    "THEOREMS",
    "Theorem",
    "Track",
    "TUNING",
    "at_least_one",
    "option",
    "read_counts",
    "read_numbers",
    "read_settings",
    "takes",
]

REQUIRED = inspect.Parameter.empty
_ENDING = "When the run ends before its last round"
_CHANNEL = "What messages go through"
_COLUMNS = "Which column of a table is what"
# Options of the tasks on tables that have arguments of their own, with their meanings.
TABLE = {
    one.name: one.metadata["meaning"]
    for one in fields(TableChoices)
    if one.name != "predict"
}
_COUNTS = ("clients", "rounds", "local_steps", "batch")
_COUNTS += ("patience", "max_bytes", "max_samples", "model_devices")


class Argument(NamedTuple):
    """How typer reads an argument, and what it is if it is left out."""

    annotation: Any
    default: Any = REQUIRED


def option(
    kind: Any, default: Any, text: str, *names: str, panel: str | None = None
) -> Argument:
    """Declare an option of a type; without a name it has that of its parameter."""
    told = typer.Option(*names, help=text, rich_help_panel=panel)
    return Argument(Annotated[kind, told], default)


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
    at_least_one(**{name: given[name] for name in _COUNTS if name in given})
    seconds = given.get("max_seconds")
    if seconds is not None and not seconds > 0:
        raise InvalidInputError(f"--max-seconds {seconds:g}: must be above 0.")
    if given.get("weights") is not None:
        given["weights"] = tuple(read_numbers("weights", given["weights"]))
    else:
        given.pop("weights", None)
    own = {n: given.pop(n, None) for n in ("data", *TABLE)}
    options = read_settings(given.pop("settings") or [])
    options = {n: v for n, v in own.items() if v is not None} | options
    from fedbilevel.experiments import Experiment

    return Experiment(**given, options=options)


_SETTINGS = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="an option of the task or the algorithm; may be repeated. What is tuned "
        "may be a range, KEY=0.01..1, or a list, KEY=4,8,16",
    ),
]
EXPERIMENT = Group(
    {
        "task": Argument(
            Annotated[
                str,
                typer.Argument(
                    help="see `fedbilevel list tasks`, or path/to/file.py:make"
                ),
            ]
        ),
        "algorithm": option(
            str | None,
            None,
            "see `fedbilevel list algorithms`, or path/to/file.py:Name; the task's own "
            "if left out",
        ),
        "clients": option(int | None, None, "number of clients, K"),
        "participants": option(
            int | None, None, "clients drawn per exchange; all if left out"
        ),
        "weights": option(
            str | None,
            None,
            "what the clients count in means, W0,W1,...; the task's own if left out",
        ),
        "rounds": option(int | None, None, "communication rounds"),
        "local_steps": option(int | None, None, "local steps between two rounds, p"),
        "batch": option(int | None, None, "rows per sample"),
        "seed": option(int, 0, "random seed of samples and cohorts"),
        "data": option(
            str | None,
            None,
            "name, file or folder of the data; see `fedbilevel list data`",
        ),
        **{
            name: option(str | None, None, meaning, panel=_COLUMNS)
            for name, meaning in TABLE.items()
        },
        "settings": Argument(_SETTINGS, None),
        "runtime": option(str, "simulator", "simulator or reference"),
        "model_devices": option(
            int, 1, "devices that share one copy of the model that the task has frozen"
        ),
        "client_states": option(
            str | None,
            None,
            "folder for what clients keep between rounds, where few of many take part: "
            "less memory, more time",
        ),
        "precision": option(str, "float32", "float32 or float64"),
        "measure_every": option(int, 1, "rounds between two measurements"),
        "checkpoint_rounds": option(int | None, None, "rounds between two checkpoints"),
        "checkpoint_seconds": option(float, 30.0, "seconds between two checkpoints"),
        "safeguard": Argument(
            Annotated[
                bool,
                typer.Option(
                    "--safeguard/--no-safeguard",
                    help="measure the steps that the task leaves to the run, and where "
                    "it explodes, go back and on by shorter ones",
                ),
            ],
            True,
        ),
        "target": option(
            float | None,
            None,
            "value of the task's main metric at or below which the run ends",
            panel=_ENDING,
        ),
        "patience": option(
            int | None,
            None,
            "measurements in a row, none better than the best before, that end it",
            panel=_ENDING,
        ),
        "max_bytes": option(
            int | None,
            None,
            "bytes that all clients together may send and receive",
            panel=_ENDING,
        ),
        "max_samples": option(
            int | None, None, "rows that all clients together may draw", panel=_ENDING
        ),
        "max_seconds": option(
            float | None,
            None,
            "seconds that it may run, without those of compiling",
            panel=_ENDING,
        ),
        "clip": option(
            str | None,
            None,
            "norm that every block of a client's change is cut down to; `quantile` or "
            "quantile:SHARE follows the norms, in local steps, too",
            panel=_CHANNEL,
        ),
        "noise": option(
            float,
            0.0,
            "noise multiplier of a block: deviation of the sum / clip",
            panel=_CHANNEL,
        ),
        "delta": option(float, 1e-5, "delta at which epsilon is told", panel=_CHANNEL),
        "compress": option(
            str | None,
            None,
            "topk:FRACTION, quantize:BITS or bfloat16, of what goes up",
            panel=_CHANNEL,
        ),
        "compress_down": option(
            str | None, None, "bfloat16, of what goes down", panel=_CHANNEL
        ),
        "aggregate": option(
            str,
            "mean",
            "mean, secure, median, trimmed-mean:FRACTION, geometric-median or "
            "krum:FAULTY",
            panel=_CHANNEL,
        ),
    },
    read_experiment,
)
_SEARCH = "How steps and weights are tuned"


def read_tuning(trials: int, rungs: int, tuning_seeds: int, sampler: str) -> "Tuning":
    """Return how much is tried."""
    at_least_one(trials=trials, rungs=rungs, tuning_seeds=tuning_seeds)
    from fedbilevel.experiments.searching import Tuning

    return Tuning(trials, rungs, tuning_seeds, sampler)


TUNING = Group(
    {
        "trials": option(
            int, 20, "points to try; lists of values are all tried", panel=_SEARCH
        ),
        "rungs": option(
            int,
            1,
            "1 runs all to the end; of more, after each the best third goes on, three "
            "times as long",
            panel=_SEARCH,
        ),
        "tuning_seeds": option(
            int,
            2,
            "random seeds of every trial, others than the result's",
            panel=_SEARCH,
        ),
        "sampler": option(
            str,
            "fitted",
            "fitted: later points follow from earlier ones; even; or optuna, if it is "
            "installed",
            panel=_SEARCH,
        ),
    },
    read_tuning,
)


def read_site_tuning(trial_rounds: int, **given: Any) -> tuple["Tuning", int]:
    """Return how much is tried at sites, and how long a trial is."""
    at_least_one(trial_rounds=trial_rounds)
    return read_tuning(rungs=1, **given), trial_rounds


SITE_TUNING = Group(
    {
        "trial_rounds": option(int, 10, "rounds of a trial", panel=_SEARCH),
        **{name: one for name, one in TUNING.arguments.items() if name != "rungs"},
    },
    read_site_tuning,
)
# There --patience has long been the seconds to wait for nodes.
FEDERATED = EXPERIMENT.without(
    *("runtime", "model_devices", "client_states", "checkpoint_rounds"),
    *("checkpoint_seconds", "patience"),
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
