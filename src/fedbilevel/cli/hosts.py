"""One run on several hosts, in processes that the command line starts on each."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fedbilevel._schema import option
from fedbilevel.cli.arguments import declared
from fedbilevel.errors import HeterogeneityWarning, InvalidInputError

_PANEL = "Several processes"


@dataclass(frozen=True)
class Hosts:
    """Where the first process is, how many there are, and which one this is."""

    coordinator: str | None = option(
        None,
        "where process 0 of several waits for the others; trusted networks only",
        panel=_PANEL,
        metavar="HOST:PORT",
    )
    processes: int | None = option(None, "how many processes compute", panel=_PANEL)
    process: int | None = option(None, "which of them this is, from 0", panel=_PANEL)

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


HOSTS = declared(Hosts, Hosts)


@contextmanager
def only_ours_on_stdout() -> Iterator[None]:
    """Send to stderr what libraries write: gloo writes its connections to stdout."""
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
