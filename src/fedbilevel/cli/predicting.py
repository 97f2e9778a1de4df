"""Commands that use a finished run: `predict` and `export`."""

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel._folders import require_new_file
from fedbilevel._table_choices import TableChoices, listed_names
from fedbilevel.cli.arguments import AsJson, Group, of_table, read_choices, takes
from fedbilevel.cli.console import Console
from fedbilevel.cli.output import print_json
from fedbilevel.errors import unknown_name

_UNSEEN = ("ignore", "error")
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="run folder made by --out")
]


_READING = ("missing", "separator", "decimal", "encoding")


@takes(choices=Group(of_table(*_READING, panel="How a table is read"), read_choices))
def predict(
    choices: TableChoices,
    folder: RunFolder,
    data: Annotated[
        str, typer.Argument(help="table, with or without labels, or other data")
    ],
    out: Annotated[
        Path | None, typer.Option(help="new CSV file with a line for every row")
    ] = None,
    keep: Annotated[
        str, typer.Option(help="columns to copy beside the predictions, as id,date")
    ] = "",
    unseen: Annotated[
        str,
        typer.Option(
            help="texts that the model does not know: ignore (predict without them, "
            "mark and count the rows) or error"
        ),
    ] = "ignore",
    as_json: AsJson = False,
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


def export(
    folder: RunFolder,
    to: Annotated[str, typer.Option(help="npz, safetensors, or onnx if linear")],
    out: Annotated[
        Path | None, typer.Option(help="new file; model.KIND here if left out")
    ] = None,
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
