"""The definition of a data set, and how it is made of arrays and labels."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbilevel.datasets.cells import coded_labels
from fedbilevel.datasets.preparation import Preparation
from fedbilevel.errors import InvalidInputError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled samples; the first axis of every array counts them.

    `features` are as stored: images stay uint8, and a file may be mapped rather than
    read. `label` is int32 and points into `classes`. `columns` holds what else is known
    of a sample, such as its site. `test` is the official test part, if there is one.

    Of a table, `preparation` says how its columns became `features`, which are not yet
    scaled; where the label is a number to be predicted, there are no `classes`, and
    `label` is as the preparation scales it. Sample i is `unit` number `places[i]` of
    `source`; without `places` they are counted from 0. `files` are the samples' own,
    below `source`, where each is one. `notes` says what was encoded, left out, filled
    and dropped.

    `validation` marks the samples that judge, where that is decided already: all others
    are for training, and none is put aside for testing.
    """

    name: str
    features: np.ndarray
    label: np.ndarray
    classes: tuple[str, ...]
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    test: "Dataset | None" = None
    preparation: Preparation | None = None
    places: np.ndarray | None = None
    source: str = ""
    unit: str = "row"
    notes: Mapping[str, Any] = field(default_factory=dict)
    validation: np.ndarray | None = None
    files: np.ndarray | None = None

    def __post_init__(self) -> None:
        features, rows = self.features, len(self.label)
        empty = features.ndim < 2 or 0 in features.shape[1:]
        if empty or features.dtype.kind not in "buif":
            raise InvalidInputError(
                f"{self.name}: features are {features.dtype} of shape "
                f"{features.shape}. Give numbers with one row per sample, and at least "
                "one column."
            )
        if rows == 0:
            raise InvalidInputError(f"{self.name} has no samples.")
        marks = {} if self.validation is None else {"validation": self.validation}
        for name, array in {"features": features, **marks, **self.columns}.items():
            if array.shape[:1] != (rows,):
                raise InvalidInputError(
                    f"{self.name}: '{name}' has shape {array.shape}, but there are "
                    f"{rows} labels. Every array needs one row per sample."
                )
        if self.test and self.test.features.shape[1:] != features.shape[1:]:
            raise InvalidInputError(
                f"{self.name}: a sample has shape {features.shape[1:]}, but in the "
                f"test part {self.test.features.shape[1:]}. Both must agree."
            )


@dataclass(frozen=True)
class Part:
    """Samples as a loader finds them, with labels of any kind."""

    features: np.ndarray
    label: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)


def assemble(name: str, part: Part, test: Part | None = None) -> Dataset:
    """Code the labels of both parts with the same classes."""
    parts = [part] if test is None else [part, test]
    codes, classes = coded_labels(name, [one.label for one in parts])
    first, *others = (
        Dataset(name, one.features, code, classes, dict(one.columns))
        for one, code in zip(parts, codes, strict=True)
    )
    return dataclasses.replace(first, test=others[0]) if others else first


def rename_classes(dataset: Dataset, names: Sequence[str]) -> Dataset:
    """Name the classes of a data set whose labels were numbers from zero."""
    known = {str(number): name for number, name in enumerate(names)}
    for label in dataset.classes:
        if label not in known:
            raise InvalidInputError(
                f"{dataset.name}: label {label} is none of the {len(names)} classes "
                f"{', '.join(names)}."
            )
    classes = tuple(known[label] for label in dataset.classes)
    test = dataset.test and dataclasses.replace(dataset.test, classes=classes)
    return dataclasses.replace(dataset, classes=classes, test=test)
