"""The command `report`, and the report that runs write beside their results."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedbilevel._files import write_atomically
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments.command import comparison_command, run_command
from fedbilevel.report.page import MARK, write_page
from fedbilevel.saved import Saved, read_saved

__all__ = ["page_of", "report", "write_report"]

FILE_NAME = "report.html"


def report(
    folder: Annotated[Path, typer.Argument(help="folder of a run or a comparison")],
    out: Annotated[
        Path | None, typer.Option(help="file; report.html in the folder if left out")
    ] = None,
) -> None:
    """Write one HTML file that tells of a run, and opens without a network."""
    path = folder / FILE_NAME if out is None else out
    _check_place(path)
    _write(path, page_of(folder))
    Console().print(f"Saved in {path}", markup=False, soft_wrap=True)


def write_report(folder: Path) -> None:
    """Write the report of a run that has just ended, where Plotly is installed."""
    try:
        page = page_of(folder)
    except FedbilevelError as error:
        # The run itself is done and saved.
        Console(stderr=True).print(f"No {FILE_NAME}: {error}", markup=False)
        return
    _write(folder / FILE_NAME, page)


def page_of(folder: Path, *, refresh: int = 0) -> str:
    """Return the page of a folder; an unfinished one asks to be read again."""
    saved = read_saved(folder)
    again = refresh if saved.unfinished else 0
    return write_page(saved, command_of(saved), refresh=again)


def command_of(saved: Saved) -> str | None:
    """Return the command that repeats it; None if no command began it."""
    if not saved.settings:
        return None
    if saved.compared:
        names = [*saved.results, *saved.diverged]
        return comparison_command(saved.settings, names)
    runtime = saved.every[0].config.get("runtime", "simulator")
    return run_command(saved.settings, str(runtime))


def _check_place(path: Path) -> None:
    """Raise if a file is there that is no report."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if file.read(len(MARK)) != MARK.encode():
            raise InvalidInputError(
                f"{path} is there and is no report. Choose another file."
            )


def _write(path: Path, page: str) -> None:
    write_atomically(path, lambda file: file.write(page.encode()))
