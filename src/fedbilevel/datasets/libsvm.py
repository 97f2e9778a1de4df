"""LIBSVM text: a label and `index:value` pairs a line, indices from 1."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedbilevel.datasets._base import Dataset, Part, assemble, opened, reading
from fedbilevel.datasets._bounds import check_size
from fedbilevel.errors import InvalidInputError, needed

_OTHERS = (
    "Other kinds of files are known by their names: .csv, .tsv, .parquet, .xlsx, .npz, "
    ".zip. Folders hold images, IDX or npy files."
)
_RANKING = re.compile(rb"\s*[^\s#]+\s+qid")


class _Lines:
    """A file to scikit-learn, and to us the line where its parser stopped."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.number, self.last = stream, 0, b""
        self.read = stream.read  # scikit-learn knows a file by this method

    def __iter__(self) -> Iterator[bytes]:
        for line in self.stream:
            self.number += 1
            self.last = line.removeprefix(codecs.BOM_UTF8) if self.number == 1 else line
            if _RANKING.match(self.last):  # scikit-learn would ignore it
                raise ValueError("query numbers belong to ranking")
            yield self.last


def load_libsvm(path: Path, least_width: int = 0) -> Dataset:
    """Load NAME or NAME.gz, and NAME.t or NAME.t.gz beside it as the test part.

    Trailing features that are zero in every row are unknown to the file;
    `least_width` adds them.
    """
    found = []
    for one in filter(None, (path, companion(path))):
        with reading(one, "LIBSVM text"), opened(one) as file:
            found.append(read_sparse(file, one))
    width = max(least_width, *(features.shape[1] for features, _ in found))
    rows = sum(len(label) for _, label in found)
    size = rows * width * np.dtype(np.float32).itemsize
    check_size(path, size, f"{rows} rows of {width} columns, by its largest index")
    for features, label in found:
        features.resize((len(label), width))
    parts = (Part(features.toarray(), label) for features, label in found)
    return assemble(path.name.removesuffix(".gz"), *parts)


def companion(path: Path) -> Path | None:
    """Return the test file that belongs to a training file, if there is one."""
    name = path.name.removesuffix(".gz")
    for beside in (path.with_name(f"{name}.t"), path.with_name(f"{name}.t.gz")):
        if beside.is_file():
            return beside
    return None


def read_sparse(stream: BinaryIO, path: Path) -> tuple[Any, np.ndarray]:
    """Parse a sparse float32 matrix and its labels; `path` is for the error."""
    sentence = "LIBSVM text is read by scikit-learn: install fedbilevel[data]."
    load = needed("sklearn.datasets", sentence).load_svmlight_file
    lines = _Lines(stream)
    try:
        features, label = load(lines, dtype=np.float32, zero_based=False)
    except (ValueError, OverflowError) as error:
        text = lines.last.partition(b"#")[0].strip()[:40].decode(errors="replace")
        text = "".join(c if c.isprintable() else "?" for c in text)
        raise InvalidInputError(
            f"{path}, line {lines.number}: '{text}' is not LIBSVM text, a label and "
            f"pairs like 3:0.5 whose indices ascend from 1 ({error}). {_OTHERS}"
        ) from None
    if not features.nnz:
        raise InvalidInputError(f"{path} has no LIBSVM features.")
    return features, label
