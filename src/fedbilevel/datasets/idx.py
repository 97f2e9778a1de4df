"""IDX files in the layout of MNIST: images and labels as unsigned bytes."""

import gzip
import math
import struct
from pathlib import Path

import numpy as np

from fedbilevel.datasets._base import Dataset, Part, assemble, reading
from fedbilevel.datasets._bounds import check_size
from fedbilevel.errors import InvalidInputError


def load_idx(path: Path) -> Dataset:
    """Load a folder of train-images-idx3-ubyte[.gz] and its companions.

    Uncompressed files are mapped. The t10k files, if any, are the test part.
    """
    test = _part(path, "t10k") if _find(path, "t10k-images-idx3-ubyte") else None
    return assemble(path.resolve().name, _part(path, "train"), test)


def holds_idx(path: Path) -> bool:
    """Say whether a folder has training images in this layout."""
    return _find(path, "train-images-idx3-ubyte") is not None


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read or map one file of unsigned bytes with so many axes."""
    head = 4 + 4 * axes
    with reading(path, "IDX"):
        if path.suffix == ".gz":
            return _unpack(path, axes, head)
        content = np.memmap(path, np.uint8, "r")
    shape = _shape(path, axes, bytes(content[:head]))
    return _cut(path, content, head, shape)


def _unpack(path: Path, axes: int, head: int) -> np.ndarray:
    """Read as much of a packed file as its header announces."""
    with gzip.open(path) as file:
        start = file.read(head)
        shape = _shape(path, axes, start)
        check_size(path, math.prod(shape), f"{shape} by its header")
        rest = file.read(math.prod(shape) + 1)
    return _cut(path, np.frombuffer(start + rest, np.uint8), head, shape)


def _shape(path: Path, axes: int, start: bytes) -> tuple[int, ...]:
    """Return the shape that the first bytes announce."""
    # Two zero bytes, 8 for unsigned bytes, and the number of axes.
    magic = bytes((0, 0, 8, axes))
    if start[:4] != magic:
        raise InvalidInputError(
            f"{path} begins with the bytes {start[:4].hex()}, but IDX data of {axes} "
            f"axes begin with {magic.hex()}. Is it the right file, and unpacked?"
        )
    return struct.unpack(f">{axes}I", start[4:].ljust(4 * axes, b"\0"))


def _cut(
    path: Path, content: np.ndarray, head: int, shape: tuple[int, ...]
) -> np.ndarray:
    """Return the rows of a file that has as many bytes as it announces."""
    if len(content) != head + math.prod(shape):
        raise InvalidInputError(
            f"{path} has {len(content)} bytes, but its header announces "
            f"{head + math.prod(shape)}. Get the file again."
        )
    return content[head:].reshape(shape)


def _find(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _part(folder: Path, kind: str) -> Part:
    arrays = []
    for name, axes in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1)):
        path = _find(folder, f"{kind}-{name}")
        if path is None:
            raise InvalidInputError(
                f"{folder} has no {kind}-{name}, nor with .gz. Put it beside the "
                "others."
            )
        arrays.append(read_idx(path, axes))
    return Part(*arrays)
