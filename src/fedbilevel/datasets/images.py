"""Folders and zip files of images: classes, sites above them, or Omniglot's."""

import io
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np

from fedbilevel.datasets._base import Dataset, Part, assemble
from fedbilevel.datasets._files import check_ordinary, check_size, reading, unpacking
from fedbilevel.errors import InvalidInputError, needed

IN_SITES = "site/class/image"
_AT_ONCE = 1024
_KINDS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
_CHARACTER = re.compile(r"character\d+")


def holds_images(path: Path) -> bool:
    """Say whether a folder holds images in folders, or zip files."""
    within = (path.glob(f"{depth}/*") for depth in ("*", "*/*"))
    return any(path.glob("*.zip")) or any(
        one.suffix.lower() in _KINDS for files in within for one in files
    )


def load_images(path: Path) -> Dataset:
    """Load class/*.png or site/class/*.png, from a folder or from zip files.

    JPEG is read, too. Two folders above the images are site and class, which become the
    column `site` and the label; with one there is a class alone. Omniglot's folders,
    alphabet/character01, are known by their names: there the label is both together,
    and the column is `alphabet`. An image that is in two zip files, as some drawings of
    Omniglot are, is taken once.
    """
    found, above = _found(path)
    keys, images = list(found), _decoded(path, found)
    deep = len(keys[0]) == 3
    if deep and all(_CHARACTER.fullmatch(key[1]) for key in keys):
        label = [f"{alphabet}/{character}" for alphabet, character, _ in keys]
        columns = {"alphabet": np.asarray([key[0] for key in keys])}
        layout = "alphabet/character/image"
    else:
        if len(above) > 1:
            two = " and ".join("/".join(one) or "." for one in sorted(above)[:2])
            raise InvalidInputError(
                f"{path} holds images in {two}, three folders deep. Give one of them: "
                "its folders must be classes, or sites with classes in them."
            )
        label = [key[-2] for key in keys]
        columns = {"site": np.asarray([key[0] for key in keys])} if deep else {}
        layout = IN_SITES if deep else "class/image"
    name = path.stem if path.is_file() else path.resolve().name
    dataset = assemble(name, Part(images, np.asarray(label), columns))
    files = np.asarray(["/".join(key) for key in keys])
    return replace(dataset, files=files, notes={"layout": layout})


def _found(path: Path) -> tuple[dict[tuple[str, ...], bytes], set[tuple[str, ...]]]:
    """Return images by their last folders and name, and what folders are above."""
    found: dict[tuple[str, ...], bytes] = {}
    above = set()
    for place, content in _files_of(path):
        if len(place.parts) < 2:
            raise InvalidInputError(
                f"{path}: {place} is not in a folder of a class. The layout is "
                "class/*.png, or site/class/*.png."
            )
        key = place.parts[-3:]
        above.add(place.parts[:-3])
        if found.setdefault(key, content) != content:
            raise InvalidInputError(
                f"{path} holds two different images {'/'.join(key)}. Keep one."
            )
    if not found:
        raise InvalidInputError(
            f"{path} holds no class/*.png and no alphabet/character/*.png."
        )
    depths = {len(key): key for key in found}
    if len(depths) > 1:
        two = " and ".join("/".join(key) for key in depths.values())
        raise InvalidInputError(
            f"{path} holds images in folders of different depth: {two}. Use "
            "class/*.png or site/class/*.png for all."
        )
    return dict(sorted(found.items())), above


def _decoded(path: Path, found: dict[tuple[str, ...], bytes]) -> np.ndarray:
    """Return the pixels of images, which must have one shape."""
    sentence = "images are decoded by Pillow: install fedbilevel[data]."
    library = needed("PIL.Image", sentence)
    images, size = [], 0
    for key, content in found.items():
        name, kind = "/".join(key), _KINDS[PurePath(key[-1]).suffix.lower()]
        with reading(path / name, kind), warnings.catch_warnings():
            warnings.simplefilter("error", library.DecompressionBombWarning)
            # No other kind: Pillow hands some of them to programs.
            with library.open(io.BytesIO(content), formats=[kind]) as image:
                mode = "L" if image.mode in ("1", "L") else "RGB"
                size += math.prod(image.size) * len(mode)
                check_size(path, size, f"{name} and the images before it")
                images.append(np.asarray(image.convert(mode)))
    for key, image in zip(found, images, strict=True):
        if image.shape != images[0].shape:
            raise InvalidInputError(
                f"{path}: {'/'.join(key)} has shape {image.shape}, but "
                f"{'/'.join(next(iter(found)))} has {images[0].shape}. All must agree."
            )
    return np.stack(images)


def _files_of(path: Path) -> Iterator[tuple[PurePath, bytes]]:
    archives = [path] if path.is_file() else sorted(path.glob("*.zip"))
    for archive in archives:
        with reading(archive, "a zip file"), unpacking(archive) as file:
            for name in file.namelist():
                # Archives made on a Mac hold a shadow of every file.
                known = PurePath(name).suffix.lower() in _KINDS
                if known and not name.startswith("__MACOSX/"):
                    yield PurePath(name), file.read(name)
    if not archives:
        size = 0
        for image in sorted(path.rglob("*")):
            if image.suffix.lower() not in _KINDS:
                continue
            with reading(image, "an image"):
                check_ordinary(image)
                size += image.stat().st_size
                check_size(path, size, "all its images")
                content = image.read_bytes()
            yield image.relative_to(path), content


def shrink(images: np.ndarray, height: int, width: int | None = None) -> np.ndarray:
    """Return images of so many pixels, each the mean of the area it covers.

    Without a `width` they are square. `images` is (rows, height, width) or (rows,
    height, width, channels). The type is kept: whole numbers are rounded.
    """
    sizes = (height, height if width is None else width)
    fit = zip(sizes, images.shape[1:3], strict=False)
    if images.ndim not in (3, 4) or not all(1 <= size <= side for size, side in fit):
        raise InvalidInputError(
            f"images of shape {images.shape} cannot be shrunk to "
            f"{sizes[0]}x{sizes[1]}. Give (rows, height, width) and sizes between 1 "
            "and those of the images."
        )
    down, across = map(coverage, images.shape[1:3], sizes)
    small = np.empty((len(images), *sizes, *images.shape[3:]), images.dtype)
    for start in range(0, len(images), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        block = np.asarray(images[rows], down.dtype)
        mean = np.einsum("ah,nh...->na...", down, block, optimize=True)
        mean = np.einsum("bw,naw...->nab...", across, mean, optimize=True)
        small[rows] = np.rint(mean) if images.dtype.kind in "ui" else mean
    return small


def coverage(side: int, size: int) -> np.ndarray:
    """Return the share that each of `side` old pixels has in each new one."""
    edges = np.arange(size + 1) * (side / size)
    start = np.maximum(edges[:-1, None], np.arange(side))
    end = np.minimum(edges[1:, None], np.arange(1, side + 1))
    return np.maximum(end - start, 0) * (size / side)
