"""Predictions of rows by a model, for people and for files."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table as Shown

from fedbilevel import datasets
from fedbilevel.datasets.tables import READERS, kind_of, read_table
from fedbilevel.errors import InvalidInputError
from fedbilevel.models import Model
from fedbilevel.models.model import softmax

_SHOWN = 10  # rows


@dataclass(frozen=True)
class Predicted:
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
        """Return the names of the columns."""
        chances = [f"probability of {name}" for name in self.model.classes]
        return [self.unit, "predicted", *chances]

    def rows(self) -> list[list[Any]]:
        """Return a line for every row."""
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
        """Return how many rows are what, and how many are right."""
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


def predicted(model: Model, source: str) -> Predicted:
    """Predict the rows of a file or a named set."""
    model.check_predicts()
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
    return Predicted(model, scores, places, dataset.unit, labels)


def _of_table(model: Model, path: Path) -> Predicted:
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
    return Predicted(model, scores, *about)


def first_rows(found: Predicted) -> Shown:
    """Return the first rows as a table."""
    shown = Shown(title="Predictions", title_justify="left")
    for name in found.header():
        shown.add_column(escape(name), justify="right")
    for row in found.rows()[:_SHOWN]:
        cells = (f"{v:.4g}" if isinstance(v, float) else escape(str(v)) for v in row)
        shown.add_row(*cells)
    return shown


def sentences(found: Predicted, out: Path | None) -> list[str]:
    """Return what to say of predictions, in sentences."""
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
