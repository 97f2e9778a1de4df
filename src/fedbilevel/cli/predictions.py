"""Predictions of rows by a model, for people and for files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table as Shown

from fedbilevel import datasets
from fedbilevel._table_choices import TableChoices
from fedbilevel.datasets.encoding import read_columns
from fedbilevel.datasets.preparation import NumericColumn, Preparation, Unseen
from fedbilevel.datasets.tables import READERS, Table, kind_of, read_table
from fedbilevel.datasets.troubles import check_cells, check_columns
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.models import Model
from fedbilevel.models.model import softmax
from fedbilevel.report.tables import table_of

_SHOWN = 10  # rows


@dataclass(frozen=True)
class Predicted:
    """Predictions of rows: `unit` number `places[i]` has the scores of row i.

    `labels` are those of the data, where they have any, and `name` is theirs; `notes`
    say why they are not compared, and how the rows were read. `kept` are columns of the
    data that are written beside the predictions. `unseen` has the texts that the model
    does not know, and is None where it has no texts or they are refused.
    """

    model: Model
    scores: np.ndarray
    places: np.ndarray
    unit: str
    labels: np.ndarray | None = None
    name: str = "label"
    notes: tuple[str, ...] = ()
    kept: Mapping[str, np.ndarray] = field(default_factory=dict)
    unseen: Sequence[Unseen] | None = None

    def header(self) -> list[str]:
        """Return the names of the columns."""
        chances = [f"probability of {name}" for name in self.model.classes]
        marks = [] if self.unseen is None else ["unseen"]
        return [self.unit, *self.kept, "predicted", *chances, *marks]

    def rows(self) -> list[list[Any]]:
        """Return a line for every row."""
        decided, named = self.model.decided(self.scores), self.model.classes
        chances = softmax(self.scores).tolist() if named else [[]] * len(decided)
        kept = zip(self.places.tolist(), *self.kept.values(), strict=True)
        lines = [
            [*one, str(value) if named else float(value), *row]
            for one, value, row in zip(kept, decided, chances, strict=True)
        ]
        if self.unseen is not None:
            marks = [""] * len(lines)
            for row, column, text in self.unseen:
                marks[row] += f"{'; ' if marks[row] else ''}{column}={text}"
            lines = [[*line, mark] for line, mark in zip(lines, marks, strict=True)]
        return lines

    def summary(self) -> dict[str, Any]:
        """Return how many rows are what, and how many are right."""
        found: dict[str, Any] = {"rows": len(self.scores)}
        if self.unseen is not None:
            found["rows_with_unseen"] = len({one.row for one in self.unseen})
        decided = self.model.decided(self.scores)
        if self.model.classes:
            found["predicted"] = dict(Counter(map(str, decided)))
            if self.labels is not None:
                found["accuracy"] = float(np.mean(decided == self.labels))
        elif self.labels is not None:
            error = decided - self.labels
            found["root_mean_squared_error"] = float(np.sqrt(np.mean(error**2)))
        return found


def predicted(
    model: Model,
    source: str,
    choices: TableChoices | None = None,
    keep: Sequence[str] = (),
    *,
    strict: bool = False,
) -> Predicted:
    """Predict the rows of a file or a named set.

    Of a table, `choices` say how it is read, and what is done where numbers miss; the
    columns to `keep` are written beside the predictions. If `strict`, texts that the
    model does not know are refused.
    """
    model.check_predicts()
    path, chosen = Path(source).expanduser(), choices or TableChoices()
    if model.preparation is not None and path.is_file() and kind_of(path) in READERS:
        table = read_table(path, chosen)
        return _of_table(model, model.preparation, table, chosen, keep, strict)
    dataset = datasets.load(source, choices=chosen)
    features = dataset.features
    if keep or (model.pixels is None and dataset.preparation is not None):
        raise InvalidInputError(f"{source} is no table of columns that can be read.")
    scores = model.scores(model.features(features))
    places = np.arange(len(features)) if dataset.places is None else dataset.places
    labels = None
    if set(dataset.classes) <= set(model.classes):
        labels = np.asarray(dataset.classes)[dataset.label]
    return Predicted(model, scores, places, dataset.unit, labels)


def _of_table(
    model: Model,
    made: Preparation,
    table: Table,
    choices: TableChoices,
    keep: Sequence[str],
    strict: bool,
) -> Predicted:
    names, label = [one.name for one in made.columns], made.label.name
    for name in keep:
        if name not in table.columns:
            raise unknown_name(f"column of {table.source}", name, table.columns)
    check_columns(table, names, "the model")
    table = table.understood(choices, made.names)
    made, table, notes = _without_gaps(made, table, choices.missing)
    read = read_columns(table, made)
    unseen: list[Unseen] = []
    features = made.apply(read, table.where, None if strict else unseen)
    labels = None
    if label in table.columns and not table.is_missing(label).all():
        try:
            codes = made.label.encode(read[label], table.where)
        except InvalidInputError as error:
            notes.append(f"The labels are not compared. {error}")
        else:
            classes = np.asarray(model.classes)
            as_number: Any = made.label
            labels = classes[codes] if model.classes else as_number.decode(codes)
    return Predicted(
        model,
        model.scores(features),
        table.places,
        table.unit,
        labels,
        label,
        tuple(notes),
        {name: table.columns[name] for name in keep},
        None if strict or len(made.numbers) == len(made.names) else unseen,
    )


def _without_gaps(
    made: Preparation, table: Table, missing: str
) -> tuple[Preparation, Table, list[str]]:
    """Return what leaves no gap in columns of numbers, and say what was done."""
    notes = [f"Read as: {table.reading()}."] if table.reading() else []
    columns = [one for one in made.columns if isinstance(one, NumericColumn)]
    unfilled = [one.name for one in columns if one.fill is None]
    needed = dict.fromkeys(unfilled if missing == "refuse" else (), "number")
    check_cells(table, {}, [one.name for one in columns], needed, fitted=True)
    gaps = np.zeros(len(table.places), bool)
    for one in columns:
        gaps |= table.is_missing(one.name)
    share = f"{gaps.sum()} of {len(gaps)} rows"
    if missing == "drop" and gaps.any():
        notes.append(f"Left out for missing numbers: {share}.")
        return made, table.take(np.flatnonzero(~gaps)), notes
    if gaps.any():
        notes.append(f"Filled in by the mean: missing numbers in {share}.")
    filled = [
        replace(one, fill=one.center)
        if isinstance(one, NumericColumn) and one.fill is None and missing == "mean"
        else one
        for one in made.columns
    ]
    return replace(made, columns=tuple(filled)), table, notes


def first_rows(found: Predicted) -> Shown:
    """Return the first rows as a table."""
    rows = (
        [f"{v:.4g}" if isinstance(v, float) else escape(str(v)) for v in row]
        for row in found.rows()[:_SHOWN]
    )
    return table_of("Predictions", map(escape, found.header()), rows, texts=())


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
    marked = summary.get("rows_with_unseen")
    if marked:
        texts = Counter(f"{one.column}={one.text}" for one in found.unseen or ())
        shown = ", ".join(f"{text} ({n})" for text, n in texts.most_common(_SHOWN))
        lines.append(
            f"Unseen: {marked} rows hold texts that the model does not know, and are "
            f"predicted without them: {shown}. --unseen error refuses them."
        )
    lines += found.notes
    if out is not None:
        lines.append(f"Saved in {out}")
    elif summary["rows"] > _SHOWN:
        lines.append(f"The first {_SHOWN} are shown. --out FILE keeps all.")
    return lines
