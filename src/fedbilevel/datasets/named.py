"""Data sets by name, bundled, cached, fetched or of a hub, and by the path of files."""

import dataclasses
import gzip
import http.client
import importlib.util
import io
import math
import os
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import write_atomically
from fedbilevel.datasets import _files, arrays
from fedbilevel.datasets._base import Dataset, Part, assemble, rename_classes
from fedbilevel.datasets.encoding import TableChoices, encode_table
from fedbilevel.datasets.images import holds_images, load_images
from fedbilevel.datasets.tables import READERS, kind_of, read_table, table_of_frame
from fedbilevel.errors import FedbilevelError, InvalidInputError, needed, unknown_name

LAYOUTS = (
    "a table: .csv or .tsv (.gz), .parquet, .xlsx",
    "a file: .npz (features, label), .zip of images, LIBSVM text (.gz)",
    "a folder: features.npy with label.npy (memory-mapped)",
    "a folder: train-images-idx3-ubyte[.gz] with its labels",
    "a folder: class/*.png or *.jpg, or site/class/*.png, or zip files of that",
    "a folder: alphabet/character01/*.png, as Omniglot, or zip files of that",
    "a folder: one LIBSVM file NAME with NAME.t",
)
_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_A9A_PAGE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_A9A_WIDTH = 123  # one row alone has the last feature, and some copies lack that row
_PATIENCE = 60.0  # seconds without a byte


def _bundled(name: str, file: str, cache: Path) -> Dataset:
    del cache  # scikit-learn brings the files along
    # To import scikit-learn takes 2 s, to read its table a hundredth of that.
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise FedbilevelError(
            f"{name} comes with scikit-learn: install fedbilevel[data]."
        )
    path = Path(found.origin).parent / "datasets" / "data" / file
    if not path.is_file():
        raise FedbilevelError(
            f"{name} is not where scikit-learn 1 keeps it, in {path}: install "
            "fedbilevel[data] anew."
        )
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        table = [line.rstrip().split(",") for line in lines]
    # All but the digits begin with the numbers of rows and columns, and the names.
    names = table.pop(0)[2:] if path.suffix == ".csv" else list("0123456789")
    values = np.asarray(table, float)
    dataset = assemble(name, Part(values[:, :-1], values[:, -1].astype(int)))
    return rename_classes(dataset, names)


def _fashion_mnist(cache: Path) -> Dataset:
    own = cache / "fashion-mnist"
    for folder in (own, _DEBIAN_FASHION):
        if arrays.holds_idx(folder):
            return rename_classes(arrays.load_idx(folder), _FASHION)
    raise FedbilevelError(
        f"Fashion-MNIST is neither in {own} nor in {_DEBIAN_FASHION}. Debian's package "
        "dataset-fashion-mnist ships it (apt-get install dataset-fashion-mnist). Or "
        "pass the folder that has train-images-idx3-ubyte.gz with --data FOLDER."
    )


def _mnist(cache: Path) -> Dataset:
    folder = cache / "mnist"
    if arrays.holds_idx(folder):
        return arrays.load_idx(folder)
    raise FedbilevelError(
        f"MNIST is not in {folder}. Put its four IDX files there, or pass the folder "
        "that has train-images-idx3-ubyte.gz with --data FOLDER."
    )


def _a9a(cache: Path) -> Dataset:
    train, _ = (_cached_or_fetched(cache, name) for name in ("a9a", "a9a.t"))
    return arrays.load_libsvm(train, _A9A_WIDTH)


def _cached_or_fetched(cache: Path, name: str) -> Path:
    target, address = cache / name, _A9A_PAGE + name
    if kept := _files.plain_or_packed(target):
        return kept
    try:
        with urllib.request.urlopen(address, timeout=_PATIENCE) as reply:
            content = reply.read(_files.largest())
        # A portal's login page is not kept as if it were data.
        arrays.read_sparse(io.BytesIO(content), target)
        write_atomically(target, content)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise FedbilevelError(
            f"{name} is not in {cache} and could not be fetched from {address}: "
            f"{error}. Put {name} or {name}.gz into that folder by hand."
        ) from error
    return target


NAMED: Mapping[str, Callable[[Path], Dataset]] = {
    "a9a": _a9a,
    "fashion-mnist": _fashion_mnist,
    "mnist": _mnist,
    "breast_cancer": partial(_bundled, "breast_cancer", "breast_cancer.csv"),
    "digits": partial(_bundled, "digits", "digits.csv.gz"),
    "iris": partial(_bundled, "iris", "iris.csv"),
    "wine": partial(_bundled, "wine", "wine_data.csv"),
}


def _openml(name: str, cache: Path) -> Dataset:
    sentence = "OpenML is read by scikit-learn: install fedbilevel[data]."
    library = needed("sklearn.datasets", sentence)
    try:
        # This parser needs no pandas.
        bunch = library.fetch_openml(
            name, data_home=str(cache), as_frame=False, parser="liac-arff"
        )
    except (OSError, ValueError) as error:
        raise _unreachable("OpenML", name, cache, error) from error
    if bunch.target is None:
        raise InvalidInputError(
            f"openml:{name} names no column as its label. Save it as CSV with a "
            "column 'label' and pass the file."
        )
    features = bunch.data
    if hasattr(features, "toarray"):
        size = math.prod(features.shape) * features.dtype.itemsize
        _files.check_size(f"openml:{name}", size, "not sparse any more")
        features = features.toarray()
    return assemble(name, Part(np.asarray(features), np.asarray(bunch.target)))


def _hugging_face(name: str, cache: Path) -> Dataset:
    sentence = "Hugging Face data sets are read by their library: pip install datasets."
    library = needed("datasets", sentence)
    try:
        splits = library.load_dataset(name, cache_dir=str(cache / "huggingface"))
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable("Hugging Face", name, cache, error) from error
    if "train" not in splits:
        raise InvalidInputError(
            f"huggingface:{name} has no part 'train', only {', '.join(splits)}."
        )
    train = splits["train"]
    names = list(train.column_names)
    chosen = "label" if "label" in names else names[-1]
    test = _split(name, splits["test"], chosen) if "test" in splits else None
    dataset = assemble(name, _split(name, train, chosen), test)
    classes = getattr(train.features[chosen], "names", None)
    return rename_classes(dataset, classes) if classes else dataset


def _split(name: str, split: Any, label: str) -> Part:
    """Take arrays per sample (an image) as features, else the columns of numbers."""
    columns = {}
    for column in split.column_names:
        try:
            columns[column] = np.stack([np.asarray(value) for value in split[column]])
        except ValueError as error:
            raise InvalidInputError(
                f"huggingface:{name}: the values of column '{column}' differ in shape "
                f"({error}). Give the data as arrays with "
                "fedbilevel.datasets.from_arrays."
            ) from error
    labels = columns.pop(label)
    numbers = {c: array for c, array in columns.items() if array.dtype.kind in "buif"}
    wide = [column for column, array in numbers.items() if array.ndim > 1]
    if len(wide) > 1 or not numbers:
        raise InvalidInputError(
            f"huggingface:{name} has {len(wide)} columns of arrays and {len(numbers)} "
            f"of numbers in all besides '{label}'. Give it as arrays with "
            "fedbilevel.datasets.from_arrays."
        )
    used = wide or list(numbers)
    features = [columns.pop(column) for column in used]
    return Part(features[0] if wide else np.stack(features, axis=1), labels, columns)


def _unreachable(hub: str, name: str, cache: Path, error: Exception) -> FedbilevelError:
    return FedbilevelError(
        f"'{name}' could not be fetched from {hub}: {error}. Check the name and the "
        f"network. Files fetched before are kept in {cache}."
    )


HUBS: Mapping[str, Callable[[str, Path], Dataset]] = {
    "huggingface": _hugging_face,
    "openml": _openml,
}


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
        loaders = {".npz": arrays.load_npz, ".zip": load_images}
        # LIBSVM's own files have names such as a9a, w8a.t and covtype.binary.scale.
        return loaders.get(kind_of(path), arrays.load_libsvm)(path)
    if path.exists():
        raise InvalidInputError(
            f"{path} is neither a file nor a folder. Give a copy of what it yields."
        )
    if os.sep in source or path.suffix:
        raise InvalidInputError(f"there is no file or folder {path}. Check the path.")
    raise unknown_name("data set", source, names())


def _load_folder(path: Path) -> Dataset:
    if (path / "features.npy").is_file():
        return arrays.load_folder(path)
    if arrays.holds_idx(path):
        return arrays.load_idx(path)
    if holds_images(path):
        return load_images(path)
    pairs = [file for file in sorted(path.iterdir()) if arrays.companion(file)]
    if len(pairs) == 1:
        return arrays.load_libsvm(pairs[0])
    raise InvalidInputError(
        f"{path} is a folder of no known layout. Known: {'; '.join(LAYOUTS)}."
    )
