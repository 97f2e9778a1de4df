"""What is shown while something runs, and the orderly stop on Ctrl-C or SIGTERM."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedbilevel.runtime import mesh

__all__ = ["Watched", "status", "watched"]

_COMPILING = "compiling"


@dataclass
class Watched:
    """A run that is watched: called with rounds done, rounds in all, what to show.

    It raises KeyboardInterrupt once the process was asked to stop, at a point where the
    run can still write its checkpoint.
    """

    bar: Progress
    line: TaskID
    asked: list[bool] = field(default_factory=list)

    def __call__(self, done: int, total: int, newest: dict[str, float]) -> None:
        """Show how far the run is."""
        text = ", ".join(f"{name} {value:.5g}" for name, value in newest.items())
        self.bar.update(self.line, completed=done, total=total, metric=text)
        if self.asked:
            raise KeyboardInterrupt

    def begin(self, title: str) -> None:
        """Start again, for the next run."""
        self.bar.reset(self.line, description=title, metric=_COMPILING)


@contextmanager
def watched(title: str, *, quiet: bool = False) -> Iterator[Watched]:
    """Show a progress bar; yield what to call while something runs."""
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
    watch = Watched(bar, bar.add_task(title, total=None, metric=_COMPILING))
    before = {
        number: signal.signal(number, lambda *_: watch.asked.append(True))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with bar:
            yield watch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line while something is measured; yield how to change it."""
    with Console(stderr=True).status(text) as line:
        yield lambda now: line.update(now)
