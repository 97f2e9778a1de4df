"""Prints of commands: text as text, results, notes, and errors without a traceback."""

import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console
import typer
from rich.segment import Segment

from fedbilevel._text import for_terminal
from fedbilevel.errors import FedbilevelError, HeterogeneityWarning, sentence_of

if TYPE_CHECKING:
    from fedbilevel.result import Result
    from fedbilevel.tasks import Task

REPORT = "report.html"


class Console(rich.console.Console):
    """Prints text as text: a column may be named by an escape sequence.

    Styles and cursors are Rich's own; they are added to what is rendered here.
    """

    def render(self, *given: Any, **options: Any) -> Iterable[Segment]:
        """Render something, with control characters spelled out."""
        for one in super().render(*given, **options):
            harmless = one.control or one.text.isprintable()
            yield one if harmless else one._replace(text=for_terminal(one.text))


@contextmanager
def plain_errors() -> Iterator[None]:
    """End with a message, or with a traceback if FEDBILEVEL_TRACEBACK is set.

    Notes on a result are printed after it.
    """
    say = partial(Console(stderr=True).print, markup=False, soft_wrap=True)
    shown_before, notes = warnings.showwarning, []

    def show(message: Any, category: type[Warning], *_: Any) -> None:
        if issubclass(category, HeterogeneityWarning):
            notes.append(str(message))
        else:
            say(f"Warning: {message}", style="yellow")

    warnings.showwarning = show
    try:
        yield
        for note in dict.fromkeys(notes):
            say(f"Note: {note}")
    except (FedbilevelError, OSError) as error:
        if os.environ.get("FEDBILEVEL_TRACEBACK"):
            raise
        say(f"Error: {sentence_of(error)}", style="red")
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        say(f"Stopped. {error}")
        raise typer.Exit(130) from error
    finally:
        warnings.showwarning = shown_before


def show_data(task: "Task") -> None:
    """Print on stderr each client's rows, and the preparation of a table's columns."""
    if task.origin is None:
        return
    from fedbilevel.report import holdings_notes, holdings_table

    console, held = Console(stderr=True), task.origin.summary
    for number, line in enumerate(holdings_notes(held)):
        console.print(line, markup=False, highlight=False)
        if number == 0 and held["own"]:
            console.print(holdings_table(held))


def show_result(result: "Result", folder: Path | None, as_json: bool) -> None:
    """Print what a run found, why it ended, and what it cost; write its report."""
    if folder is not None:
        write_report(folder)
    if as_json:
        print_json(result.summary())
        return
    from fedbilevel.report import cost_table, quality_tables, result_table

    console, named = Console(), {result.algorithm: result}
    if result.quality:
        console.print(result.quality["sentence"], markup=False, highlight=False)
        for table in quality_tables(result.quality):
            console.print(table)
    console.print(result_table(named))
    console.print(cost_table(named))
    for event in result.events:
        console.print(f"Note: {event}.", markup=False, highlight=False)
    if result.ended:
        console.print(f"Ended {result.ended}.", markup=False, highlight=False)
    if folder is not None:
        console.print(f"Saved in {folder}")


def write_report(folder: Path) -> None:
    """Write the report of a run that has just ended, where Plotly is installed."""
    try:
        save_page(folder, folder / REPORT)
    except FedbilevelError as error:
        # The run itself is done and saved.
        Console(stderr=True).print(f"No {REPORT}: {error}", markup=False)


def save_page(folder: Path, path: Path) -> None:
    """Write the report of a folder, as open to others as the folder is."""
    from fedbilevel._files import mode_in, write_atomically
    from fedbilevel.cli.dashboard import page_of

    write_atomically(path, page_of(folder), mode=mode_in(folder))


def print_json(summary: dict[str, Any]) -> None:
    """Print one JSON object."""
    from fedbilevel.result import to_plain

    print(json.dumps(to_plain(summary), allow_nan=False))


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
