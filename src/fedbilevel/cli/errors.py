"""Errors and warnings of the command line: a message, no traceback.

Notes on a result are printed after it.
"""

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedbilevel.cli.console import Console
from fedbilevel.errors import FedbilevelError, HeterogeneityWarning, sentence_of

_errors = Console(stderr=True)


@contextmanager
def plain_errors() -> Iterator[None]:
    """End with a message, or with a traceback if FEDBILEVEL_TRACEBACK is set."""
    shown_before, notes = warnings.showwarning, []
    warnings.showwarning = functools.partial(_show_warning, notes)
    try:
        yield
        for note in dict.fromkeys(notes):
            _errors.print(f"Note: {note}", markup=False, soft_wrap=True)
    except (FedbilevelError, OSError) as error:
        if os.environ.get("FEDBILEVEL_TRACEBACK"):
            raise
        text = f"Error: {sentence_of(error)}"
        _errors.print(text, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        _errors.print(f"Stopped. {error}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from error
    finally:
        warnings.showwarning = shown_before


def _show_warning(
    notes, message, category, filename, lineno, file=None, line=None
) -> None:
    del filename, lineno, file, line
    if issubclass(category, HeterogeneityWarning):
        notes.append(str(message))
        return
    _errors.print(f"Warning: {message}", style="yellow", markup=False, soft_wrap=True)
