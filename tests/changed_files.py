"""Files with a change that fits their format, for tests of whoever reads them."""

import io
import json
import random
import zipfile

import numpy as np

from tests.test_fuzz import change_one, changed_bytes, changed_text, value

CELLS = [
    "",
    "nan",
    "inf",
    "1e999",
    "=1+1",
    '"',
    "a,b",
    "\x00",
    "\ud7ff",
    "1" * 400,
    "é",
]
SHAPES = [(), (0,), (1,), (3, 3), (2, 0), (1, 1, 1, 1, 1)]
KINDS = ["<f8", "<f4", "<i8", "|u1", "|b1", "<U3", "<c16", "<M8[s]", "|V4", "<f2"]
HEADERS = [(2**40,), (-1,), (10**30, 10**30), (2,) * 40, [1], 1, None]


def changed_file(name: str, content: bytes, draw: random.Random) -> bytes:
    """Return a file with a change that fits its format, or one of bytes."""
    kind = name.rpartition(".")[2]
    ways = {
        "json": changed_json,
        "jsonl": changed_lines,
        "npz": changed_archive,
        "zip": changed_archive,
        "npy": changed_array,
        "safetensors": changed_tensors,
        "csv": changed_table,
        "svm": changed_table,
    }
    if not content or draw.random() < 0.15:
        return changed_bytes(content, draw)
    return ways.get(kind, changed_bytes)(content, draw)


def changed_json(content: bytes, draw: random.Random) -> bytes:
    try:
        held = json.loads(content)
    except (ValueError, RecursionError):  # it was changed before
        return changed_bytes(content, draw)
    if draw.random() < 0.1:
        return json.dumps(value(draw)).encode()
    if draw.random() < 0.1:
        return draw.choice([changed_text(content, draw), b"[" * 100_000])
    for _ in range(draw.choice((1, 1, 2))):
        if isinstance(held, dict | list) and held:
            change_one(held, draw)
    return json.dumps(held).encode()


def changed_lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    return b"".join([*lines[:place], changed_json(lines[place], draw), *lines[place:]])


def changed_archive(content: bytes, draw: random.Random) -> bytes:
    """Change, drop, add or rename an array of an npz file."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            members = {one: file.read(one) for one in file.namelist()}
    except (zipfile.BadZipFile, NotImplementedError):
        return changed_bytes(content, draw)
    name = draw.choice(sorted(members))
    how = draw.randrange(6)
    if how == 0:
        del members[name]
    elif how == 1:
        members[draw.choice(["more.npy", "../x.npy", "column/round.npy", "a"])] = b"x"
    elif how < 4 and name == "about.npy":
        about = members[name].partition(b"\n")[2]
        members[name] = as_npy(np.frombuffer(changed_json(about, draw), np.uint8))
    else:
        members[name] = changed_array(members[name], draw)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for one, held in members.items():
            file.writestr(one, held)
    return stream.getvalue()


def as_npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def announcing(shape: object, kind: str) -> bytes:
    """Return the header of an npy file, whatever shape it may announce."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape!r}}}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def changed_array(content: bytes, draw: random.Random) -> bytes:
    """Return another array, one of another kind or shape, or with a made up header."""
    how = draw.randrange(4)
    if how == 0:
        return changed_bytes(content, draw)
    if how == 1:
        return announcing(draw.choice(HEADERS), draw.choice(KINDS))
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
        shape = array.shape if how == 2 else draw.choice(SHAPES)
        return as_npy(np.zeros(shape, draw.choice(KINDS)))
    except Exception:  # it was changed before
        return content[:-1]


def changed_tensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header of a safetensors file, or its numbers."""
    size = int.from_bytes(content[:8], "little")
    if draw.random() < 0.3 or size > len(content):
        return changed_bytes(content, draw)
    head = changed_json(content[8 : 8 + size], draw)
    return len(head).to_bytes(8, "little") + head + content[8 + size :]


def changed_table(content: bytes, draw: random.Random) -> bytes:
    """Change, drop or add a cell or a line."""
    lines = content.decode(errors="replace").splitlines()
    place = draw.randrange(len(lines))
    comma = "," if "," in lines[place] else " "
    cells = lines[place].split(comma)
    how = draw.randrange(5)
    if how == 0:
        del lines[place]
    elif how == 1:
        lines.insert(place, lines[place])
    elif how == 2:
        cells.insert(draw.randrange(len(cells)), draw.choice(CELLS))
    else:
        cells[draw.randrange(len(cells))] = draw.choice(CELLS)
    if how > 1:
        lines[place] = comma.join(cells)
    return ("\n".join(lines) + "\n").encode(errors="replace")
