"""LIBSVM text: a label and `index:value` pairs a line, indices from 1."""

from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedbilevel.datasets._base import Dataset, Part, assemble, open_text, reading
from fedbilevel.errors import InvalidInputError

__all__ = ["companion", "load_libsvm", "read_sparse"]


class Sparse:
    """The numbers of one file before they are spread over a dense array."""

    def __init__(self) -> None:
        self.label, self.rows = array("d"), array("q")
        self.indices, self.values = array("q"), array("f")

    def add(self, text: str) -> None:
        """Take one line in; raise ValueError where it is malformed."""
        label, *pairs = text.split()
        number = float(label)
        for pair in pairs:
            index, value = pair.split(":")
            if int(index) < 1:
                raise ValueError("indices count from 1")
            self.rows.append(len(self.label))
            self.indices.append(int(index))
            self.values.append(float(value))
        self.label.append(number)

    @property
    def width(self) -> int:
        """The number of features seen."""
        return max(self.indices, default=0)

    def part(self, width: int) -> Part:
        """Return dense float32 features."""
        features = np.zeros((len(self.label), width), np.float32)
        features[np.asarray(self.rows), np.asarray(self.indices) - 1] = self.values
        return Part(features, np.asarray(self.label))


def load_libsvm(path: Path, least_width: int = 0) -> Dataset:
    """Load NAME or NAME.gz, and NAME.t or NAME.t.gz beside it as the test part.

    Trailing features that are zero in every row are unknown to the file;
    `least_width` adds them.
    """
    train, beside = _read(path), companion(path)
    test = None if beside is None else _read(beside)
    width = max(least_width, train.width, test.width if test else 0)
    name = path.name.removesuffix(".gz")
    return assemble(name, train.part(width), test and test.part(width))


def companion(path: Path) -> Path | None:
    """Return the test file that belongs to a training file, if there is one."""
    name = path.name.removesuffix(".gz")
    for beside in (path.with_name(f"{name}.t"), path.with_name(f"{name}.t.gz")):
        if beside.is_file():
            return beside
    return None


def read_sparse(lines: Iterable[str], path: Path) -> Sparse:
    """Parse lines; `path` is for the error, which names the line, too."""
    numbers = Sparse()
    for line, raw in enumerate(lines, 1):
        text = raw.partition("#")[0]
        if not text.strip():
            continue
        try:
            numbers.add(text)
        except (ValueError, OverflowError) as error:
            raise InvalidInputError(
                f"{path}, line {line}: '{text.strip()[:40]}' is not LIBSVM text, a "
                f"label and pairs like 3:0.5 ({error}). Other kinds of files are known "
                "by their names: .npz, .csv, .zip; folders hold IDX or npy files."
            ) from None
    if not numbers.width:
        raise InvalidInputError(f"{path} has no LIBSVM features.")
    return numbers


def _read(path: Path) -> Sparse:
    with reading(path, "LIBSVM text"), open_text(path) as file:
        return read_sparse(file, path)
