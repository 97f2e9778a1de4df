"""Folders and zip files of PNG drawings in the layout of Omniglot."""

import io
import math
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePath

import numpy as np

from fedbilevel.datasets._base import Dataset, Part, assemble, reading
from fedbilevel.datasets._bounds import check_archive, check_ordinary, check_size
from fedbilevel.errors import FedbilevelError, InvalidInputError

__all__ = ["load_images", "shrink"]

_AT_ONCE = 1024


def load_images(path: Path) -> Dataset:
    """Load alphabet/character/*.png from a folder, a zip file or a folder of them.

    The label is alphabet/character; the column `alphabet` is kept, too. A drawing that
    is in two zip files, as two of Omniglot's are for some alphabets, is taken once.
    """
    found: dict[tuple[str, ...], bytes] = {}
    for place, content in _files_of(path):
        if len(place.parts) < 3:
            raise InvalidInputError(
                f"{path}: {place} is not in a folder of a character in a folder of an "
                "alphabet. The layout is alphabet/character/*.png."
            )
        key = place.parts[-3:]
        if found.setdefault(key, content) != content:
            raise InvalidInputError(
                f"{path} holds two different images {'/'.join(key)}. Keep one."
            )
    if not found:
        raise InvalidInputError(f"{path} holds no alphabet/character/*.png.")
    keys = sorted(found)
    images, size = [], 0
    for key in keys:
        images.append(_decode(path, "/".join(key), found[key], size))
        size += images[-1].nbytes
    for key, image in zip(keys, images, strict=True):
        if image.shape != images[0].shape:
            raise InvalidInputError(
                f"{path}: {'/'.join(key)} has shape {image.shape}, but "
                f"{'/'.join(keys[0])} has {images[0].shape}. All must agree."
            )
    label = np.asarray([f"{alphabet}/{character}" for alphabet, character, _ in keys])
    columns = {"alphabet": np.asarray([alphabet for alphabet, _, _ in keys])}
    name = path.stem if path.is_file() else path.resolve().name
    return assemble(name, Part(np.stack(images), label, columns))


def _files_of(path: Path) -> Iterator[tuple[PurePath, bytes]]:
    archives = [path] if path.is_file() else sorted(path.glob("*.zip"))
    for archive in archives:
        with reading(archive, "a zip file"), zipfile.ZipFile(archive) as file:
            check_archive(archive, file)
            for name in file.namelist():
                # Archives made on a Mac hold a shadow of every file.
                if name.endswith(".png") and not name.startswith("__MACOSX/"):
                    yield PurePath(name), file.read(name)
    if not archives:
        size = 0
        for image in sorted(path.rglob("*.png")):
            with reading(image, "PNG"):
                check_ordinary(image)
                size += image.stat().st_size
                check_size(path, size, "all its images")
                content = image.read_bytes()
            yield image.relative_to(path), content


def _decode(path: Path, name: str, content: bytes, before: int) -> np.ndarray:
    """Return the pixels of an image; `before` are the bytes of those before it."""
    try:
        from PIL import Image
    except ImportError:
        raise FedbilevelError(
            "images are decoded by Pillow: install fedbilevel[data]."
        ) from None
    with reading(path / name, "PNG"), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        # No other kind: Pillow hands some of them to programs.
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            mode = "L" if image.mode in ("1", "L") else "RGB"
            size = math.prod(image.size) * len(mode)
            check_size(path, before + size, f"{name} and the images before it")
            return np.asarray(image.convert(mode))


def shrink(images: np.ndarray, size: int) -> np.ndarray:
    """Return images of `size` times `size` pixels, each the mean of the area it covers.

    `images` is (rows, height, width) or (rows, height, width, channels). The type is
    kept: whole numbers are rounded.
    """
    if images.ndim not in (3, 4) or not 1 <= size <= min(images.shape[1:3]):
        raise InvalidInputError(
            f"images of shape {images.shape} cannot be shrunk to {size}x{size}. Give "
            "(rows, height, width) and a size between 1 and the smaller side."
        )
    height, width = (_coverage(side, size) for side in images.shape[1:3])
    small = np.empty((len(images), size, size, *images.shape[3:]), images.dtype)
    for start in range(0, len(images), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        block = np.asarray(images[rows], height.dtype)
        mean = np.einsum("ah,nh...->na...", height, block, optimize=True)
        mean = np.einsum("bw,naw...->nab...", width, mean, optimize=True)
        small[rows] = np.rint(mean) if images.dtype.kind in "ui" else mean
    return small


def _coverage(side: int, size: int) -> np.ndarray:
    """Return the share that each old pixel has in each new one."""
    edges = np.arange(size + 1) * (side / size)
    start = np.maximum(edges[:-1, None], np.arange(side))
    end = np.minimum(edges[1:, None], np.arange(1, side + 1))
    return np.maximum(end - start, 0) * (size / side)
