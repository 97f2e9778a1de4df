"""How files of data are opened: errors name them, and their memory is bounded."""

import contextlib
import gzip
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fedbilevel.errors import FedbilevelError, InvalidInputError

VARIABLE = "FEDBILEVEL_LARGEST_DATA"
_DEFAULT = 2**30
_ENCRYPTED = 1  # a bit of a zip member's flags


def largest() -> int:
    """Return the bytes that one data set may take, as the environment allows."""
    text = os.environ.get(VARIABLE, str(_DEFAULT))
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidInputError(f"{VARIABLE}={text!r:.40}: give a number of bytes.")
    return int(text)


def check_size(path: object, size: int, why: str) -> None:
    """Raise if data would take too many bytes; `why` says how that comes."""
    if size > largest():
        raise InvalidInputError(
            f"{path} would take {size:,} bytes of memory ({why}), and {largest():,} "
            f"are allowed. If it is to be trusted, set {VARIABLE} to more bytes."
        )


def check_ordinary(path: Path) -> None:
    """Raise if a path is not a file: a pipe or a device may be read without end."""
    if not path.is_file():
        raise InvalidInputError(f"{path} is no ordinary file. Give a copy of it.")


@contextlib.contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn what a damaged file makes libraries raise into an error that names it."""
    try:
        yield
    except FedbilevelError:
        raise
    # Files come from anywhere, and libraries raise whatever they like at bad ones:
    # from RuntimeError for a password to MemoryError for a shape.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        text = "".join(c if c.isprintable() else "?" for c in text)
        raise InvalidInputError(
            f"{path} cannot be read as {kind}: {text[:200].rstrip('.')}. Is the file "
            "complete, and of that kind?"
        ) from error


@contextlib.contextmanager
def unpacking(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; raise if members are encrypted, elsewhere, or too large."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            parts = member.filename.replace("\\", "/").split("/")
            if member.flag_bits & _ENCRYPTED:
                raise InvalidInputError(
                    f"{path} is encrypted. Unpack it with its password."
                )
            if ".." in parts or (parts[0] == "" and len(parts) > 1) or ":" in parts[0]:
                raise InvalidInputError(
                    f"{path} holds {member.filename!r:.80}, which is outside of its "
                    "own folder. Pack it again, with plain names."
                )
        # A member never yields more bytes than it announces.
        size = sum(member.file_size for member in archive.infolist())
        check_size(path, size, "unpacked")
        yield archive


def plain_or_packed(path: Path) -> Path | None:
    """Return the path of a file, or of the same file compressed by gzip, if any."""
    both = (path, Path(f"{path}.gz"))
    return next((one for one in both if one.is_file()), None)


def opened(path: Path) -> BinaryIO:
    """Open the bytes of a file that may be compressed by gzip."""
    packed = path.suffix == ".gz"
    return io.BufferedReader(Unpacked(path)) if packed else path.open("rb")


class Unpacked(gzip.GzipFile):
    """The unpacked content of a gzip file, up to the allowed bytes."""

    def read(self, size: int | None = -1) -> bytes:
        """Read some bytes, as long as there are not too many."""
        every = size is None or size < 0
        data = super().read(largest() + 1 if every else size)
        check_size(self.name, self.tell(), "unpacked, or more")
        return data
