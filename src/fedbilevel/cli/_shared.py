"""What several commands share."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from fedbilevel import planning
from fedbilevel._files import write_atomically
from fedbilevel.cli._arguments import read_settings, read_sizes
from fedbilevel.experiment import Experiment
from fedbilevel.report import cost_table, result_table
from fedbilevel.result import Result, to_plain
from fedbilevel.runtime import configure

__all__ = [
    "Algorithm",
    "Command",
    "Seeds",
    "Theorem",
    "experiment_of",
    "print_json",
    "show_result",
    "status",
    "write_text",
]

Algorithm = Annotated[str, typer.Option(help=", ".join(planning.THEOREMS_OF))]
Theorem = Annotated[
    int | None,
    typer.Option(help="1: LocalBSGM; 2, 3: LocalBSGVRM with constant, decaying step"),
]
Seeds = Annotated[int, typer.Option(help="random seeds of every point")]


class Command(NamedTuple):
    """A command and the example shown below its help."""

    function: Callable[..., None]
    epilog: str


def experiment_of(
    task: str, algorithm: str, batch: int | None, settings: list[str] | None
) -> Experiment:
    """Return what the arguments say, in single precision."""
    configure("float32")
    sizes = read_sizes(batch=batch)
    return Experiment(task, algorithm, **sizes, options=read_settings(settings or []))


def show_result(result: Result, folder: Path | None, as_json: bool) -> None:
    """Print what a run found and what it cost."""
    if as_json:
        print_json(result.summary())
        return
    console, named = Console(), {result.algorithm: result}
    console.print(result_table(named))
    console.print(cost_table(named))
    if folder is not None:
        console.print(f"Saved in {folder}")


@contextmanager
def status(text: str):
    """Show a line while something is measured; yields how to change it."""
    with Console(stderr=True).status(text) as line:
        yield lambda now: line.update(now)


def print_json(summary: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(to_plain(summary), allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))
