"""Commands on what runs have left: `predict`, `export`, `report` and `dashboard`."""

import errno
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path

from fedbilevel._folders import require_new_file
from fedbilevel._schema import option
from fedbilevel._table_choices import TableChoices, listed_names
from fedbilevel.cli.arguments import AS_JSON, of_table, takes
from fedbilevel.cli.output import REPORT, Console, print_json, save_page
from fedbilevel.errors import InvalidInputError, unknown_name

_UNSEEN = ("ignore", "error")
_RUN_FOLDER = option(MISSING, "run folder made by --out", spelled="", metavar="RUN")
_READING = ("missing", "separator", "decimal", "encoding")


@takes(choices=of_table(*_READING, panel="How a table is read"))
def predict(
    choices: TableChoices,
    folder: Path = _RUN_FOLDER,
    data: str = option(
        MISSING, "table, with or without labels, or other data", spelled=""
    ),
    out: Path | None = option(None, "new CSV file with a line for every row"),
    keep: str = option("", "columns to copy beside the predictions, as id,date"),
    unseen: str = option(
        "ignore",
        "texts that the model does not know: ignore (predict without them, mark and "
        "count the rows) or error",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Predict rows with the model of a finished run.

    Columns are prepared as they were for training; others are left aside. Where the
    data have labels, the share that is right is reported.
    """
    if unseen not in _UNSEEN:
        raise unknown_name("value of unseen", unseen, _UNSEEN)
    if out is not None:
        require_new_file(out)
    from fedbilevel._files import write_atomically
    from fedbilevel._text import csv_text
    from fedbilevel.cli import predictions
    from fedbilevel.models import Model

    found = predictions.predicted(
        Model.load(folder), data, choices, listed_names(keep), strict=unseen == "error"
    )
    if out is not None:
        write_atomically(out, csv_text([found.header(), *found.rows()]))
    if as_json:
        print_json(found.summary())
        return
    if out is None:
        Console().print(predictions.first_rows(found))
    for line in predictions.sentences(found, out):
        Console().print(line, markup=False, highlight=False, soft_wrap=True)


@takes()
def export(
    folder: Path = _RUN_FOLDER,
    to: str = option(MISSING, "npz, safetensors, or onnx if linear"),
    out: Path | None = option(None, "new file; model.KIND here if left out"),
) -> None:
    """Write the model of a finished run for other programs.

    npz has, of a linear model, its weight and bias, feature_names, center and spread:
    scores are weight @ (a - center)/spread + bias.
    """
    path = Path(f"model.{to}") if out is None else out
    beside = [path.with_suffix(".json")] if to == "safetensors" else []
    for one in (path, *beside):
        require_new_file(one)
    from fedbilevel.models import Model
    from fedbilevel.models.export import FORMATS

    if to not in FORMATS:
        raise unknown_name("format", to, FORMATS)
    FORMATS[to](Model.load(folder), path)
    written = " and ".join(map(str, (path, *beside)))
    Console().print(f"Saved in {written}", markup=False, highlight=False)


@takes()
def report(
    folder: Path = option(MISSING, "folder of a run or a comparison", spelled=""),
    out: Path | None = option(None, "file; report.html in the folder if left out"),
) -> None:
    """Write one HTML file about a run, which opens without a network."""
    path = folder / REPORT if out is None else out
    _check_place(path, given=out is not None)
    save_page(folder, path)
    Console().print(f"Saved in {path}", markup=False, soft_wrap=True)


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
