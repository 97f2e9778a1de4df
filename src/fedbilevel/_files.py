"""Writes that are either wholly there or not there at all."""

import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its place, force it to disk, then move it in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # temporary files are for the owner only
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an npz file atomically; unlike `np.savez` it takes any name."""

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)

    write_atomically(path, write)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read an npz file without pickle, and close it even when it is damaged."""
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
