"""Commands `report` and `dashboard`, and the report that runs write beside results."""

import errno
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path

from fedbilevel._folders import require_new_file
from fedbilevel._schema import option
from fedbilevel.cli.arguments import takes
from fedbilevel.cli.console import Console
from fedbilevel.errors import FedbilevelError, InvalidInputError

FILE_NAME = "report.html"


@takes()
def report(
    folder: Path = option(MISSING, "folder of a run or a comparison", spelled=""),
    out: Path | None = option(None, "file; report.html in the folder if left out"),
) -> None:
    """Write one HTML file about a run, which opens without a network."""
    path = folder / FILE_NAME if out is None else out
    _check_place(path, given=out is not None)
    from fedbilevel._files import mode_in, write_atomically
    from fedbilevel.cli.dashboard import page_of

    write_atomically(path, page_of(folder), mode=mode_in(folder))
    Console().print(f"Saved in {path}", markup=False, soft_wrap=True)


def write_report(folder: Path) -> None:
    """Write the report of a run that has just ended, where Plotly is installed."""
    from fedbilevel._files import mode_in, write_atomically
    from fedbilevel.cli.dashboard import page_of

    try:
        page = page_of(folder)
    except FedbilevelError as error:
        # The run itself is done and saved.
        Console(stderr=True).print(f"No {FILE_NAME}: {error}", markup=False)
        return
    write_atomically(folder / FILE_NAME, page, mode=mode_in(folder))


def _check_place(path: Path, given: bool) -> None:
    """Raise if a file is there that is no report, or none can be made as was given."""
    if not path.exists():
        if given:
            require_new_file(path)
        return
    from fedbilevel.report.page import MARK

    with path.open("rb") as file:
        if file.read(len(MARK)) != MARK.encode():
            raise InvalidInputError(
                f"{path} is there and is no report. Choose another file."
            )


@takes()
def dashboard(
    folder: Path = option(MISSING, "folder with folders of runs", spelled=""),
    port: int = option(8765, "port; 0 takes any that is free"),
) -> None:
    """Show all runs of a folder in a browser on this machine, also while they run.

    The address that is printed holds a token, without which nothing is shown: other
    users of the machine reach the port, too.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"{folder} is not a folder.")
    if not 0 <= port <= 65535:
        raise InvalidInputError(f"--port {port}: choose from 0 to 65535.")
    from fedbilevel.cli.dashboard import Dashboard

    try:
        server = Dashboard(folder, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise InvalidInputError(
            f"port {port} is in use. Choose another with --port."
        ) from error
    Console().print(f"{server.address} until Ctrl-C", soft_wrap=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
