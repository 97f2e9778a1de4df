"""What a command passes on: the functions that it hands over to keep what they get."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.cli.output import Console

COMMANDS = get_group(app).commands
Row = tuple[str, Mapping[str, Any]]
GONE = object()  # what is not passed on at all


class Case(NamedTuple):
    """A line that is taken, by whom, what they get, and what every option changes.

    `spied` has the functions that are replaced, and what each returns for its
    arguments. A row has words to add to the line, or a whole line of its own, and the
    ends of the keys in `default` with their values then.
    """

    line: str
    spied: Mapping[str, Callable[[Mapping[str, Any]], Any]]
    default: Mapping[str, Any]
    rows: Mapping[str, Row]


def nothing(given: Mapping[str, Any]) -> None:
    del given


def same(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda given: given[name]


def a_watch(given: Mapping[str, Any]) -> Any:
    """What `watched` yields: its parts are known by their names."""

    def stage(*_: Any) -> None: ...
    def say(*_: Any) -> None: ...
    def begin(*_: Any) -> None: ...

    return nullcontext(SimpleNamespace(stage=stage, say=say, begin=begin))


def passed_on(case: Case, words: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Run a command; return what functions got, by `function.argument`."""
    seen: dict[str, Any] = {}
    for place, gives in case.spied.items():
        spy(monkeypatch, place, gives, seen)
    command = case.line.split()[0]
    line = words if words.split()[:1] == [command] else f"{case.line} {words}"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, (done.output, done.exception)
    return seen


def _found(place: str) -> Any:
    """Return a module, or a class in one."""
    try:
        return import_module(place)
    except ModuleNotFoundError:
        module, _, name = place.rpartition(".")
        return getattr(import_module(module), name)


def spy(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    gives: Callable[[Mapping[str, Any]], Any],
    seen: dict[str, Any],
) -> None:
    """Replace a function by one that notes in `seen` what it gets."""
    module, _, name = place.rpartition(".")
    owner = _found(module)
    signature = inspect.signature(getattr(owner, name))

    def called(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        for one, value in bound.arguments.items():
            what = "experiment" if one == "self" else one
            seen.update(_told(f"{name}.{what}", value))
        return gives(bound.arguments)

    called.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, name, called)


def _told(key: str, value: Any) -> dict[str, Any]:
    """Return a value by its key; a dataclass by those of its fields."""
    parts: dict[str, Any] = {}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: getattr(value, one.name) for one in fields(value)}
        parts.pop("token", None)  # a secret, another one every time
    if key.endswith("experiment.options"):
        parts = dict(value)  # type: ignore[call-overload]
    told: dict[str, Any] = {}
    for name, part in parts.items():
        told |= _told(f"{key}.{name}", part)
    if parts or key.endswith("experiment.options"):
        return told
    if isinstance(value, Console):
        return {key: "stderr" if value.stderr else "stdout"}
    if isinstance(value, FunctionType | MethodType):
        return {key: value.__name__}
    return {key: "watch" if isinstance(value, SimpleNamespace) else value}


def expected(case: Case, option: str) -> dict[str, Any]:
    """Return what is passed on with one option, and all else as it was."""
    _, changes = case.rows[option]
    wanted = dict(case.default)
    for end, value in changes.items():
        keys = [one for one in wanted if one == end or one.endswith(f".{end}")]
        if not keys and end.startswith("experiment."):  # an option that was not there
            ends = (one.split("experiment.") for one in wanted)
            keys = [f"{owner}{end}" for owner, *rest in ends if rest == ["task"]]
        for key in keys or [end]:
            wanted[key] = value
    return {key: value for key, value in wanted.items() if value is not GONE}


def checks_of(cases: Mapping[str, Case]) -> tuple[Callable, Callable]:
    """Return the tests of a table: of its defaults, and of each of its options."""
    rows = [(name, option) for name, case in cases.items() for option in case.rows]

    @pytest.mark.parametrize("name", cases)
    def defaults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert passed_on(cases[name], "", monkeypatch) == cases[name].default

    @pytest.mark.parametrize(("name", "option"), rows)
    def options(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
        case = cases[name]
        found = passed_on(case, case.rows[option][0], monkeypatch)
        assert found == expected(case, option)

    return defaults, options


def uncovered(cases: Mapping[str, Case], command: str) -> set[str]:
    """Return the options of a command of which no row says where they go."""
    own = [case for case in cases.values() if case.line.split()[0] == command]
    known = {option for case in own for option in case.rows}
    return {str(one.name) for one in COMMANDS[command].params} ^ known


SETTINGS = {
    "task": "quadratic",
    "algorithm": None,
    "clients": None,
    "participants": None,
    "rounds": None,
    "local_steps": None,
    "batch": None,
    "seed": 0,
    "runtime": "simulator",
    "model_devices": 1,
    "client_states": None,
    "dropout": 0.0,
    "participation": None,
    "precision": "float32",
    "measure_every": None,
    "checkpoint_rounds": None,
    "checkpoint_seconds": 30.0,
    "target": None,
    "patience": None,
    "max_bytes": None,
    "max_samples": None,
    "max_seconds": None,
    "clip": None,
    "noise": 0.0,
    "delta": 1e-5,
    "compress": None,
    "compress_down": None,
    "aggregate": "mean",
    "wrappers": (),
    "safeguard": True,
    "weights": None,
    "force": False,
}
CHOSEN = {name: value for name, value in SETTINGS.items() if value is not None}
TUNED = ("trials", "rungs", "tuning_seeds", "sampler")
TUNING = {"trials": 20, "rungs": 1, "seeds": 2, "sampler": "fitted"}


def told(owner: str, **values: Any) -> dict[str, Any]:
    """Return values by the keys that the arguments of a function have."""
    return {f"{owner}.{name}": value for name, value in values.items()}


def of(owner: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of an experiment that a function gets."""
    return told(f"{owner}.experiment", **{**SETTINGS, **changes})


def row(flag: str, value: Any, name: str, result: Any = None) -> Row:
    """Return a row of an option of experiments."""
    return f"--{flag} {value}", {f"experiment.{name}": result or value}


SHARED = {
    "algorithm": row("algorithm", "fedbio", "algorithm"),
    "clients": row("clients", 3, "clients"),
    "participants": row("participants", 2, "participants"),
    "rounds": row("rounds", 7, "rounds"),
    "local_steps": row("local-steps", 5, "local_steps"),
    "batch": row("batch", 6, "batch"),
    "seed": row("seed", 9, "seed"),
    "runtime": row("runtime", "reference", "runtime"),
    "model_devices": row("model-devices", 2, "model_devices"),
    "client_states": row("client-states", "states", "client_states"),
    "dropout": row("dropout", 0.25, "dropout"),
    "participation": row("participation", "0.5,1", "participation"),
    "precision": (
        "--precision float64",
        {"experiment.precision": "float64", "configure.precision": "float64"},
    ),
    "measure_every": row("measure-every", 4, "measure_every"),
    "checkpoint_rounds": row("checkpoint-rounds", 11, "checkpoint_rounds"),
    "checkpoint_seconds": row("checkpoint-seconds", 12.5, "checkpoint_seconds"),
    "target": row("target", 0.125, "target"),
    "patience": row("patience", 13, "patience"),
    "stop_patience": row("stop-patience", 13, "patience"),
    "max_bytes": row("max-bytes", 14, "max_bytes"),
    "max_samples": row("max-samples", 15, "max_samples"),
    "max_seconds": row("max-seconds", 16.5, "max_seconds"),
    "clip": row("clip", "2.5", "clip", 2.5),
    "noise": row("noise", 1.5, "noise"),
    "delta": row("delta", 1e-3, "delta"),
    "compress": row("compress", "topk:0.5", "compress"),
    "compress_down": row("compress-down", "bfloat16", "compress_down"),
    "aggregate": row("aggregate", "median", "aggregate"),
    "wrappers": (
        "--with controls --with average",
        {"experiment.wrappers": ("controls", "average")},
    ),
    "safeguard": ("--no-safeguard", {"experiment.safeguard": False}),
    "weights": row("weights", "1,2.5", "weights", (1.0, 2.5)),
    "force": ("--force", {"experiment.force": True}),
    "settings": (
        "--set lr-x=0.2 --set fedbio.lr-y=3",
        {"experiment.options.lr_x": "0.2", "experiment.options.fedbio.lr_y": "3"},
    ),
    "data": row("data", "digits", "options.data"),
    "label": row("label", "sick", "options.label"),
    "site": row("site", "ward", "options.site"),
    "group": row("group", "age", "options.group"),
    "ignore": ("--ignore a --ignore b,c", {"experiment.options.ignore": "a,b,c"}),
    "missing": row("missing", "drop", "options.missing"),
    "label_kind": row("label-kind", "classes", "options.label_kind"),
    "preparation": row("preparation", "made.json", "options.preparation"),
    "separator": row("separator", "tab", "options.separator"),
    "decimal": row("decimal", "comma", "options.decimal"),
    "encoding": row("encoding", "cp1252", "options.encoding"),
    "coordinator": (
        "--coordinator host:1 --processes 3 --process 0",
        told("join", coordinator="host:1", processes=3, process=0, patience=120.0),
    ),
    "trials": ("--trials 21", {"tuning.trials": 21}),
    "rungs": ("--rungs 3", {"tuning.rungs": 3}),
    "tuning_seeds": ("--tuning-seeds 5", {"tuning.seeds": 5}),
    "sampler": ("--sampler even", {"tuning.sampler": "even"}),
}
SHARED["processes"] = SHARED["process"] = SHARED["coordinator"]


def shared(command: str, *names: str) -> dict[str, Row]:
    """Return the rows of the options that a command shares, or those of these names."""
    own = {one.name for one in COMMANDS[command].params} - set(TUNED)
    return {name: SHARED[name] for name in names or SHARED if name in {*own, *names}}
