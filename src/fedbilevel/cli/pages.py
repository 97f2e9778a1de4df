"""The page of a run folder, with the command that repeats the run."""

from pathlib import Path

from fedbilevel.experiments.run_folder import comparison_command, run_command
from fedbilevel.report.page import write_page
from fedbilevel.saved import Saved, read_saved

__all__ = ["command_of", "page_of"]


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
