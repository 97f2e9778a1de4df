"""Writes that are either wholly there or not there at all."""

import csv
import math
import os
import secrets
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedbilevel.errors import CheckpointError

# Errors of readers at damage: a flipped bit of an archive may ask for a password
# (RuntimeError) or for more than there is (MemoryError), break its header (SyntaxError)
# or its packing.
DAMAGED = (
    *(AttributeError, EOFError, IndexError, KeyError, MemoryError, OSError),
    *(OverflowError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(csv.Error, zipfile.BadZipFile, zlib.error, struct.error),
)


def write_atomically(
    path: Path,
    content: bytes | str | Callable[[BinaryIO], object],
    *,
    mode: int = 0o666,
) -> None:
    """Write a file beside its place, force it to disk, then move it in.

    `content` is all of it, or writes it. Its permissions are `mode` less the umask, as
    of any new file.
    """
    data = content.encode() if isinstance(content, str) else content
    with naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(handle, "wb") as file:
                file.write(data) if isinstance(data, bytes) else data(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Name the file in errors of the system that do not: a full disk has no name."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, ""):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Name the file in whatever damaged content makes libraries raise."""
    try:
        yield
    except DAMAGED as error:
        if isinstance(error, OSError) and error.filename:
            raise  # there is no such file, or it may not be read
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can look into, or make it such a one."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out that lock the same file."""
    # Not on every system; there, nodes do not run at all.
    import fcntl

    with naming_file(path):
        number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


@contextmanager
def private_files() -> Iterator[None]:
    """Let only the owner read what this process writes meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], *, mode: int = 0o666
) -> None:
    """Write an npz file atomically; unlike `np.savez` it takes any name."""

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)

    write_atomically(path, write, mode=mode)


def read_arrays(path: Path, most: int | None = None) -> dict[str, np.ndarray]:
    """Read an npz file without pickle, and close it even when it is damaged.

    What `write_arrays` wrote is not packed. A file that would unpack to more bytes than
    it has, or than `most`, is refused before any of them is read.
    """
    with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
        held = sum(one.file_size for one in archive.infolist())
        size = os.fstat(stream.fileno()).st_size
        if held > (size if most is None else min(size, most)):
            raise ValueError(f"it would unpack to {held:,} bytes")
        names = archive.namelist()
        return {one.removesuffix(".npy"): read_member(archive, one) for one in names}


def read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read one array; what its header announces is checked first."""
    with archive.open(name) as file:
        _check_size(file, name, archive.getinfo(name).file_size)
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def map_array(path: Path) -> np.ndarray:
    """Map an npy file; what its header announces is checked first."""
    with path.open("rb") as file:
        _check_size(file, path.name, os.fstat(file.fileno()).st_size)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _check_size(file: Any, name: str, size: int) -> None:
    """Raise unless a header is one of ours, and announces what the file has."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"version {version} of the npy format is not known")
    try:
        shape, _, kind = readers[version](file)
    except tokenize.TokenError as error:  # which is no ValueError
        raise ValueError(f"a header is no description: {error}") from error
    if kind.hasobject:
        raise ValueError("Object arrays cannot be loaded: they could run programs")
    announced = file.tell() + math.prod(shape) * kind.itemsize
    if min(shape, default=0) < 0 or announced != size:
        raise ValueError(f"{name} announces {announced} bytes, and has {size}")


def mode_in(folder: Path) -> int:
    """Return the permissions of a new file there: its owner's in a closed folder."""
    return 0o666 if folder.stat().st_mode & 0o077 else 0o600
