"""The command line."""

import sys

from fedbilevel.startup import own_process


def main() -> None:
    """Start the command line, or say what it needs."""
    own_process.begin()
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401

        from fedbilevel.cli.app import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit("The command line needs typer and rich: install fedbilevel[cli].")
    except KeyboardInterrupt:
        sys.exit(130)  # no command has begun
