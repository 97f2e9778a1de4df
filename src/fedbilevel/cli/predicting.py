"""Commands that use a finished run: `predict` and `export`."""

import csv
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table as Shown

from fedbilevel import datasets
from fedbilevel._files import write_atomically
from fedbilevel.cli.arguments import AsJson
from fedbilevel.cli.output import print_json
from fedbilevel.datasets.tables import READERS, kind_of, read_table
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.models import Model
from fedbilevel.models.export import FORMATS
from fedbilevel.models.model import softmax

__all__ = ["export", "predict"]

_SHOWN = 10  # rows
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="run folder made by --out")
]


@dataclass(frozen=True)
class _Predicted:
    """Predictions of rows: `unit` number `places[i]` has the scores of row i.

    `labels` are those of the data, where they have any, and `name` is theirs; `unused`
    says why they are not compared.
    """

    model: Model
    scores: np.ndarray
    places: np.ndarray
    unit: str
    labels: np.ndarray | None = None
    name: str = "label"
    unused: str = ""

    def header(self) -> list[str]:
        chances = [f"probability of {name}" for name in self.model.classes]
        return [self.unit, "predicted", *chances]

    def rows(self) -> list[list[Any]]:
        decided = self.model.decided(self.scores)
        if not self.model.classes:
            pairs = zip(self.places, decided, strict=True)
            return [[int(place), float(value)] for place, value in pairs]
        every = zip(self.places, decided, softmax(self.scores), strict=True)
        return [
            [int(place), str(name), *map(float, chances)]
            for place, name, chances in every
        ]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": len(self.scores)}
        decided = self.model.decided(self.scores)
        if self.model.classes:
            found["predicted"] = dict(Counter(map(str, decided)))
            if self.labels is not None:
                found["accuracy"] = float(np.mean(decided == self.labels))
        elif self.labels is not None:
            error = decided - self.labels
            found["root_mean_squared_error"] = float(np.sqrt(np.mean(error**2)))
        return found


def predict(
    folder: RunFolder,
    data: Annotated[
        str, typer.Argument(help="table, with or without labels, or other data")
    ],
    out: Annotated[
        Path | None, typer.Option(help="new CSV file with a line for every row")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict rows with the model of a finished run.

    Columns are prepared as they were for training; others are left aside. Where the
    data have labels, it is told how many are right.
    """
    if out is not None and out.exists():
        raise InvalidInputError(f"{out} exists. Choose another file, or remove it.")
    found = _predicted(Model.load(folder), data)
    if out is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(found.header())
        writer.writerows(found.rows())
        content = text.getvalue().encode()
        write_atomically(out, lambda file: file.write(content))
    if as_json:
        print_json(found.summary())
        return
    if out is None:
        Console().print(_first_rows(found))
    for line in _told(found, out):
        Console().print(line, markup=False, highlight=False, soft_wrap=True)


def _predicted(model: Model, source: str) -> _Predicted:
    path = Path(source).expanduser()
    if model.preparation is not None and path.is_file() and kind_of(path) in READERS:
        return _of_table(model, path)
    dataset = datasets.load(source)
    features = dataset.features
    if model.pixels is None and dataset.preparation is not None:
        raise InvalidInputError(f"{source} is no table of columns that can be read.")
    scores = model.scores(model.features(features))
    places = np.arange(len(features)) if dataset.places is None else dataset.places
    labels = None
    if set(dataset.classes) <= set(model.classes):
        labels = np.asarray(dataset.classes)[dataset.label]
    return _Predicted(model, scores, places, dataset.unit, labels)


def _of_table(model: Model, path: Path) -> _Predicted:
    made, table = model.preparation, read_table(path)
    assert made is not None
    scores = model.scores(made.apply(table.columns, table.where))
    name, labels, unused = made.label.name, None, ""
    if name in table.columns and not table.is_missing(name).all():
        try:
            codes = made.label.encode(table.columns[name], table.where)
        except InvalidInputError as error:
            unused = f"The labels are not compared. {error}"
        else:
            classes = np.asarray(model.classes)
            label: Any = made.label
            labels = classes[codes] if model.classes else label.decode(codes)
    about = (table.places, table.unit, labels, name, unused)
    return _Predicted(model, scores, *about)


def _first_rows(found: _Predicted) -> Shown:
    shown = Shown(title="Predictions", title_justify="left")
    for name in found.header():
        shown.add_column(name, justify="right")
    for row in found.rows()[:_SHOWN]:
        shown.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
    return shown


def _told(found: _Predicted, out: Path | None) -> list[str]:
    summary, lines = found.summary(), []
    counts = summary.get("predicted", {})
    named = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    lines.append(f"{summary['rows']} rows{f': {named}' if named else ''}.")
    if "accuracy" in summary:
        right = f"{summary['accuracy']:.4g}"
        lines.append(f"Accuracy {right}, by the labels in '{found.name}'.")
    if "root_mean_squared_error" in summary:
        value = summary["root_mean_squared_error"]
        lines.append(f"Root mean squared error to '{found.name}': {value:.5g}.")
    if found.unused:
        lines.append(found.unused)
    if out is not None:
        lines.append(f"Saved in {out}")
    elif summary["rows"] > _SHOWN:
        lines.append(f"The first {_SHOWN} are shown; --out FILE keeps all.")
    return lines


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
    if to not in FORMATS:
        raise unknown_name("format", to, FORMATS)
    path = Path(f"model.{to}") if out is None else out
    beside = [path.with_suffix(".json")] if to == "safetensors" else []
    for one in (path, *beside):
        if one.exists():
            raise InvalidInputError(f"{one} exists. Choose another file, or remove it.")
    FORMATS[to](Model.load(folder), path)
    told = " and ".join(map(str, (path, *beside)))
    Console().print(f"Saved in {told}", markup=False, highlight=False)
