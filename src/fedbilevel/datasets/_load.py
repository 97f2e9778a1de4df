"""Finds the loader for a name or a path."""

import os
from pathlib import Path

from fedbilevel.datasets._base import Dataset
from fedbilevel.datasets.arrays import load_folder, load_npz
from fedbilevel.datasets.hubs import HUBS
from fedbilevel.datasets.idx import holds_idx, load_idx
from fedbilevel.datasets.images import load_images
from fedbilevel.datasets.libsvm import companion, load_libsvm
from fedbilevel.datasets.named import NAMED
from fedbilevel.datasets.tables import load_csv
from fedbilevel.errors import InvalidInputError, unknown_name

__all__ = ["LAYOUTS", "load", "names"]

LAYOUTS = (
    "a file: .npz (features, label), .csv, .zip of images, LIBSVM text; .gz too",
    "a folder: features.npy with label.npy (memory-mapped)",
    "a folder: train-images-idx3-ubyte[.gz] with its labels",
    "a folder: alphabet/character/*.png, or zip files of that",
    "a folder: one LIBSVM file NAME with NAME.t",
)


def names() -> list[str]:
    """List what `load` knows by name."""
    return sorted([*NAMED, *(f"{hub}:NAME" for hub in HUBS)])


def load(source: str, *, cache: Path | None = None) -> Dataset:
    """Load a data set by name, or from the path of a file or folder.

    A known name goes before a path; write ./digits for a folder called digits. `cache`
    is where named sets are looked for and kept: $FEDBILEVEL_DATA if not given, else
    ~/.cache/fedbilevel.
    """
    folder = _default_cache() if cache is None else Path(cache)
    hub, _, name = source.partition(":")
    if name and hub in HUBS:
        return HUBS[hub](name, folder)
    if source in NAMED:
        return NAMED[source](folder)
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        return _load_file(path)
    if path.exists():
        raise InvalidInputError(
            f"{path} is neither a file nor a folder. Give a copy of what it yields."
        )
    if os.sep in source or path.suffix:
        raise InvalidInputError(f"there is no file or folder {path}. Check the path.")
    raise unknown_name("data set", source, names())


def _default_cache() -> Path:
    chosen = os.environ.get("FEDBILEVEL_DATA")
    return Path(chosen) if chosen else Path.home() / ".cache" / "fedbilevel"


def _load_file(path: Path) -> Dataset:
    loaders = {".npz": load_npz, ".zip": load_images, ".csv": load_csv}
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    # LIBSVM's own files have names such as a9a, w8a.t and covtype.binary.scale.
    return loaders.get(suffix, load_libsvm)(path)


def _load_folder(path: Path) -> Dataset:
    if (path / "features.npy").is_file():
        return load_folder(path)
    if holds_idx(path):
        return load_idx(path)
    if any(path.glob("*.zip")) or any(path.glob("*/*/*.png")):
        return load_images(path)
    pairs = [file for file in sorted(path.iterdir()) if companion(file)]
    if len(pairs) == 1:
        return load_libsvm(pairs[0])
    raise InvalidInputError(
        f"{path} is a folder of no known layout. Known: {'; '.join(LAYOUTS)}."
    )
