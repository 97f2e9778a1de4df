"""The commands of `fedbilevel`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedbilevel import algorithms, datasets, tasks
from fedbilevel.cli import _arguments as arguments
from fedbilevel.cli import _federation, _scaling, _theory
from fedbilevel.cli._arguments import read_grid, read_settings, read_sizes
from fedbilevel.cli._comparison import show_comparison
from fedbilevel.cli._errors import plain_errors
from fedbilevel.cli._holdings import holdings
from fedbilevel.cli._processes import join_if_asked, only_ours_on_stdout
from fedbilevel.cli._progress import watched
from fedbilevel.cli._shared import show_result
from fedbilevel.errors import unknown_name
from fedbilevel.experiment import Experiment
from fedbilevel.runtime import configure, mesh
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


@app.command("list", epilog="Example: fedbilevel list algorithms")
def list_entries(
    kind: Annotated[
        str | None, typer.Argument(help="tasks, algorithms or data; all if left out")
    ] = None,
) -> None:
    """Show the tasks, algorithms and data there are, and their options."""
    with plain_errors():
        tables = {
            "tasks": _task_table,
            "algorithms": _algorithm_table,
            "data": _data_table,
        }
        if kind is not None and kind not in tables:
            raise unknown_name("list", kind, tables)
        for name in [kind] if kind else tables:
            Console().print(tables[name]())


@app.command(
    epilog="Example: fedbilevel run regularization --algorithm local-bsgvrm "
    "--clients 8 --rounds 100 --set theta=0.2 --out runs/first"
)
def run(
    task: arguments.Task,
    algorithm: arguments.Algorithm = None,
    clients: arguments.Clients = None,
    participants: arguments.Participants = None,
    rounds: arguments.Rounds = None,
    local_steps: arguments.LocalSteps = None,
    batch: arguments.Batch = None,
    seed: arguments.Seed = 0,
    data: arguments.Data = None,
    settings: arguments.Settings = None,
    clip: arguments.Clip = None,
    noise: arguments.Noise = 0.0,
    delta: arguments.Delta = 1e-5,
    compress: arguments.Compress = None,
    aggregate: arguments.Aggregate = "mean",
    plan: Annotated[
        Path | None, typer.Option(help="file made by `fedbilevel plan --out`")
    ] = None,
    runtime: Annotated[str, typer.Option(help="simulator or reference")] = "simulator",
    precision: arguments.Precision = "float32",
    measure_every: arguments.MeasureEvery = 1,
    checkpoint_rounds: Annotated[
        int | None, typer.Option(help="rounds between two checkpoints")
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="seconds between two checkpoints")
    ] = 30.0,
    out: Annotated[
        Path | None, typer.Option(help="new folder for checkpoints and result")
    ] = None,
    as_json: arguments.AsJson = False,
    coordinator: arguments.Coordinator = None,
    processes: arguments.Processes = None,
    process: arguments.Process = None,
) -> None:
    """Run an algorithm on a task.

    Sizes that are left out are those the task recommends. Several processes, each
    started with the same arguments but its own number, compute one run together.
    """
    with plain_errors():
        experiment = Experiment(
            task=task,
            algorithm=algorithm,
            participants=participants,
            **read_sizes(
                clients=clients, rounds=rounds, local_steps=local_steps, batch=batch
            ),
            seed=seed,
            runtime=runtime,
            precision=precision,
            measure_every=measure_every,
            checkpoint_rounds=checkpoint_rounds,
            checkpoint_seconds=checkpoint_seconds,
            clip=clip,
            noise=noise,
            delta=delta,
            compress=compress,
            aggregate=aggregate,
            options=read_settings(settings or [], data),
        )
        join_if_asked(coordinator, processes, process)
        if plan is not None:
            experiment = _theory.follow(plan, experiment)
        _execute(experiment, out, resume=False, as_json=as_json)


@app.command(
    "compare",
    epilog="Example: fedbilevel compare two-client --algorithms "
    "local-bsgvrm,fedbioacc,fednest,fedavg,pooled --seeds 16 --set length=full "
    "--out runs/comparison",
)
def compare_algorithms(
    task: arguments.Task,
    names: Annotated[
        str, typer.Option("--algorithms", help="names, separated by commas")
    ],
    seeds: Annotated[int, typer.Option(help="random seeds per algorithm")] = 4,
    target: Annotated[
        float | None,
        typer.Option(
            help="value whose cost is told; nine tenths of the way if left out"
        ),
    ] = None,
    clients: arguments.Clients = None,
    participants: arguments.Participants = None,
    rounds: arguments.Rounds = None,
    local_steps: arguments.LocalSteps = None,
    batch: arguments.Batch = None,
    data: arguments.Data = None,
    settings: arguments.Settings = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="values of an option to try first, with other random seeds; of all "
            "combinations each algorithm takes its best; may be repeated",
        ),
    ] = None,
    precision: arguments.Precision = "float32",
    measure_every: arguments.MeasureEvery = 1,
    out: Annotated[
        Path | None, typer.Option(help="new folder for results and curves")
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Compare algorithms on a task: same data, start and cohorts for all.

    Options go to every algorithm that knows them, --set NAME.KEY=VALUE to one alone;
    so do those of --tune.
    """
    with plain_errors():
        experiment = Experiment(
            task=task,
            participants=participants,
            **read_sizes(
                clients=clients, rounds=rounds, local_steps=local_steps, batch=batch
            ),
            precision=precision,
            measure_every=measure_every,
            options=read_settings(settings or [], data),
        )
        chosen = [name.strip() for name in names.split(",")]
        grid = read_grid(tune or [])
        show_comparison(experiment, chosen, seeds, grid, target, out, as_json)


@app.command(epilog="Example: fedbilevel resume runs/first")
def resume(
    folder: Annotated[Path, typer.Argument(help="run folder made by --out")],
    as_json: arguments.AsJson = False,
    coordinator: arguments.Coordinator = None,
    processes: arguments.Processes = None,
    process: arguments.Process = None,
) -> None:
    """Continue an interrupted run; the result is that of the run never interrupted."""
    with plain_errors():
        experiment = Experiment.load(folder)
        join_if_asked(coordinator, processes, process)
        _execute(experiment, folder, resume=True, as_json=as_json)


app.command(
    epilog="Example: fedbilevel holdings representation --clients 20 "
    "--set partition=dirichlet:0.3 --out holdings.png"
)(holdings)
for _name, _command in (
    _theory.COMMANDS | _scaling.COMMANDS | _federation.COMMANDS
).items():
    app.command(_name, epilog=_command.epilog)(_command.function)


def _execute(
    experiment: Experiment, folder: Path | None, *, resume: bool, as_json: bool
) -> None:
    configure(experiment.precision)
    with only_ours_on_stdout(), watched(experiment.task, quiet=as_json) as watch:
        result = experiment.run(folder, resume=resume, watch=watch)
    if mesh.is_first():
        show_result(result, folder, as_json)


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
    table = Table(title="Algorithms")
    table.add_column("algorithm", no_wrap=True)
    for heading in ("what it is", "answers", "reference", "how known", "options"):
        table.add_column(heading)
    for name in algorithms.names():
        kind = algorithms.find(name)
        table.add_row(
            name,
            _first_line(kind.__doc__),
            kind.answers,
            kind.reference,
            kind.provenance,
            ", ".join(kind.option_names()),
        )
    return table


def _data_table() -> Table:
    table = Table("--data", title="Data")
    for name in (*datasets.names(), *datasets.LAYOUTS):
        table.add_row(name)
    return table
