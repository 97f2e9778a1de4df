"""What the commands for real federations share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedbilevel.cli._arguments import read_settings, read_sizes
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiment import Experiment

__all__ = [
    "Deadline",
    "Insecure",
    "Minimum",
    "Patience",
    "Tolerance",
    "choose_security",
    "experiment_of",
    "needs_flower",
    "terms_of",
]

Deadline = Annotated[float, typer.Option(help="seconds an exchange may take")]
Minimum = Annotated[
    int, typer.Option(help="replies without which an exchange is made again")
]
Patience = Annotated[
    float, typer.Option(help="seconds to wait for all nodes at the start")
]
Tolerance = Annotated[
    float,
    typer.Option(help="a reply that moves so many times the median is left out"),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="neither encryption nor keys: for trials")
]


def experiment_of(**given: Any) -> Experiment:
    """Return what the arguments of a command say."""
    sizes = {n: given.pop(n) for n in ("clients", "rounds", "local_steps", "batch")}
    options = read_settings(given.pop("settings") or [], given.pop("data"))
    return Experiment(**given, **read_sizes(**sizes), options=options)


def terms_of(deadline: float, minimum: int, patience: float, tolerance: float) -> Any:
    """Return how long a server waits, and what it takes."""
    needs_flower()
    from fedbilevel.runtime.federation import Terms

    return Terms(deadline, minimum, patience, tolerance)


def needs_flower() -> None:
    """Raise unless Flower is installed."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            "a federation needs Flower. Install it with "
            "`pip install 'fedbilevel[flower]'`."
        ) from error


def choose_security(insecure: bool, option: str, *given: Path | None) -> None:
    """Raise unless there are certificates, or none are wanted."""
    if insecure and any(given):
        raise InvalidInputError("--insecure and certificates exclude each other.")
    if not insecure and not all(given):
        raise InvalidInputError(
            f"give --{option}{' and --private-key' if len(given) > 1 else ''}, or "
            "--insecure to do without encryption and keys."
        )
