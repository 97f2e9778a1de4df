"""One run on several hosts, in processes that the command line starts on each."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from fedbilevel.cli.arguments import Argument, Group, option
from fedbilevel.errors import HeterogeneityWarning, InvalidInputError

__all__ = ["HOSTS", "Hosts", "only_ours_on_stdout"]

_PANEL = "Several processes"


@dataclass(frozen=True)
class Hosts:
    """Where the first process is, how many there are, and which one this is."""

    coordinator: str | None
    processes: int | None
    process: int | None

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


_COORDINATOR = typer.Option(
    metavar="HOST:PORT",
    help="where process 0 of several waits for the others; trusted networks only",
    rich_help_panel=_PANEL,
)
HOSTS = Group(
    {
        "coordinator": Argument(Annotated[str | None, _COORDINATOR], None),
        "processes": option(
            int | None, None, "how many processes compute", panel=_PANEL
        ),
        "process": option(
            int | None, None, "which of them this is, from 0", panel=_PANEL
        ),
    },
    Hosts,
)


@contextmanager
def only_ours_on_stdout() -> Iterator[None]:
    """Send to stderr what libraries write: gloo tells stdout of its connections."""
    import jax

    if jax.process_count() == 1:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
