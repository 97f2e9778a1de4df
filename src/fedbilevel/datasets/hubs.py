"""Data sets of OpenML and Hugging Face, fetched by their libraries."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.datasets._base import Dataset, Part, assemble, rename_classes
from fedbilevel.datasets._bounds import check_size
from fedbilevel.errors import FedbilevelError, InvalidInputError, needed


def _openml(name: str, cache: Path) -> Dataset:
    sentence = "OpenML is read by scikit-learn: install fedbilevel[data]."
    library = needed("sklearn.datasets", sentence)
    try:
        # This parser needs no pandas.
        bunch = library.fetch_openml(
            name, data_home=str(cache), as_frame=False, parser="liac-arff"
        )
    except (OSError, ValueError) as error:
        raise _unreachable("OpenML", name, cache, error) from error
    if bunch.target is None:
        raise InvalidInputError(
            f"openml:{name} names no column as its label. Save it as CSV with a "
            "column 'label' and pass the file."
        )
    features = bunch.data
    if hasattr(features, "toarray"):
        size = math.prod(features.shape) * features.dtype.itemsize
        check_size(f"openml:{name}", size, "not sparse any more")
        features = features.toarray()
    return assemble(name, Part(np.asarray(features), np.asarray(bunch.target)))


def _hugging_face(name: str, cache: Path) -> Dataset:
    sentence = "Hugging Face data sets are read by their library: pip install datasets."
    library = needed("datasets", sentence)
    try:
        splits = library.load_dataset(name, cache_dir=str(cache / "huggingface"))
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable("Hugging Face", name, cache, error) from error
    if "train" not in splits:
        raise InvalidInputError(
            f"huggingface:{name} has no part 'train', only {', '.join(splits)}."
        )
    train = splits["train"]
    names = list(train.column_names)
    chosen = "label" if "label" in names else names[-1]
    test = _split(name, splits["test"], chosen) if "test" in splits else None
    dataset = assemble(name, _split(name, train, chosen), test)
    classes = getattr(train.features[chosen], "names", None)
    return rename_classes(dataset, classes) if classes else dataset


def _split(name: str, split: Any, label: str) -> Part:
    """Take arrays per sample (an image) as features, else the columns of numbers."""
    columns = {column: _stack(name, column, split) for column in split.column_names}
    labels = columns.pop(label)
    numbers = {c: array for c, array in columns.items() if array.dtype.kind in "buif"}
    wide = [column for column, array in numbers.items() if array.ndim > 1]
    if len(wide) > 1 or not numbers:
        raise InvalidInputError(
            f"huggingface:{name} has {len(wide)} columns of arrays and {len(numbers)} "
            f"of numbers in all besides '{label}'. Give it as arrays with "
            "fedbilevel.datasets.from_arrays."
        )
    used = wide or list(numbers)
    features = [columns.pop(column) for column in used]
    return Part(features[0] if wide else np.stack(features, axis=1), labels, columns)


def _stack(name: str, column: str, split: Any) -> np.ndarray:
    try:
        return np.stack([np.asarray(value) for value in split[column]])
    except ValueError as error:
        raise InvalidInputError(
            f"huggingface:{name}: the values of column '{column}' differ in shape "
            f"({error}). Give the data as arrays with fedbilevel.datasets.from_arrays."
        ) from error


def _unreachable(hub: str, name: str, cache: Path, error: Exception) -> FedbilevelError:
    return FedbilevelError(
        f"'{name}' could not be had from {hub}: {error}. Check the name and the "
        f"network; what was fetched before is kept in {cache}."
    )


HUBS: Mapping[str, Callable[[str, Path], Dataset]] = {
    "huggingface": _hugging_face,
    "openml": _openml,
}
