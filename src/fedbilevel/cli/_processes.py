"""One run in several processes, as the command line starts them."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from fedbilevel.errors import HeterogeneityWarning, InvalidInputError
from fedbilevel.runtime import join

__all__ = ["join_if_asked", "only_ours_on_stdout"]


def join_if_asked(
    coordinator: str | None, processes: int | None, process: int | None
) -> None:
    """Join other processes; without any of the three arguments stay alone."""
    if coordinator is None and processes is None and process is None:
        return
    if coordinator is None or processes is None or process is None:
        raise InvalidInputError(
            "--coordinator, --processes and --process belong together: several "
            "processes need all three, one process needs none."
        )
    join(coordinator, processes, process)
    if process > 0:
        # Process 0 says it.
        warnings.simplefilter("ignore", HeterogeneityWarning)


@contextmanager
def only_ours_on_stdout() -> Iterator[None]:
    """Send to stderr what libraries write: gloo tells stdout of its connections."""
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
