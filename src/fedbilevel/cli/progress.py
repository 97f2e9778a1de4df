"""Progress on the terminal, and the orderly stop on Ctrl-C or SIGTERM."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedbilevel.cli.output import Console
from fedbilevel.startup.own_process import collect_as_usual

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LOADING, _COMPILING, _RUNNING = "loading", "compiling", "running"
_TICKS = "▁▂▃▄▅▆▇█"
_LENGTH = 12  # of a spark line
_WIDE = 100  # columns of a terminal wide enough for a bar
_PATIENCE = 3.0  # seconds that an orderly stop has before the first round
_CURSOR = b"\x1b[?25h"  # shows it again
_STOPPED = b"\nStopped between rounds. All saved files are complete.\n"
_FIELDS = ("curve", "metric", "rate", "who")


@dataclass
class Watched:
    """A run that is watched: called with rounds done, rounds in all, what to show.

    Until then `stage` says what is being done. It raises KeyboardInterrupt once the
    process was asked to stop, at a point where the run can still write its checkpoint.
    """

    bar: "Progress"
    line: "TaskID"
    asked: list[bool] = field(default_factory=list)
    rests: bool = True  # no round is being computed, so a stop at once loses none
    _began: tuple[float, int] | None = None  # time and rounds when first called
    _seen: list[float] = field(default_factory=list)

    def __call__(self, done: int, total: int, newest: dict[str, float]) -> None:
        """Show how far the run is."""
        text = ", ".join(f"{name} {value:.5g}" for name, value in newest.items())
        if done:
            self.rests = False
            collect_as_usual()
            self._seen += list(newest.values())[:1]
            self.bar.update(
                self.line,
                completed=done,
                total=total,
                metric=text or _RUNNING,
                curve=spark_line(self._seen),
                rate=self._rate(done),
            )
        if self.asked:
            raise KeyboardInterrupt

    def _rate(self, done: int) -> str:
        now = time.monotonic()
        if self._began is None:
            self._began = now, done
            return ""
        since, first = self._began
        if done == first or now == since:
            return ""
        return f"{(done - first) / (now - since):.3g}/s"

    def stage(self, word: str, who: str | None = None) -> None:
        """Show the step before the first round, and the participants."""
        self.rests = word != _RUNNING
        self.bar.update(self.line, metric=word)
        if who is not None:
            self.bar.update(self.line, who=who)

    def say(self, text: str) -> None:
        """Print a line above what is shown, and keep it."""
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, title: str) -> None:
        """Start again, for the next run."""
        self._began = None
        self._seen.clear()
        # It forgets the fields that it is not given.
        self.bar.reset(self.line, description=title, **_fields(_COMPILING))


def _fields(word: str) -> dict[str, Any]:
    """Return all that a line draws, before there is anything to draw."""
    return {**dict.fromkeys(_FIELDS, ""), "metric": word}


def spark_line(values: Sequence[float]) -> str:
    """Draw numbers as a line of blocks, the latest ones if they are many."""
    finite = [value for value in values[-_LENGTH:] if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    step = (high - low) / (len(_TICKS) - 1) or 1.0
    return "".join(_TICKS[round((value - low) / step)] for value in finite)


@contextmanager
def ending_soon(rests: Callable[[], bool]) -> Iterator[None]:
    """End this process by force when it was asked to stop, and still compiles then.

    A compiler runs for a minute and returns to no handler of signals. The byte that
    Python writes for a signal is seen by a thread that waits for it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        stops = {signal.SIGINT, signal.SIGTERM}
        while (number := os.read(reader, 1)) and number[0] not in stops:
            pass
        pause = _PATIENCE
        while number and not over.wait(pause):
            pause = 0.1  # it may begin to compile only now
            if rests():
                os.write(2, (_CURSOR if os.isatty(2) else b"") + _STOPPED)
                os._exit(130)

    over = threading.Event()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


@contextmanager
def watched(
    title: str, *, quiet: bool = False, alone: bool = True
) -> Iterator[Watched]:
    """Show a progress bar; yield what to call while something runs.

    A process that is `alone`, without others that it would have to end, is ended soon
    where it is asked to stop before its first round.
    """
    from rich import progress  # not for help

    from fedbilevel.runtime import mesh

    console = Console(stderr=True)
    shown = [progress.BarColumn(20)] if console.width >= _WIDE else []
    bar = progress.Progress(
        progress.TextColumn("[bold]{task.description}"),
        progress.MofNCompleteColumn(),
        *shown,
        *(progress.TextColumn(f"{{task.fields[{name}]}}") for name in _FIELDS),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        disable=quiet or not mesh.is_first(),
    )
    watch = Watched(bar, bar.add_task(title, total=None, **_fields(_LOADING)))
    before = {
        number: signal.signal(number, lambda *_: watch.asked.append(True))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    rests = (lambda: watch.rests) if alone else (lambda: False)
    try:
        with bar, ending_soon(rests):
            yield watch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line while something is measured; yield how to change it."""
    with Console(stderr=True).status(text) as line:
        yield lambda now: line.update(now)
