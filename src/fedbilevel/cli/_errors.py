"""Errors and warnings of the command line: a message, no traceback."""

import os
import warnings

import typer
from rich.console import Console

from fedbilevel.errors import FedbilevelError

__all__ = ["plain_errors"]

_errors = Console(stderr=True)


class plain_errors:  # noqa: N801 - reads as a statement
    """Ends with a message, or with a traceback if FEDBILEVEL_TRACEBACK is set."""

    def __enter__(self) -> None:
        self.shown_before = warnings.showwarning
        warnings.showwarning = _show_warning

    def __exit__(self, kind, error, trace) -> None:
        warnings.showwarning = self.shown_before
        if isinstance(error, FedbilevelError) and not os.environ.get(
            "FEDBILEVEL_TRACEBACK"
        ):
            _errors.print(f"Error: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2) from error
        if isinstance(error, KeyboardInterrupt):
            _errors.print(f"Stopped. {error}", markup=False, soft_wrap=True)
            raise typer.Exit(130) from error


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    del category, filename, lineno, file, line
    _errors.print(f"Warning: {message}", style="yellow", markup=False, soft_wrap=True)
