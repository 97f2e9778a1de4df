"""How labels of any kind become classes, and numbers from zero."""

from collections.abc import Iterable, Sequence

import numpy as np

from fedbilevel.errors import InvalidInputError


def _plain(name: str, label: np.ndarray) -> np.ndarray:
    """Return labels as integers, truth values or text that is no number."""
    if label.ndim != 1:
        raise InvalidInputError(
            f"{name}: labels have shape {label.shape}. Give one class per sample."
        )
    if label.dtype.kind == "O":
        for row, value in enumerate(label):
            if not isinstance(value, str | int | np.integer):
                raise InvalidInputError(
                    f"{name}: the label of row {row} is {value!r}. Give text or a "
                    "whole number, or drop the row."
                )
    if label.dtype.kind in "OSU":
        label = label.astype(str)
        try:
            with np.errstate(over="ignore"):  # what that makes infinite is named below
                label = label.astype(float)
        except ValueError:
            return label
    if label.dtype.kind == "f":
        # Beyond this neighbors among the whole numbers would be the same class.
        whole = (label == np.floor(label)) & (np.abs(label.astype(float)) < 2**53)
        wrong = np.flatnonzero(~np.isfinite(label) | ~whole)
        if len(wrong):
            raise InvalidInputError(
                f"{name}: the label of row {wrong[0]} is {label[wrong[0]]}. Labels "
                "are classes: text, or whole numbers of at most 15 digits."
            )
        return label.astype(np.int64)
    if label.dtype.kind not in "biu":
        raise InvalidInputError(f"{name}: labels cannot be of type {label.dtype}.")
    return label


def coded_labels(
    name: str, labels: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return labels of several parts as numbers from zero, and their classes."""
    labels = [_plain(name, label) for label in labels]
    if sum(len(label) for label in labels) == 0:
        raise InvalidInputError(f"{name} has no samples.")
    values, codes = np.unique(np.concatenate(labels), return_inverse=True)
    classes = _with_sign(tuple(str(value) for value in values))
    ends = np.cumsum([len(label) for label in labels])[:-1]
    return np.split(codes.astype(np.int32), ends), classes


def as_classes(name: str, label: np.ndarray) -> list[str]:
    """Return the names of the classes of labels of any kind."""
    return [str(value) for value in _plain(name, np.asarray(label))]


def class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of classes in their order: numbers by size, else by the alphabet."""
    different = sorted(set(names))
    try:
        different.sort(key=int)
    except ValueError:
        pass
    return _with_sign(tuple(different))


def _with_sign(classes: tuple[str, ...]) -> tuple[str, ...]:
    return ("-1", "+1") if classes == ("-1", "1") else classes
