"""`fedbilevel list`, `fedbilevel run`, `fedbilevel resume`."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedbilevel import algorithms, tasks
from fedbilevel.cli._progress import watched
from fedbilevel.errors import FedbilevelError, InvalidInputError, unknown_name
from fedbilevel.experiment import Experiment
from fedbilevel.report import cost_table, result_table
from fedbilevel.result import Result
from fedbilevel.runtime import configure
from fedbilevel.tasks._base import option_defaults

__all__ = ["app"]

app = typer.Typer(
    help="Federated bilevel optimization: tune, clean, re-weight across sites whose "
    "data stay where they are.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True)


@app.command("list", epilog="Example: fedbilevel list algorithms")
def list_entries(
    kind: Annotated[
        str | None, typer.Argument(help="tasks or algorithms; both if left out")
    ] = None,
) -> None:
    """Show the tasks and algorithms there are, and their options."""
    with _plain_errors():
        tables = {"tasks": _task_table, "algorithms": _algorithm_table}
        if kind is not None and kind not in tables:
            raise unknown_name("list", kind, tables)
        for name in [kind] if kind else tables:
            Console().print(tables[name]())


@app.command(
    epilog="Example: fedbilevel run regularization --algorithm local-bsgvrm "
    "--clients 8 --rounds 100 --set theta=0.2 --out runs/first"
)
def run(
    task: Annotated[str, typer.Argument(help="see `fedbilevel list tasks`")],
    algorithm: Annotated[
        str, typer.Option(help="see `fedbilevel list algorithms`")
    ] = "local-bsgvrm",
    clients: Annotated[int | None, typer.Option(help="number of clients, K")] = None,
    participants: Annotated[
        int | None, typer.Option(help="clients drawn per exchange; all if left out")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="communication rounds")] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="local steps between two rounds, p")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="rows per sample")] = None,
    seed: Annotated[int, typer.Option(help="random seed of samples and cohorts")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="an option; may be repeated"),
    ] = None,
    runtime: Annotated[str, typer.Option(help="simulator or reference")] = "simulator",
    precision: Annotated[str, typer.Option(help="float32 or float64")] = "float32",
    measure_every: Annotated[
        int, typer.Option(help="rounds between two measurements")
    ] = 1,
    checkpoint_rounds: Annotated[
        int | None, typer.Option(help="rounds between two checkpoints")
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="seconds between two checkpoints")
    ] = 30.0,
    out: Annotated[
        Path | None, typer.Option(help="new folder for checkpoints and result")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object, nothing else")
    ] = False,
) -> None:
    """Run an algorithm on a task.

    Sizes that are left out are those the task recommends.
    """
    with _plain_errors():
        experiment = Experiment(
            task=task,
            algorithm=algorithm,
            clients=_positive("clients", clients),
            participants=participants,
            rounds=_positive("rounds", rounds),
            local_steps=_positive("local-steps", local_steps),
            batch=_positive("batch", batch),
            seed=seed,
            runtime=runtime,
            precision=precision,
            measure_every=measure_every,
            checkpoint_rounds=checkpoint_rounds,
            checkpoint_seconds=checkpoint_seconds,
            options=_read_settings(settings or []),
        )
        _execute(experiment, out, resume=False, as_json=as_json)


@app.command(epilog="Example: fedbilevel resume runs/first")
def resume(
    folder: Annotated[Path, typer.Argument(help="run folder made by --out")],
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object, nothing else")
    ] = False,
) -> None:
    """Continue an interrupted run; the result is that of the run never interrupted."""
    with _plain_errors():
        _execute(Experiment.load(folder), folder, resume=True, as_json=as_json)


def _execute(
    experiment: Experiment, folder: Path | None, *, resume: bool, as_json: bool
) -> None:
    configure(experiment.precision)
    with watched(experiment.task, quiet=as_json) as watch:
        result = experiment.run(folder, resume=resume, watch=watch)
    if as_json:
        print(json.dumps(result.summary(), allow_nan=False))
    else:
        _show(result, folder)


def _show(result: Result, folder: Path | None) -> None:
    console, named = Console(), {result.algorithm: result}
    console.print(result_table(named))
    console.print(cost_table(named))
    if folder is not None:
        console.print(f"Saved in {folder}")


def _read_settings(settings: list[str]) -> dict[str, str]:
    options = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InvalidInputError(
                f"--set {text}: write KEY=VALUE, for example theta=0.1."
            )
        options[name.replace("-", "_")] = value
    return options


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise InvalidInputError(f"--{name} {value}: must be at least 1.")
    return value


class _plain_errors:  # noqa: N801 - reads as a statement
    """Ends with a message, or with a traceback if FEDBILEVEL_TRACEBACK is set."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, FedbilevelError) and not os.environ.get(
            "FEDBILEVEL_TRACEBACK"
        ):
            _errors.print(f"Error: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2) from error
        if isinstance(error, KeyboardInterrupt):
            _errors.print(f"Stopped. {error}", markup=False, soft_wrap=True)
            raise typer.Exit(130) from error


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def _task_table() -> Table:
    table = Table("task", "what it is", "options (defaults)", title="Tasks")
    for name in tasks.names():
        make = tasks.find(name)
        options = ", ".join(f"{k}={v}" for k, v in option_defaults(make).items())
        module = __import__(make.__module__, fromlist=["make"])
        table.add_row(name, _first_line(module.__doc__), options)
    return table


def _algorithm_table() -> Table:
    table = Table(
        "algorithm",
        "what it is",
        "reference",
        "how known",
        "options",
        title="Algorithms",
    )
    for name in algorithms.names():
        kind = algorithms.find(name)
        table.add_row(
            name,
            _first_line(kind.__doc__),
            kind.reference,
            kind.provenance,
            ", ".join(kind.option_names()),
        )
    return table
