"""The command line."""

import sys
import time

from fedbilevel import _own_process
from fedbilevel.cli.garbage import look_seldom


def main() -> None:
    """Start the command line, or say what it needs."""
    _own_process.began = time.time()
    look_seldom()
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        sys.exit("The command line needs typer and rich: install fedbilevel[cli].")
    from fedbilevel.cli.app import app

    app()
