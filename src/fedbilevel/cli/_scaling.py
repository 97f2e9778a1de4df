"""`fedbilevel speedup` and `fedbilevel complexity`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedbilevel import planning, report, scaling
from fedbilevel._files import write_atomically
from fedbilevel.calibration import calibrate
from fedbilevel.cli import _arguments as arguments
from fedbilevel.cli._arguments import read_counts, read_numbers
from fedbilevel.cli._errors import plain_errors
from fedbilevel.cli._shared import (
    Algorithm,
    Command,
    Seeds,
    Theorem,
    experiment_of,
    print_json,
    status,
    write_text,
)
from fedbilevel.result import to_plain

__all__ = ["COMMANDS"]

Folder = Annotated[Path | None, typer.Option(help="folder for table and figure")]
_SPEEDUP_CLIENTS = "1,2,4,8,16"


def speedup(
    task: arguments.Task,
    algorithm: Algorithm = "local-bsgvrm",
    theorem: Theorem = None,
    clients: Annotated[str, typer.Option(help="numbers of clients")] = _SPEEDUP_CLIENTS,
    iterations: Annotated[
        str | None, typer.Option(help="local iterations, T; the calibration's")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="count the iterations to this value instead")
    ] = None,
    period_factor: Annotated[
        float, typer.Option(help="times the corollary's local steps, p")
    ] = 1.0,
    batch: arguments.Batch = None,
    settings: arguments.Settings = None,
    seeds: Seeds = 16,
    out: Folder = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Measure how the error falls with K at fixed T, or with T at fixed K.

    Several values of --clients or of --iterations make the axis.
    """
    with plain_errors():
        experiment = experiment_of(task, algorithm, batch, settings)
        arguments.read_sizes(seeds=seeds)
        with status("calibrating") as watch:
            base = calibrate(
                experiment, planning.theorem_for(algorithm, theorem), seeds
            )
            summary = scaling.measure_speedup(
                experiment,
                base,
                read_counts("clients", clients),
                read_counts("iterations", iterations or str(base.iterations)),
                seeds=seeds,
                period_factor=period_factor,
                target=target,
                watch=watch,
            )
        _show_scaling(summary, out, as_json)


def complexity(
    task: arguments.Task,
    algorithm: Algorithm = "local-bsgvrm",
    theorem: Theorem = None,
    clients: Annotated[str, typer.Option(help="numbers of clients")] = "1,2,4,8",
    targets: Annotated[
        str | None,
        typer.Option(help="values of epsilon; those with whole local steps, p"),
    ] = None,
    batch: arguments.Batch = None,
    settings: arguments.Settings = None,
    seeds: Seeds = 16,
    out: Folder = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Measure iterations and rounds to epsilon, against K or against epsilon.

    Several values of --clients or of --targets make the axis; with one of --clients
    alone, epsilon is.
    """
    with plain_errors():
        experiment = experiment_of(task, algorithm, batch, settings)
        arguments.read_sizes(seeds=seeds)
        many = read_counts("clients", clients)
        with status("calibrating") as watch:
            base = calibrate(
                experiment, planning.theorem_for(algorithm, theorem), seeds
            )
            periods = (1,) if len(many) > 1 else (3, 4, 6)
            values = (
                scaling.default_targets(base, max(many), periods)
                if targets is None
                else read_numbers("targets", targets)
            )
            summary = scaling.measure_complexity(
                experiment, base, many, values, seeds=seeds, watch=watch
            )
        _show_scaling(summary, out, as_json)


def _show_scaling(summary: dict[str, Any], folder: Path | None, as_json: bool) -> None:
    if folder is not None:
        text = json.dumps(to_plain(summary), indent=2, allow_nan=False)
        write_text(folder / "summary.json", f"{text}\n")
        picture = report.draw_scaling(summary)
        write_atomically(folder / "figure.png", lambda file: file.write(picture))
    if as_json:
        print_json(summary)
        return
    console = Console()
    console.print(report.scaling_table(summary))
    for note in dict.fromkeys(n for point in summary["points"] for n in point["notes"]):
        console.print(f"Note: {note}", markup=False)
    if folder is not None:
        console.print(f"Saved in {folder}: summary.json, figure.png")


COMMANDS = {
    "speedup": Command(
        speedup,
        "Example: fedbilevel speedup quadratic --algorithm local-bsgm --clients 4 "
        "--iterations 1000,4000,16000 --out runs/speedup",
    ),
    "complexity": Command(
        complexity,
        "Example: fedbilevel complexity quadratic --algorithm local-bsgm --clients 2",
    ),
}
