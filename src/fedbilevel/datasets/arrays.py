"""Arrays in memory, in npz files, in folders of npy files, and in MNIST's IDX files."""

import gzip
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import read_member
from fedbilevel.datasets._base import Dataset, Part, assemble, reading
from fedbilevel.datasets._bounds import check_archive, check_ordinary, check_size
from fedbilevel.errors import InvalidInputError


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
    with reading(path, "npz"):
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not an archive of arrays")
        with zipfile.ZipFile(path) as archive:
            check_archive(path, archive)
            names = [one for one in archive.namelist() if one.endswith(".npy")]
            arrays = {name[:-4]: read_member(archive, name) for name in names}
    return _from_named(path, path.stem, arrays)


def load_folder(path: Path) -> Dataset:
    """Map a folder of `features.npy` and `label.npy`; others become columns."""
    arrays = {}
    for file in sorted(path.glob("*.npy")):
        with reading(file, "npy"):
            check_ordinary(file)
            arrays[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
    return _from_named(path, path.resolve().name, arrays)


def _from_named(path: Path, name: str, arrays: dict[str, np.ndarray]) -> Dataset:
    test = {key: arrays.pop(key) for key in list(arrays) if key.startswith("test_")}
    part = _part(path, "", arrays)
    return assemble(name, part, _part(path, "test_", test) if test else None)


def _part(path: Path, prefix: str, arrays: dict[str, np.ndarray]) -> Part:
    wanted = f"{prefix}features", f"{prefix}label"
    for needed in wanted:
        if needed not in arrays:
            held = ", ".join(sorted(arrays)) or "nothing"
            raise InvalidInputError(
                f"{path} has no array '{needed}', and holds {held}. Name the arrays "
                f"'{wanted[0]}' and '{wanted[1]}'."
            )
    features, label = (arrays.pop(needed) for needed in wanted)
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
    return _find_idx(path, f"{kind}-images-idx3-ubyte") is not None


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read or map one file of unsigned bytes with so many axes."""
    head = 4 + 4 * axes
    with reading(path, "IDX"):
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                start = file.read(head)
                shape = _idx_shape(path, axes, start)
                check_size(path, math.prod(shape), f"{shape} by its header")
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


def _find_idx(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _idx_part(folder: Path, kind: str) -> Part:
    arrays = []
    for name, axes in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1)):
        path = _find_idx(folder, f"{kind}-{name}")
        if path is None:
            raise InvalidInputError(
                f"{folder} has no {kind}-{name}, nor with .gz. Put it beside the "
                "others."
            )
        arrays.append(read_idx(path, axes))
    return Part(*arrays)
