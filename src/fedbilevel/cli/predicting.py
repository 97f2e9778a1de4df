"""Commands that use a finished run: `predict` and `export`."""

from dataclasses import MISSING
from pathlib import Path

from fedbilevel._folders import require_new_file
from fedbilevel._schema import option
from fedbilevel._table_choices import TableChoices, listed_names
from fedbilevel.cli.arguments import AS_JSON, of_table, takes
from fedbilevel.cli.console import Console
from fedbilevel.cli.output import print_json
from fedbilevel.errors import unknown_name

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
        Model.load(folder),
        data,
        choices,
        listed_names(keep),
        strict=unseen == "error",
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
