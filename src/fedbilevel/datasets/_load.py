"""Finds the loader for a name or a path."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from fedbilevel.datasets._base import Dataset
from fedbilevel.datasets.arrays import holds_idx, load_folder, load_idx, load_npz
from fedbilevel.datasets.encoding import TableChoices, encode_table
from fedbilevel.datasets.images import holds_images, load_images
from fedbilevel.datasets.libsvm import companion, load_libsvm
from fedbilevel.datasets.named import HUBS, NAMED
from fedbilevel.datasets.tables import READERS, kind_of, read_table, table_of_frame
from fedbilevel.errors import InvalidInputError, unknown_name

LAYOUTS = (
    "a table: .csv or .tsv (.gz), .parquet, .xlsx",
    "a file: .npz (features, label), .zip of images, LIBSVM text (.gz)",
    "a folder: features.npy with label.npy (memory-mapped)",
    "a folder: train-images-idx3-ubyte[.gz] with its labels",
    "a folder: class/*.png or *.jpg, or site/class/*.png, or zip files of that",
    "a folder: alphabet/character01/*.png, as Omniglot, or zip files of that",
    "a folder: one LIBSVM file NAME with NAME.t",
)


def names() -> list[str]:
    """List what `load` knows by name."""
    return sorted([*NAMED, *(f"{hub}:NAME" for hub in HUBS)])


def is_named(source: str) -> bool:
    """Say whether `load` knows a source by name, so that it is not the user's own."""
    return source in NAMED or source.partition(":")[0] in HUBS


def from_frame(frame: Any, **choices: str) -> Dataset:
    """Make a data set of a frame of pandas or polars.

    `choices` say which column is what, by the names of `TableChoices`: label, site,
    group, ignore, missing, label_kind, preparation, decimal.
    """
    return encode_table(table_of_frame(frame), TableChoices(**choices))


def load(
    source: str, *, cache: Path | None = None, choices: TableChoices | None = None
) -> Dataset:
    """Load a data set by name, or from the path of a file or folder.

    Of a table, `choices` say which column is what.

    A known name goes before a path; write ./digits for a folder called digits. `cache`
    is where named sets are looked for and kept: $FEDBILEVEL_DATA if not given, else
    ~/.cache/fedbilevel.
    """
    chosen = choices or TableChoices()
    path = Path(source).expanduser()
    if not is_named(source) and kind_of(path) in READERS and path.is_file():
        return encode_table(read_table(path, chosen), chosen)
    kept = cache or os.environ.get("FEDBILEVEL_DATA") or "~/.cache/fedbilevel"
    dataset = _load(source, path, Path(kept).expanduser())
    chosen.check_unused(dataset.name)
    return dataclasses.replace(dataset, source=source)


def _load(source: str, path: Path, folder: Path) -> Dataset:
    hub, _, name = source.partition(":")
    if name and hub in HUBS:
        return HUBS[hub](name, folder)
    if source in NAMED:
        return NAMED[source](folder)
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        loaders = {".npz": load_npz, ".zip": load_images}
        # LIBSVM's own files have names such as a9a, w8a.t and covtype.binary.scale.
        return loaders.get(kind_of(path), load_libsvm)(path)
    if path.exists():
        raise InvalidInputError(
            f"{path} is neither a file nor a folder. Give a copy of what it yields."
        )
    if os.sep in source or path.suffix:
        raise InvalidInputError(f"there is no file or folder {path}. Check the path.")
    raise unknown_name("data set", source, names())


def _load_folder(path: Path) -> Dataset:
    if (path / "features.npy").is_file():
        return load_folder(path)
    if holds_idx(path):
        return load_idx(path)
    if holds_images(path):
        return load_images(path)
    pairs = [file for file in sorted(path.iterdir()) if companion(file)]
    if len(pairs) == 1:
        return load_libsvm(pairs[0])
    raise InvalidInputError(
        f"{path} is a folder of no known layout. Known: {'; '.join(LAYOUTS)}."
    )
