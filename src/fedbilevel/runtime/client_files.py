"""Client states in files: one array for each, of which rounds read some rows.

The files have no names: a process leaves nothing behind, however it ends, and two runs
may share a folder. Only a checkpoint outlives a run.
"""

import shutil
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel._files import naming_file
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem.stored_rows import Source

_CHUNK = 2**24  # bytes that are written at a time where all rows are


class RowFile:
    """An array in a file, of a row for every client; rows are read and written.

    By reading and writing, and not through a mapping: there a disk that is full would
    end the process without a word, and whatever was touched would count as memory.
    """

    def __init__(self, folder: Path, rows: int, row: np.ndarray) -> None:
        self.shape, self.dtype = (rows, *row.shape), row.dtype
        self._folder, self._size = folder, row.nbytes
        # Programs on two devices read at the same time, and a file has one position.
        self._lock = threading.Lock()
        with naming_file(folder):
            self._file: Any = TemporaryFile(dir=folder)
            weakref.finalize(self, self._file.close)
            # A sparse file of this length takes no disk space and reads as zeros.
            self._file.truncate(rows * row.nbytes)
        if row.reshape(-1).view(np.uint8).any():
            self.fill(np.broadcast_to(row, self.shape))

    def fill(self, rows: np.ndarray) -> None:
        """Write all rows, which may lie in a file themselves."""
        step = max(1, _CHUNK // max(self._size, 1))
        for first in range(0, self.shape[0], step):
            part = rows[first : first + step]
            self.write(range(first, first + len(part)), part)

    def __getitem__(self, clients: Any) -> np.ndarray:
        """Read the rows of some clients, or of one."""
        chosen = np.asarray(clients)
        rows = np.empty((chosen.size, *self.shape[1:]), self.dtype)
        # As bytes: bfloat16 has no buffer of its own.
        plain = rows.reshape(chosen.size, -1).view(np.uint8)
        with naming_file(self._folder), self._lock:
            for place, client in enumerate(chosen.ravel().tolist()):
                self._file.seek(client * self._size)
                self._file.readinto(plain[place].data)
        return rows.reshape(*chosen.shape, *self.shape[1:])

    def write(self, clients: Sequence[int], rows: np.ndarray) -> None:
        """Write the rows of some clients."""
        plain = np.ascontiguousarray(rows).reshape(len(clients), -1).view(np.uint8)
        with naming_file(self._folder), self._lock:
            for place, client in enumerate(clients):
                self._file.seek(client * self._size)
                self._file.write(plain[place].data)
            self._file.flush()

    def whole(self) -> np.ndarray:
        """Return all rows as they are now, read when they are looked at."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self._file, self.dtype, "r", shape=self.shape)

    def close(self) -> None:
        """Free the disk space, once the rows are no longer in use."""
        self._file.close()


class ClientFiles:
    """The states of all clients: a tree of files for the tree of one client."""

    def __init__(self, folder: Path, first: PyTree, clients: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        needed = clients * sum(row.nbytes for row in jax.tree.leaves(first))
        free = shutil.disk_usage(folder).free
        if needed > free:  # before a run, and not in the midst of it
            raise InvalidInputError(
                f"{folder}: the states of all clients take {needed:,} bytes, and "
                f"{free:,} are free on its disk. Free some space, or choose another "
                "folder."
            )

        def opened(row: Any) -> RowFile:
            return RowFile(folder, clients, np.asarray(row))

        self._files = jax.tree.map(opened, first)
        # Programs read rows from the same sources for the life of the files.
        self.sources = jax.tree.map(Source, self._files)

    def read(self, clients: np.ndarray) -> PyTree:
        """Return what some clients keep, stacked."""
        return jax.tree.map(lambda file: file[clients], self._files)

    def write(self, clients: Sequence[int], kept: PyTree) -> None:
        """Store the states of some clients; rows beyond the last one are padding."""

        def store(file: RowFile, leaf: Any) -> None:
            file.write(clients, np.asarray(leaf)[: len(clients)])

        jax.tree.map(store, self._files, kept)

    def fill(self, kept: PyTree) -> None:
        """Take what all clients keep."""
        jax.tree.map(RowFile.fill, self._files, kept)

    def whole(self) -> PyTree:
        """Return what all clients keep, read when it is looked at."""
        return jax.tree.map(RowFile.whole, self._files)

    def close(self) -> None:
        """Free the disk space."""
        jax.tree.map(RowFile.close, self._files)
