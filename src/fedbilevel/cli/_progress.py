"""The live progress bar, and the orderly stop on Ctrl-C or SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedbilevel.runtime import mesh
from fedbilevel.runtime.driver import Watch

__all__ = ["watched"]


@contextmanager
def watched(title: str, *, quiet: bool = False) -> Iterator[Watch]:
    """Yield a function to call with rounds done, rounds in all, and what to show.

    It raises KeyboardInterrupt once the process was asked to stop, at a point where the
    run can still write its checkpoint.
    """
    asked = []
    before = {
        number: signal.signal(number, lambda *_: asked.append(True))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metric]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet or not mesh.is_first(),
    )
    with bar:
        line = bar.add_task(title, total=None, metric="compiling")

        def watch(done: int, total: int, newest: dict[str, float]) -> None:
            text = ", ".join(f"{name} {value:.5g}" for name, value in newest.items())
            bar.update(line, completed=done, total=total, metric=text)
            if asked:
                raise KeyboardInterrupt

        try:
            yield watch
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
