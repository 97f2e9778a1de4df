"""The command line."""

import gc
import sys

# Objects that are new before Python looks for garbage, and how often for older one.
# Imports and traced programs are many objects that stay. By the usual 700 a command
# with all programs compiled spent a fifth of its time on looking through them.
_LOOKS = (50_000, 20, 100)


def main() -> None:
    """Start the command line, or say what it needs."""
    gc.set_threshold(*_LOOKS)
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        sys.exit("The command line needs typer and rich: install fedbilevel[cli].")
    from fedbilevel.cli.app import app

    app()
