"""Progress of a run: its listeners, and how it stops without losing its work.

The host looks at a run about twice a second, between two calls of its compiled
program. Only then listeners are called: nothing of them is inside the loop.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from fedbilevel.runtime import mesh

COMPILING, RUNNING = "compiling", "running"

_NOTICE = (
    b"\nStopping as soon as the work can be kept. Press Ctrl-C again to stop at once.\n"
)
_NO_ROUND = "It was compiling, and computed no round. Files are whole."


@dataclass
class Event:
    """A measured round of a run: `round` of `rounds`, and what was measured.

    `values` has the columns of the round; of a sweep their means over its runs.
    `seconds` are those of running until the round was reported. `reason` is why the run
    shall end, if `stop` was called.
    """

    round: int
    rounds: int
    values: Mapping[str, float]
    seconds: float
    reason: str = field(default="", repr=False)

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run as soon as the host can; the result has the reason.

        Rounds that were computed meanwhile count. To stop at an exact round, use
        `Stopping`.
        """
        self.reason = reason


_reports_to: ContextVar[Callable[[str], object]] = ContextVar(
    "reports_to", default=lambda word: None
)


@contextmanager
def reporting(about: Callable[[str], object]) -> Iterator[None]:
    """Call `about` with a word whenever something else is done: compiling, running."""
    before = _reports_to.set(about)
    try:
        yield
    finally:
        _reports_to.reset(before)


def report(word: str) -> None:
    """Say what is done now."""
    _reports_to.get()(word)


Watch = Callable[[int, int, dict[str, float]], None]
OnRound = Callable[[Event], object]


@dataclass(frozen=True)
class Listeners:
    """Listeners of a run, which may stop it; `pressed` says whether Ctrl-C was."""

    watch: Watch | None
    on_round: OnRound | None
    pressed: Callable[[], bool]

    def notify(self, events: list[Event]) -> bool:
        """Report rounds in the first process; say whether the run is interrupted."""
        interrupts: list[bool] = []

        def call() -> None:
            try:
                for event in events if self.on_round is not None else ():
                    self.on_round(event)  # pyright: ignore[reportOptionalCall]
            except KeyboardInterrupt:
                interrupts.append(True)

        mesh.on_first(call)  # in all processes: the others need not have a listener
        return bool(interrupts)

    def show(self, done: int, total: int, columns: Mapping[str, np.ndarray]) -> bool:
        """Show how far the run is; say whether it is interrupted."""
        newest = {n: float(np.mean(c[-1])) for n, c in columns.items() if len(c)}
        try:
            if self.watch is not None:
                self.watch(done, total, newest)
        except KeyboardInterrupt:
            return True
        return self.pressed()


def events_of(
    columns: Mapping[str, np.ndarray], first: int, total: int, seconds: float
) -> list[Event]:
    """Return the measurements from row `first` on, each as an event."""
    names = [name for name in columns if name != "round"]
    return [
        Event(
            int(columns["round"][row]),
            total,
            {name: float(np.mean(columns[name][row])) for name in names},
            seconds,
        )
        for row in range(first, len(columns.get("round", ())))
    ]


@contextmanager
def noting_interrupts() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C, so that a run stops where its work is whole; yield whether it came.

    The second one stops at once, and so does one while a program compiles: no round is
    computed then. Other handlers of the signal still run.
    """
    pressed: list[bool] = []
    stage, told = [RUNNING], _reports_to.get()

    def follow(word: str) -> None:
        stage[0] = word
        told(word)
        if word == COMPILING and pressed:
            raise KeyboardInterrupt(_NO_ROUND)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return

    def note(*_: object) -> None:
        again = bool(pressed)
        # Before it raises: an error in what Python collects is ignored.
        pressed.append(True)
        if stage[0] == COMPILING:
            raise KeyboardInterrupt(_NO_ROUND)
        if again:
            raise KeyboardInterrupt
        os.write(2, _NOTICE)  # printing is not safe in a handler

    signal.signal(signal.SIGINT, note)
    try:
        with reporting(follow):
            yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
