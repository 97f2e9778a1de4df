"""Arguments that several commands take, and how they are read."""

import math
from typing import Annotated, Any

import typer

from fedbilevel.errors import InvalidInputError

__all__ = [
    "Aggregate",
    "Algorithm",
    "AsJson",
    "Batch",
    "Clients",
    "Clip",
    "Compress",
    "Coordinator",
    "Data",
    "Delta",
    "LocalSteps",
    "MeasureEvery",
    "Noise",
    "Participants",
    "Precision",
    "Process",
    "Processes",
    "Rounds",
    "Seed",
    "Settings",
    "Task",
    "read_counts",
    "read_grid",
    "read_numbers",
    "read_settings",
    "read_sizes",
]

Task = Annotated[str, typer.Argument(help="see `fedbilevel list tasks`")]
Algorithm = Annotated[
    str | None,
    typer.Option(help="see `fedbilevel list algorithms`; the task's own if left out"),
]
Seed = Annotated[int, typer.Option(help="random seed of samples and cohorts")]
Clients = Annotated[int | None, typer.Option(help="number of clients, K")]
Participants = Annotated[
    int | None, typer.Option(help="clients drawn per exchange; all if left out")
]
Rounds = Annotated[int | None, typer.Option(help="communication rounds")]
LocalSteps = Annotated[
    int | None, typer.Option(help="local steps between two rounds, p")
]
Batch = Annotated[int | None, typer.Option(help="rows per sample")]
Data = Annotated[
    str | None,
    typer.Option(help="name, file or folder of the data; see `fedbilevel list data`"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="an option; may be repeated"),
]
Precision = Annotated[str, typer.Option(help="float32 or float64")]
MeasureEvery = Annotated[int, typer.Option(help="rounds between two measurements")]
Clip = Annotated[
    float | None,
    typer.Option(help="norm that every block of a client's change is cut down to"),
]
Noise = Annotated[
    float, typer.Option(help="noise multiplier of a block: deviation of the sum / clip")
]
Delta = Annotated[float, typer.Option(help="delta at which epsilon is told")]
Compress = Annotated[
    str | None, typer.Option(help="topk:FRACTION or quantize:BITS, of what goes up")
]
Aggregate = Annotated[
    str,
    typer.Option(
        help="mean, secure, median, trimmed-mean:FRACTION, geometric-median or "
        "krum:FAULTY"
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="print one JSON object, nothing else")
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="where process 0 of several waits for the others; trusted networks only",
    ),
]
Processes = Annotated[int | None, typer.Option(help="how many processes compute")]
Process = Annotated[int | None, typer.Option(help="which of them this is, from 0")]


def read_settings(settings: list[str], data: str | None = None) -> dict[str, str]:
    """Read KEY=VALUE, dashes in an option's name being underscores.

    `data` is one of them that has an argument of its own.
    """
    options = {} if data is None else {"data": data}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InvalidInputError(
                f"--set {text}: write KEY=VALUE, for example theta=0.1."
            )
        owner, dot, rest = name.rpartition(".")
        options[f"{owner}{dot}{rest.replace('-', '_')}"] = value
    return options


def read_grid(settings: list[str]) -> dict[str, list[str]]:
    """Read KEY=VALUE,VALUE,... with the values to try."""
    return {name: values.split(",") for name, values in read_settings(settings).items()}


def read_numbers(option: str, text: str) -> list[float]:
    """Read numbers separated by commas, each above 0."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise InvalidInputError(
            f"--{option} {text}: write numbers above 0, separated by commas."
        )
    return numbers


def read_counts(option: str, text: str) -> list[int]:
    """Read whole numbers separated by commas, each at least 1."""
    numbers = read_numbers(option, text)
    if not all(number.is_integer() for number in numbers):
        raise InvalidInputError(f"--{option} {text}: write whole numbers.")
    return [int(number) for number in numbers]


def read_sizes(**sizes: int | None) -> dict[str, Any]:
    """Return the sizes unless one of them is below 1."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise InvalidInputError(f"--{option} {value}: must be at least 1.")
    return sizes
