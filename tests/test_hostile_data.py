"""Files made to harm whoever reads them: each is refused in a sentence, and soon."""

import gzip
import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.datasets import load
from fedbilevel.errors import InvalidInputError

pytest.importorskip("sklearn.datasets")  # here, so that it is not measured
VARIABLE = "FEDBILEVEL_LARGEST_DATA"
MEBIBYTE = 2**20
# What a refusal may cost; the worst of these files ask for 4 exabytes.
LARGEST_COST = 64 * MEBIBYTE


def zeros(mebibytes: int) -> bytes:
    """Return so many zeros as a stream of deflate, a thousandth of their size."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(MEBIBYTE)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * mebibytes + zlib.compressobj(9, zlib.DEFLATED, -15).flush()


def archive(
    path: Path, name: str, packed: bytes, size: int, *, method: int = 8, flags: int = 0
) -> Path:
    """Write a zip file of one member whose size is what we say."""
    about = struct.pack(
        "<HHHHHIIIHH", 20, flags, method, 0, 33, 0, len(packed), size, len(name), 0
    )
    local = b"PK\x03\x04" + about + name.encode() + packed
    entry = b"PK\x01\x02\x14\x00" + about
    entry += struct.pack("<HHHII", 0, 0, 0, 0, 0) + name.encode()
    end = struct.pack("<HHHHIIH", 0, 0, 1, 1, len(entry), len(local), 0)
    path.write_bytes(local + entry + b"PK\x05\x06" + end)
    return path


def npy(header: str, rest: bytes = b"") -> bytes:
    """Return an npy file with a header of our own."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + rest


def described(shape: str, kind: str = "<f8") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}"


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def plain(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def folder_of(path: Path, **members: bytes) -> Path:
    path.mkdir()
    for name, content in members.items():
        (path / f"{name}.npy").write_bytes(content)
    return path


def images(path: Path, content: bytes, name: str = "a/b/1.png") -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, content)
    return path


def png(width: int, height: int) -> bytes:
    """Return a PNG that announces a size, and has next to nothing of it."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1000))),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(body))
        + kind
        + body
        + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def idx_folder(path: Path, sizes: tuple[int, int, int], suffix: str) -> Path:
    path.mkdir()
    content = bytes((0, 0, 8, 3)) + struct.pack(">3I", *sizes) + bytes(100)
    packed = gzip.compress(content) if suffix else content
    (path / f"train-images-idx3-ubyte{suffix}").write_bytes(packed)
    (path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\1\0\0\0\1\0")
    return path


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def with_pipe(path: Path) -> Path:
    folder = folder_of(path, features=plain(np.ones((2, 2))), label=plain([0, 1]))
    os.mkfifo(folder / "site.npy")
    return folder


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


FEATURES = plain(np.ones((2, 2)))
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "libsvm index 10^9": (
        lambda p: written(p / "hostile", b"1 1:1 1000000000:1\n0 1:1\n"),
        "would take 8,000,000,000 bytes of memory.*2 rows of 1000000000 columns",
    ),
    "libsvm index 10^30": (
        lambda p: written(p / "hostile", b"1 1:1 1" + b"0" * 30 + b":1\n"),
        "line 1: .*is not LIBSVM text",
    ),
    "npz of 2 MB that unpacks to 2 GB": (
        lambda p: archive(p / "hostile.npz", "label.npy", zeros(2048), 2**31),
        "would take 2,147,483,648 bytes of memory",
    ),
    "npz that unpacks to more than it says": (
        lambda p: archive(p / "hostile.npz", "label.npy", zeros(100), 1000),
        "cannot be read as npz",
    ),
    "npz that announces an exabyte": (
        lambda p: npz(p / "hostile.npz", features=npy(described("(10**9, 10**9)"))),
        "cannot be read as npz",
    ),
    "npz of a shape beyond memory": (
        lambda p: npz(
            p / "hostile.npz",
            features=npy(described("(1000000000, 500000000)"), bytes(64)),
        ),
        "features.npy announces 4000000000000000",
    ),
    "npz of a negative shape": (
        lambda p: npz(
            p / "hostile.npz", features=npy(described("(-1, -8)"), bytes(64))
        ),
        "features.npy announces",
    ),
    "npz with brackets without end": (
        lambda p: npz(p / "hostile.npz", features=npy("(" * 1000)),
        "cannot be read as npz",
    ),
    "npz with an unknown type": (
        lambda p: npz(p / "hostile.npz", features=npy(described("(1,)", "<q77"))),
        "cannot be read as npz",
    ),
    "npz with a program": (
        lambda p: npz(
            p / "hostile.npz",
            features=FEATURES,
            label=npy(described("(2,)", "|O"), b"cos\nsystem\n(S'true'\ntR."),
        ),
        "Object arrays cannot be loaded",
    ),
    "npz with a password": (
        lambda p: archive(
            p / "hostile.npz", "label.npy", b"x" * 99, 99, method=0, flags=1
        ),
        "is encrypted. Unpack it with its password",
    ),
    "npz packed in a way nobody knows": (
        lambda p: archive(p / "hostile.npz", "label.npy", b"x" * 99, 99, method=77),
        "cannot be read as npz",
    ),
    "npz that leaves its folder": (
        lambda p: npz(p / "hostile.npz", **{"../../label": FEATURES}),
        "outside of its own folder",
    ),
    "npz with an absolute path": (
        lambda p: npz(p / "hostile.npz", **{"/etc/label": FEATURES}),
        "outside of its own folder",
    ),
    "npz with labels that are no numbers": (
        lambda p: npz(
            p / "hostile.npz", features=FEATURES, label=plain(np.asarray([0.0, np.nan]))
        ),
        "the label of row 1 is nan",
    ),
    "npy that announces more than it has": (
        lambda p: folder_of(p / "hostile", features=npy(described("(99999999999, 9)"))),
        "cannot be read as npy",
    ),
    "npy with a broken header": (
        lambda p: folder_of(p / "hostile", features=npy("{'descr': ", bytes(64))),
        "cannot be read as npy",
    ),
    "npy that is a pipe": (
        lambda p: with_pipe(p / "hostile"),
        "site.npy is no ordinary",
    ),
    "idx that announces an exabyte": (
        lambda p: idx_folder(p / "hostile", (2**32 - 1, 2**15, 2**15), ""),
        "but its header announces 4611686017353646096",
    ),
    "packed idx that announces an exabyte": (
        lambda p: idx_folder(p / "hostile", (2**32 - 1, 2**15, 2**15), ".gz"),
        "would take 4,611,686,017,353,646,080 bytes",
    ),
    "images with a password": (
        lambda p: archive(
            p / "hostile.zip", "a/b/1.png", b"x" * 99, 99, method=0, flags=1
        ),
        "is encrypted. Unpack it with its password",
    ),
    "images that unpack to 2 GB": (
        lambda p: archive(p / "hostile.zip", "a/b/1.png", zeros(2048), 2**31),
        "would take 2,147,483,648 bytes of memory",
    ),
    "an image of a gigapixel": (
        lambda p: images(p / "hostile.zip", png(30_000, 30_000)),
        "1.png cannot be read as PNG: .*decompression bomb",
    ),
    "an image of a hundred megapixels": (
        lambda p: images(p / "hostile.zip", png(10_000, 10_000)),
        "1.png cannot be read as PNG: .*decompression bomb",
    ),
    "an image of another kind": (
        lambda p: images(p / "hostile.zip", b"%!PS-Adobe-3.0 EPSF-3.0\n%%Pages: 1\n"),
        "1.png cannot be read as PNG",
    ),
    "images that leave their folder": (
        lambda p: images(p / "hostile.zip", png(2, 2), "../../a/b/1.png"),
        "outside of its own folder",
    ),
    "csv with a byte 0": (
        lambda p: written(p / "hostile.csv", b"a,label\n1,x\n2,x\0\n"),
        "line 3: it holds a byte 0",
    ),
    "csv of one row in another encoding": (
        lambda p: written(p / "hostile.csv", "a,label\n1,männlich\n".encode("latin-1")),
        "none of the columns a differs between rows",
    ),
    "csv of half letters": (
        lambda p: written(p / "hostile.csv", "a,label\n1,0\n".encode("utf-16")[:-1]),
        "cannot be read as CSV",
    ),
    "csv of texts that no terminal shows": (
        lambda p: written(p / "hostile.csv", b'a,label\n1,0\n2,1\n"\x1b[3\n1m",1\n'),
        "line 4, column 'a': ",
    ),
    "csv with endless labels": (
        lambda p: written(p / "hostile.csv", b"a,label\n1,0\n2,inf\n"),
        "the label of row 1 is inf",
    ),
    "csv with labels that run together": (
        lambda p: written(
            p / "hostile.csv", b"a,label\n1,9007199254740992\n2,9007199254740993"
        ),
        "the label of row 0 is 9007199254740992",
    ),
    "csv cut in the middle": (
        lambda p: written(p / "hostile.csv.gz", gzip.compress(b"a,label\n" * 99)[:-9]),
        "cannot be read as CSV",
    ),
    "a pipe": (lambda p: pipe(p / "hostile.csv"), "is neither a file nor a folder"),
    "a device": (lambda p: Path("/dev/zero"), "is neither a file nor a folder"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_a_sentence(tmp_path, name):
    make, message = HOSTILE[name]
    path = make(tmp_path)
    if path.is_file() and path.suffix in (".npz", ".zip"):
        assert path.stat().st_size < 3 * MEBIBYTE
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=message) as caught:
            load(str(path))
        cost = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert cost < LARGEST_COST
    told = str(caught.value)
    assert path.name.partition(".")[0] in told
    assert told.isprintable() and len(told) < 500


@pytest.mark.parametrize("name", ["f.csv.gz", "f.gz"])
def test_a_gzip_bomb_is_unpacked_no_further_than_allowed(tmp_path, monkeypatch, name):
    monkeypatch.setenv(VARIABLE, str(4 * MEBIBYTE))
    head = struct.pack("<2sBBIBB", b"\x1f\x8b", 8, 0, 0, 0, 255)
    path = written(tmp_path / name, head + zeros(512))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=f"{name} would take"):
            load(str(path))
        assert tracemalloc.get_traced_memory()[1] < LARGEST_COST
    finally:
        tracemalloc.stop()


def test_the_bound_can_be_raised_by_who_trusts_a_file(tmp_path, monkeypatch):
    path = tmp_path / "f.npz"
    np.savez_compressed(path, features=np.zeros((1000, 100)), label=np.arange(1000))
    monkeypatch.setenv(VARIABLE, "800000")
    with pytest.raises(InvalidInputError, match=f"If it is to be.*set {VARIABLE} to"):
        load(str(path))
    monkeypatch.setenv(VARIABLE, "900000")
    assert load(str(path)).features.shape == (1000, 100)
    monkeypatch.setenv(VARIABLE, "a lot")
    with pytest.raises(InvalidInputError, match=f"{VARIABLE}='a lot': give a number"):
        load(str(path))


@pytest.mark.slow
def test_a_wide_table_is_read_in_the_time_that_its_size_takes(tmp_path):
    # Compared pair by pair its names would take a thousand million steps.
    wide = 30_000
    names = ",".join(f"c{i}" for i in range(wide))
    text = f"{names},label\n{'1,' * wide}0\n{'2,' * wide}1\n"
    found = load(str(written(tmp_path / "f.csv", text.encode())))
    assert found.features.shape == (2, wide)
