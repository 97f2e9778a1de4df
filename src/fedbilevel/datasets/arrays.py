"""Arrays in memory, in npz files and in folders of npy files, which are mapped."""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.datasets._base import Dataset, Part, assemble, reading
from fedbilevel.datasets._bounds import check_archive, check_ordinary
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
    pairs = [_pair(name, row, dataset[row]) for row in range(len(dataset))]
    if not pairs:
        raise InvalidInputError(f"{name} has no samples.")
    for row, (features, _) in enumerate(pairs):
        if features.shape != pairs[0][0].shape:
            raise InvalidInputError(
                f"{name}: item {row} has features of shape {features.shape}, but item "
                f"0 of {pairs[0][0].shape}. All must agree."
            )
    features = np.stack([features for features, _ in pairs])
    return assemble(name, Part(features, np.stack([label for _, label in pairs])))


def _pair(name: str, row: int, item: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InvalidInputError(
            f"{name}: item {row} is a {type(item).__name__}. Items must be pairs "
            "(features, label)."
        )
    features, label = np.asarray(item[0]), np.asarray(item[1])
    return np.atleast_1d(features), label.reshape(()) if label.size == 1 else label


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
            arrays = {
                one.removesuffix(".npy"): _read_member(archive, one) for one in names
            }
    return _from_named(path, path.stem, arrays)


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read one array; what its header announces is compared before it is believed."""
    with archive.open(name) as file:
        shape, _, kind = _header(file)
        announced = file.tell() + math.prod(shape) * kind.itemsize
    size = archive.getinfo(name).file_size
    if min(shape, default=0) < 0 or announced != size:
        raise ValueError(f"{name} announces {announced} bytes, and has {size}")
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"version {version} of the npy format is not known")
    shape, order, kind = readers[version](file)
    if kind.hasobject:
        raise ValueError("Object arrays cannot be loaded: they could run programs")
    return shape, order, kind


def load_folder(path: Path) -> Dataset:
    """Map a folder of `features.npy` and `label.npy`; others become columns."""
    arrays = {}
    for file in sorted(path.glob("*.npy")):
        with reading(file, "npy"):
            check_ordinary(file)
            arrays[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
    return _from_named(path, path.resolve().name, arrays)


def _from_named(path: Path, name: str, arrays: dict[str, np.ndarray]) -> Dataset:
    test = {
        key.removeprefix("test_"): array
        for key, array in arrays.items()
        if key.startswith("test_")
    }
    rest = {key: array for key, array in arrays.items() if not key.startswith("test_")}
    if not test:
        return assemble(name, _part(path, "", rest))
    return assemble(name, _part(path, "", rest), _part(path, "test_", test))


def _part(path: Path, prefix: str, arrays: dict[str, np.ndarray]) -> Part:
    for needed in ("features", "label"):
        if needed not in arrays:
            held = ", ".join(prefix + name for name in sorted(arrays)) or "nothing"
            raise InvalidInputError(
                f"{path} has no array '{prefix}{needed}'; it holds {held}. Name the "
                f"arrays '{prefix}features' and '{prefix}label'."
            )
    columns = dict(arrays)
    return Part(columns.pop("features"), columns.pop("label"), columns)
