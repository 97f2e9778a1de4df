"""Writes that are either wholly there or not there at all."""

import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np


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


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can look into, or make it such a one."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


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
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        held = sum(one.file_size for one in file.zip.infolist())
        size = os.fstat(stream.fileno()).st_size
        if held > (size if most is None else min(size, most)):
            raise ValueError(f"it would unpack to {held:,} bytes")
        return {name: file[name] for name in file.files}


def mode_in(folder: Path) -> int:
    """Return the permissions of a new file there: its owner's in a closed folder."""
    return 0o666 if folder.stat().st_mode & 0o077 else 0o600
