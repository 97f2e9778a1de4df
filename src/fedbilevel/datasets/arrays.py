"""Arrays in memory and in files: npz, npy, MNIST's IDX, and LIBSVM's text."""

import codecs
import gzip
import math
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedbilevel._files import read_member
from fedbilevel.datasets import _files
from fedbilevel.datasets._base import Dataset, Part, assemble
from fedbilevel.errors import InvalidInputError, needed

_OTHERS = (
    "Other kinds of files are known by their names: .csv, .tsv, .parquet, .xlsx, .npz, "
    ".zip. Folders hold images, IDX or npy files."
)
_RANKING = re.compile(rb"\s*[^\s#]+\s+qid")


def from_arrays(features: Any, label: Any, **columns: Any) -> Dataset:
    """Make a data set of arrays; `columns` are further arrays, such as `site`."""
    # A subclass is kept: np.asarray would hide that an array is a mapped file.
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    return assemble("arrays", Part(np.asanyarray(features), np.asarray(label), arrays))


def from_torch(dataset: Any) -> Dataset:
    """Make a data set of a map-style `torch.utils.data.Dataset`.

    Only its length and its items are used; an item is a pair of features and label.
    """
    name = type(dataset).__name__
    features, labels = [], []
    for row in range(len(dataset)):
        item = dataset[row]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InvalidInputError(
                f"{name}: item {row} is a {type(item).__name__}. Items must be pairs "
                "(features, label)."
            )
        features.append(np.atleast_1d(np.asarray(item[0])))
        label = np.asarray(item[1])
        labels.append(label.reshape(()) if label.size == 1 else label)
        if features[row].shape != features[0].shape:
            raise InvalidInputError(
                f"{name}: item {row} has features of shape {features[row].shape}, but "
                f"item 0 of {features[0].shape}. All must agree."
            )
    if not features:
        raise InvalidInputError(f"{name} has no samples.")
    return assemble(name, Part(np.stack(features), np.stack(labels)))


def load_npz(path: Path) -> Dataset:
    """Load an npz file of `features` and `label`; other arrays become columns.

    Names that begin with `test_` belong to the test part.
    """
    with _files.reading(path, "npz"):
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not an archive of arrays")
        with _files.unpacking(path) as archive:
            names = [one for one in archive.namelist() if one.endswith(".npy")]
            arrays = {name[:-4]: read_member(archive, name) for name in names}
    return _from_named(path, path.stem, arrays)


def load_folder(path: Path) -> Dataset:
    """Map a folder of `features.npy` and `label.npy`; others become columns."""
    arrays = {}
    for file in sorted(path.glob("*.npy")):
        with _files.reading(file, "npy"):
            _files.check_ordinary(file)
            arrays[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
    return _from_named(path, path.resolve().name, arrays)


def _from_named(path: Path, name: str, arrays: dict[str, np.ndarray]) -> Dataset:
    test = {key: arrays.pop(key) for key in list(arrays) if key.startswith("test_")}
    part = _part(path, "", arrays)
    return assemble(name, part, _part(path, "test_", test) if test else None)


def _part(path: Path, prefix: str, arrays: dict[str, np.ndarray]) -> Part:
    wanted = f"{prefix}features", f"{prefix}label"
    for name in wanted:
        if name not in arrays:
            held = ", ".join(sorted(arrays)) or "nothing"
            raise InvalidInputError(
                f"{path} has no array '{name}', and holds {held}. Name the arrays "
                f"'{wanted[0]}' and '{wanted[1]}'."
            )
    features, label = (arrays.pop(name) for name in wanted)
    columns = {name.removeprefix(prefix): array for name, array in arrays.items()}
    return Part(features, label, columns)


def load_idx(path: Path) -> Dataset:
    """Load a folder of train-images-idx3-ubyte[.gz] and its companions.

    Uncompressed files are mapped. The t10k files, if any, are the test part.
    """
    test = _idx_part(path, "t10k") if holds_idx(path, "t10k") else None
    return assemble(path.resolve().name, _idx_part(path, "train"), test)


def holds_idx(path: Path, kind: str = "train") -> bool:
    """Say whether a folder has images for training, or of another kind, as IDX."""
    return _files.plain_or_packed(path / f"{kind}-images-idx3-ubyte") is not None


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read or map one file of unsigned bytes with so many axes."""
    head = 4 + 4 * axes
    with _files.reading(path, "IDX"):
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                start = file.read(head)
                shape = _idx_shape(path, axes, start)
                _files.check_size(path, math.prod(shape), f"{shape} by its header")
                start += file.read(math.prod(shape) + 1)
            content = np.frombuffer(start, np.uint8)
        else:
            content = np.memmap(path, np.uint8, "r")
            shape = _idx_shape(path, axes, bytes(content[:head]))
    if len(content) != head + math.prod(shape):
        raise InvalidInputError(
            f"{path} has {len(content)} bytes, but its header announces "
            f"{head + math.prod(shape)}. Get the file again."
        )
    return content[head:].reshape(shape)


def _idx_shape(path: Path, axes: int, start: bytes) -> tuple[int, ...]:
    """Return the shape that the first bytes announce."""
    # Two zero bytes, 8 for unsigned bytes, and the number of axes.
    magic = bytes((0, 0, 8, axes))
    if start[:4] != magic:
        raise InvalidInputError(
            f"{path} begins with the bytes {start[:4].hex()}, but IDX data of {axes} "
            f"axes begin with {magic.hex()}. Is it the right file, and unpacked?"
        )
    return struct.unpack(f">{axes}I", start[4:].ljust(4 * axes, b"\0"))


def _idx_part(folder: Path, kind: str) -> Part:
    arrays = []
    for name, axes in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1)):
        path = _files.plain_or_packed(folder / f"{kind}-{name}")
        if path is None:
            raise InvalidInputError(
                f"{folder} has no {kind}-{name}, nor with .gz. Put it beside the "
                "others."
            )
        arrays.append(read_idx(path, axes))
    return Part(*arrays)


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
        with _files.reading(one, "LIBSVM text"), _files.opened(one) as file:
            found.append(read_sparse(file, one))
    width = max(least_width, *(features.shape[1] for features, _ in found))
    rows = sum(len(label) for _, label in found)
    size = rows * width * np.dtype(np.float32).itemsize
    why = f"{rows} rows of {width} columns, by its largest index"
    _files.check_size(path, size, why)
    for features, label in found:
        features.resize((len(label), width))
    parts = (Part(features.toarray(), label) for features, label in found)
    return assemble(path.name.removesuffix(".gz"), *parts)


def companion(path: Path) -> Path | None:
    """Return the test file that belongs to a training file, if there is one."""
    return _files.plain_or_packed(path.with_name(f"{path.name.removesuffix('.gz')}.t"))


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
