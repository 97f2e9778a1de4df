"""Errors and warnings of the command line: a message, no traceback."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from fedbilevel.errors import FedbilevelError, sentence_of

__all__ = ["plain_errors"]

_errors = Console(stderr=True)


@contextmanager
def plain_errors() -> Iterator[None]:
    """End with a message, or with a traceback if FEDBILEVEL_TRACEBACK is set."""
    shown_before = warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        yield
    except (FedbilevelError, OSError) as error:
        if os.environ.get("FEDBILEVEL_TRACEBACK"):
            raise
        text = sentence_of(error) if isinstance(error, OSError) else error
        _errors.print(f"Error: {text}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        _errors.print(f"Stopped. {error}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from error
    finally:
        warnings.showwarning = shown_before


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    del category, filename, lineno, file, line
    _errors.print(f"Warning: {message}", style="yellow", markup=False, soft_wrap=True)
