"""Which ledgers of a state folder are about a site's rows.

A row is known by a keyed digest of 64 bits. The key and the digests stay in files that
only their owner reads, and never travel: without the key no one can test whether a
guessed row is there. Rows of a file are its lines, or those of its arrays, whatever a
task, a random seed or a precision makes of them; without a file they are the rows that
the site computes with. Data sets that have a row in common count together: to add a row
to a table, or to take some of it, begins nothing anew. A ledger holds how often, and
with which noise, something of its rows was released.
"""

import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b, file_digest
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel import _files
from fedbilevel.errors import CheckpointError
from fedbilevel.federation.refusals import read_json
from fedbilevel.problem import Data
from fedbilevel.problem.stored_rows import is_stored
from fedbilevel.runtime.privacy import IN_THE_CLEAR, Release

LEDGER = ".ledger.json"
_KEY, _ROWS, _LOCK = "ledger.key", ".rows.npy", "ledger.lock"
_KEY_BYTES = 32
_DRAWS = b"which rows"
_CHUNK = 4096  # rows of a job that are read at a time
_AT_ONCE = 2**16  # digests of rows that are compared at a time
_LONGEST = 2**24  # bytes of a line; the rest of it is another row


class OwnRows:
    """The rows of one site, and the ledgers in its state folder that have any of them.

    `path` is the ledger of exactly these rows. By the `secret`, which follows from the
    key of the folder, a restarted site draws the same rows for the same question.
    """

    def __init__(self, folder: Path, rows: Iterable[bytes]) -> None:
        self.folder = folder
        _files.make_private_folder(folder)
        with self.locked():
            self.key = self._read_key()
            self.secret = blake2b(key=self.key, person=_DRAWS).digest()
            self.rows = _names(self.key, rows)
            whole = self._name(self.rows)
            self.path = folder / f"{whole}{LEDGER}"
            held = folder / f"{whole}{_ROWS}"
            if not held.exists():
                save = lambda file: np.save(file, self.rows)  # noqa: E731
                _files.write_atomically(held, save, mode=0o600)
        self._shared = {whole: True}

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes out that write ledgers into this folder."""
        return _files.locked(self.folder / _LOCK)

    def others(self) -> list[Path]:
        """Return the other ledgers in the folder that are about some of these rows.

        Those of earlier versions say not about which, so that they are among them.
        """
        found = sorted(self.folder.glob(f"*{LEDGER}"))
        return [one for one in found if one != self.path and self._shares(one)]

    def _shares(self, ledger: Path) -> bool:
        name = ledger.name.removesuffix(LEDGER)
        if is_old(ledger):
            return True
        if name not in self._shared:
            held = ledger.with_name(f"{name}{_ROWS}")
            try:
                rows = _files.map_array(held)
                if self._name(rows) != name:
                    raise ValueError(f"it was changed, or {_KEY} was")
            except _files.DAMAGED as error:
                raise CheckpointError(
                    f"{held} cannot be read ({error}), so that it is unknown whether "
                    f"{ledger.name} is about rows of this site. Put back a copy, or "
                    "move both away to begin anew."
                ) from error
            self._shared[name] = bool(np.isin(self.rows, rows).any())
        return self._shared[name]

    def _name(self, rows: np.ndarray) -> str:
        """Return what files about these rows are called, which takes the key."""
        return blake2b(rows.tobytes(), digest_size=16, key=self.key).hexdigest()

    def _read_key(self) -> bytes:
        path = self.folder / _KEY
        if path.exists():
            key = path.read_bytes()
            if len(key) == _KEY_BYTES:
                return key
        elif not any(self.folder.glob(f"*{_ROWS}")):
            _files.write_atomically(path, os.urandom(_KEY_BYTES), mode=0o600)
            return path.read_bytes()
        raise CheckpointError(
            f"{path} is damaged or gone, so that it is unknown which ledgers are about "
            "the rows of this site. Put back a copy, or move the ledgers away, too, to "
            "begin anew."
        )


def is_old(ledger: Path) -> bool:
    """Say whether a ledger was written when they were named by clients."""
    return ledger.name.startswith("client")


def rows_of_data(data: Data) -> Iterator[bytes]:
    """Return the rows that a site computes with, of both levels.

    Numbers are taken in single precision: another one has the same rows.
    """
    levels = ((data.upper, data.upper_sizes), (data.lower, data.lower_sizes))
    for level, sizes in levels:
        leaves = jax.tree.leaves(level, is_leaf=is_stored)
        own = [leaf[0] if is_stored(leaf) else np.asarray(leaf)[0] for leaf in leaves]
        for start in range(0, int(sizes[0]), _CHUNK):
            stop = min(start + _CHUNK, int(sizes[0]))
            columns = [_plain(np.asarray(leaf[start:stop])) for leaf in own]
            for row in zip(*columns, strict=True):
                yield b"".join(one.tobytes() for one in row)


def rows_of_files(place: Path) -> Iterator[bytes]:
    """Return the rows of a file, or of all files in a folder.

    Of arrays with one number a row, which are labels, there are none. Files that are
    neither text nor arrays are a row each.
    """
    inside = sorted(place.rglob("*")) if place.is_dir() else [place]
    for file in filter(Path.is_file, inside):
        with _files.naming_damage(file):
            if file.suffix == ".npy":
                yield from _rows_of(_files.map_array(file))
            elif file.suffix == ".npz" and file == place:
                with np.load(file, allow_pickle=False) as held:
                    for array in held.values():
                        yield from _rows_of(array)
            else:
                yield from _lines_of(file)


def _rows_of(array: np.ndarray) -> Iterator[bytes]:
    return (_plain(row).tobytes() for row in array if row.ndim)


def _lines_of(file: Path) -> Iterator[bytes]:
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as opened:
        text = b"\0" not in opened.read(1 << 16)
        opened.seek(0)
        if not text:
            yield file_digest(opened, "sha256").digest()
            return
        if {".csv", ".tsv"} & {*file.suffixes}:
            opened.readline(_LONGEST)  # names of columns, which other tables have, too
        while line := opened.readline(_LONGEST):
            if line := line.strip():
                yield line


def _plain(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _names(key: bytes, rows: Iterable[bytes]) -> np.ndarray:
    every = (blake2b(row, digest_size=8, key=key).digest() for row in rows)
    parts = [np.empty(0, np.uint64)]
    # In pieces: a small file may unpack to very many rows that are the same.
    while part := b"".join(islice(every, _AT_ONCE)):
        parts.append(np.unique(np.frombuffer(part, np.uint64)))
    return np.unique(np.concatenate(parts))


@dataclass
class Spent:
    """Releases of some rows: how often, and with which noise.

    `given`, `measured` and `concluded` name the last reply, and the last such question,
    of each federation.
    """

    exchanges: int = 0
    measurements: int = 0
    releases: Counter[Release] = field(default_factory=Counter)
    measured: dict[str, list] = field(default_factory=dict)
    concluded: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> "Spent":
        """Read what was written, or raise: to begin anew would forget releases."""
        try:
            held = read_json(path.read_bytes())
            spent = Spent(_count(held["exchanges"]), _count(held["measurements"]))
            if is_old(path):
                # Their noise was not recorded, so it may have been none.
                spent.releases[IN_THE_CLEAR] = spent.exchanges + spent.measurements
            else:
                for one in held["releases"]:
                    times = _count(one.pop("times"))
                    spent.releases[_release(one)] += times
            spent.measured = {str(k): list(v) for k, v in held["measured"].items()}
            spent.concluded = {str(k): str(v) for k, v in held["concluded"].items()}
            given = held.get("given", {}) if is_old(path) else held["given"]
            spent.given = {str(k): str(v) for k, v in given.items()}
            return spent
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}), so that it is unknown what this site "
                "has released. Put back a copy, or move it away to begin anew."
            ) from error

    def write(self, path: Path) -> None:
        """Write it all, for its owner alone."""
        kinds = self.releases.items()
        releases = [{**one._asdict(), "times": times} for one, times in kinds]
        text = json.dumps({**vars(self), "releases": releases}) + "\n"
        _files.write_atomically(path, text, mode=0o600)

    def __add__(self, other: "Spent") -> "Spent":
        """Return both together; of each federation the later question is the last."""
        measured = dict(self.measured)
        for name, about in other.measured.items():
            measured[name] = max(about, measured.get(name, about))
        return Spent(
            self.exchanges + other.exchanges,
            self.measurements + other.measurements,
            self.releases + other.releases,
            measured,
            {**self.concluded, **other.concluded},
            {**other.given, **self.given},
        )


def _release(held: dict[str, Any]) -> Release:
    """Read one kind of release, as it was written."""
    one = Release(**held)
    counts = (one.participants, one.blocks, one.shares)
    numbers = (one.noise, one.delta)
    plain = all(type(n) in (int, float) and n >= 0 for n in (*counts, *numbers))
    whole = all(type(n) is int for n in counts)
    if not (plain and whole and one.participants and math.isfinite(sum(numbers))):
        raise ValueError(f"a release of {held!r:.200}")
    return one


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a count of {value!r:.40}")
    return value
