"""Every format is written, read back and damaged; nothing here needs a network."""

import contextlib
import gzip
import io
import os
import re
import struct
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedbilevel import datasets
from fedbilevel.datasets import Dataset, named
from fedbilevel.datasets.arrays import from_arrays
from fedbilevel.errors import FedbilevelError, InvalidInputError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 4, 5), dtype=np.uint8)
LABEL = np.asarray([3, 1, 3, 2, 1, 2], np.uint8)
CODES = [2, 0, 2, 1, 0, 1]
REAL = Path(os.environ.get("FEDBILEVEL_DATA") or Path.home() / ".cache/fedbilevel")


def load(source: object, **options) -> Dataset:
    return datasets.load(str(source), **options)


def official(dataset: Dataset) -> Dataset:
    assert dataset.test is not None
    return dataset.test


def fails(message: str, kind: type[Exception] = InvalidInputError):
    return pytest.raises(kind, match=message)


# Labels


@pytest.mark.parametrize(
    ("label", "classes", "codes"),
    [
        ([7, 5, 7], ("5", "7"), [1, 0, 1]),
        ([1.0, -1.0, 1.0], ("-1", "+1"), [1, 0, 1]),
        (["10", "9", "10"], ("9", "10"), [1, 0, 1]),
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        ([b"b", b"a", b"b"], ("a", "b"), [1, 0, 1]),
        ([True, False, True], ("False", "True"), [1, 0, 1]),
        (np.asarray(["b", "a", "b"], object), ("a", "b"), [1, 0, 1]),
    ],
)
def test_labels_of_any_kind_are_coded_from_zero(label, classes, codes):
    dataset = from_arrays(np.ones((3, 2)), label)
    assert dataset.classes == classes
    assert dataset.label.dtype == np.int32
    np.testing.assert_array_equal(dataset.label, codes)


@pytest.mark.parametrize(
    ("features", "label", "columns", "message"),
    [
        (np.ones((3, 2)), [0.5, 1, 1], {}, "row 0 is 0.5. Labels are classes"),
        (np.ones((3, 2)), [0, np.nan, np.inf], {}, "row 1 is nan"),
        (np.ones((3, 2)), ["a", None, "b"], {}, "row 1 is None"),
        (np.ones((3, 2)), [[0], [1], [0]], {}, r"shape \(3, 1\). Give one class"),
        (np.ones((3, 2)), [1j, 1, 1], {}, "type complex"),
        (np.ones((3, 2)), [0, 1], {}, r"'features' has shape \(3, 2\), .* 2 labels"),
        (np.ones(3), [0, 1, 0], {}, "at least one column"),
        (np.ones((3, 0)), [0, 1, 0], {}, "at least one column"),
        ([["a"], ["b"]], [0, 1], {}, "Give numbers"),
        (np.ones((0, 2)), [], {}, "no samples"),
        (np.ones((2, 2)), [0, 1], {"site": ["a"]}, "'site' has shape"),
        (np.ones((2, 2)), [0, 1], {"site": "a"}, "'site' has shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(features, label, columns, message):
    with fails(message):
        from_arrays(features, label, **columns)


def test_arrays_keep_type_columns_and_map(tmp_path):
    np.save(tmp_path / "a.npy", IMAGES)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    dataset = from_arrays(mapped, LABEL, site=list("aabbcc"))
    assert isinstance(dataset.features, np.memmap)
    assert dataset.features.dtype == np.uint8
    assert list(dataset.columns["site"]) == list("aabbcc")
    assert dataset.test is None


class Torchlike:
    """What from_torch needs of a map-style data set."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


def test_torch_data_sets_are_read_item_by_item():
    pairs = Torchlike(list(zip(IMAGES, LABEL, strict=True)))
    dataset = datasets.from_torch(pairs)
    np.testing.assert_array_equal(dataset.features, IMAGES)
    np.testing.assert_array_equal(dataset.label, CODES)
    assert dataset.name == "Torchlike"
    tensors = Torchlike([(np.float32(2), np.asarray([1])), (np.float32(3), [0])])
    assert datasets.from_torch(tensors).features.shape == (2, 1)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no samples"),
        ([{"image": 1}], "item 0 is a dict. Items must be pairs"),
        ([(np.ones(2), 0), (np.ones(3), 0)], "item 1 has features of shape"),
    ],
)
def test_torch_data_sets_of_other_shapes_are_refused(items, message):
    with fails(message):
        datasets.from_torch(Torchlike(items))


# npz and npy


def test_npz(tmp_path):
    path = tmp_path / "small.npz"
    test = {"test_features": IMAGES[:2], "test_label": LABEL[:2], "test_site": [7, 8]}
    np.savez(path, features=IMAGES, label=LABEL, site=list("aabbcc"), **test)
    dataset = load(path)
    assert dataset.name == "small"
    assert dataset.features.dtype == np.uint8
    np.testing.assert_array_equal(dataset.features, IMAGES)
    np.testing.assert_array_equal(dataset.label, CODES)
    assert list(dataset.columns["site"]) == list("aabbcc")
    assert official(dataset).classes == dataset.classes == ("1", "2", "3")
    np.testing.assert_array_equal(official(dataset).label, CODES[:2])
    assert list(official(dataset).columns["site"]) == [7, 8]


def test_a_class_that_only_the_test_part_has_is_known_to_both(tmp_path):
    test = {"test_features": np.ones((1, 1)), "test_label": ["b"]}
    np.savez(tmp_path / "d.npz", features=np.ones((2, 1)), label=["a", "c"], **test)
    dataset = load(tmp_path / "d.npz")
    assert dataset.classes == ("a", "b", "c")
    assert list(dataset.label) == [0, 2]
    assert list(official(dataset).label) == [1]


def test_folders_of_arrays_are_mapped(tmp_path):
    folder = tmp_path / "mapped"
    folder.mkdir()
    arrays = {"features": IMAGES, "label": LABEL, "site": np.arange(6)}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        np.save(folder / f"test_{name}.npy", array[:2])
    dataset = load(folder)
    assert dataset.name == "mapped"
    for part, rows in ((dataset, 6), (official(dataset), 2)):
        assert isinstance(part.features, np.memmap)
        np.testing.assert_array_equal(part.features, IMAGES[:rows])
        np.testing.assert_array_equal(part.label, CODES[:rows])
        assert list(part.columns["site"]) == list(range(rows))


def test_damaged_arrays_are_named(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, features=IMAGES, label=LABEL)
    whole = path.read_bytes()
    for content in (whole[:-40], b"garbage", b""):
        path.write_bytes(content)
        with fails("d.npz cannot be read as npz"):
            load(path)
    np.savez(path, features=IMAGES, target=LABEL)
    with fails("no array 'label', and holds features, target"):
        load(path)
    np.savez(path, features=IMAGES, label=LABEL, test_features=IMAGES)
    with fails("no array 'test_label'"):
        load(path)
    objects = np.asarray([{}] * 6, object)
    np.savez(path, features=IMAGES, label=objects)
    with fails("cannot be read as npz: Object arrays cannot be loaded"):
        load(path)
    np.save(tmp_path / "label.npy", LABEL)
    np.save(tmp_path / "features.npy", IMAGES)
    mapped = tmp_path / "features.npy"
    mapped.write_bytes(mapped.read_bytes()[:-1])
    with fails("features.npy cannot be read as npy"):
        load(tmp_path)


# CSV


CSV = "age,name,site,label\n1,x,10,b\n2.5,y,9,a\n\n-3e1,z,10,b\n"


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_csv(tmp_path, name):
    content = ("\ufeff" + CSV).encode()
    packed = gzip.compress(content) if name.endswith("gz") else content
    (tmp_path / name).write_bytes(packed)
    dataset = load(tmp_path / name)
    assert dataset.name == "t"
    expected = [[1, 1, 0, 0], [2.5, 0, 1, 0], [-30, 0, 0, 1]]
    np.testing.assert_array_equal(dataset.features, expected)
    assert dataset.classes == ("a", "b")
    assert list(dataset.label) == [1, 0, 1]
    assert list(dataset.columns["name"]) == ["x", "y", "z"]
    assert list(dataset.columns["site"]) == [10, 9, 10]


def test_the_last_column_is_the_label_by_default(tmp_path):
    (tmp_path / "t.csv").write_text('a,"b, c",kind\r\n1,2,0\r\n3,4,1\r\n')
    dataset = load(tmp_path / "t.csv")
    np.testing.assert_array_equal(dataset.features, [[1, 2], [3, 4]])
    assert dataset.classes == ("0", "1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,label\n1,0\n2,1\nx,0\n", "line 4, column 'a': 'x' is not a finite number"),
        ("a,label\n1,0\n\n2,0\nnan,0\n", "line 5, column 'a': the number is missing"),
        ("a,label\n1,0\n2,0\n,1\n", "line 4, column 'a': the number is missing"),
        (
            'a,t,label\n1,"x\ny",0\n,z,1\n2,w,1\n',
            "line 4, column 'a': the number is missing",
        ),
        ("a,label\n1,0\n2\n", "line 3: 1 values, but the header names 2"),
        ("a,label\n1,\n", "line 2, column 'label': the label is missing"),
        ("a,a\n1,0\n", "two columns are named 'a'"),
        ("1,2\n3,4\n", "line 1: expected the names"),
        ("", "line 1: expected the names"),
        ("a,b\n", "no rows"),
        ("site,b\nx,0\n", "no column besides the label 'b' holds numbers"),
    ],
)
def test_bad_csv_is_located(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with fails(message):
        load(tmp_path / "t.csv")


def test_csv_that_is_no_text(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\xff\xfea,b\n1")
    with fails("t.csv cannot be read as CSV"):
        load(tmp_path / "t.csv")


# LIBSVM


TRAIN = "-1 1:1 3:0.5\n+1 2:2 # a remark\n\n-1\n"
TEST = "+1 1:1 5:4\n"


def write_libsvm(folder: Path, packed: bool) -> Path:
    for name, text in (("toy", TRAIN), ("toy.t", TEST)):
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / name).write_text(text)
    return folder / ("toy.gz" if packed else "toy")


@pytest.mark.parametrize("packed", [False, True])
def test_libsvm_with_its_test_part(tmp_path, packed):
    path = write_libsvm(tmp_path, packed)
    for source in (path, tmp_path):
        dataset = load(source)
        dense = [[1, 0, 0.5, 0, 0], [0, 2, 0, 0, 0], [0, 0, 0, 0, 0]]
        np.testing.assert_array_equal(dataset.features, dense)
        assert dataset.features.dtype == np.float32
        assert dataset.name == "toy"
        assert dataset.classes == ("-1", "+1")
        assert list(dataset.label) == [0, 1, 0]
        np.testing.assert_array_equal(official(dataset).features, [[1, 0, 0, 0, 4]])
        assert list(official(dataset).label) == [1]


def test_libsvm_alone_as_scikit_learn_writes_it(tmp_path):
    from sklearn.datasets import dump_svmlight_file

    path = tmp_path / "random"
    features = RNG.normal(size=(20, 7)) * (RNG.random((20, 7)) < 0.5)
    label = RNG.integers(0, 3, 20)
    dump_svmlight_file(features, label, str(path), zero_based=False)
    dataset = load(path)
    np.testing.assert_array_equal(dataset.features, features.astype(np.float32))
    np.testing.assert_array_equal(dataset.label, label)
    assert dataset.test is None


def test_libsvm_as_other_programs_write_it(tmp_path):
    text = "\ufeff1\t1:nan 2:1e39\r\n# 3:3\r\n 0 2:-2.5e-1 # 3:3"
    (tmp_path / "toy").write_bytes(text.encode())
    dataset = load(tmp_path / "toy")
    np.testing.assert_array_equal(dataset.features, [[np.nan, np.inf], [0, -0.25]])
    assert list(dataset.label) == [1, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1 1:1\n1 2:x\n", "line 2: '1 2:x' is not LIBSVM text"),
        (b"1 1:1\n1 0:2\n", "line 2: .*indices ascend from 1"),
        (b"1 1:1\n\n#\n1 2:1 1:1\n", "line 4: '1 2:1 1:1' is not LIBSVM text"),
        (b"1 1:1\n1 9999999999:2\n", "line 2: .*too large"),
        (b"1 1:1\n1 qid:3 1:2\n", "line 2: .*query numbers"),
        (b"<!DOCTYPE html>", "line 1: .*known by their names"),
        (b"", "bad has no LIBSVM features"),
        (b"# 1:1\n1\n", "bad has no LIBSVM features"),
        (b"\x89\xff\x00", "bad, line 1: .* is not LIBSVM text"),
        (b"0.5 1:1\n", "Labels are classes"),
    ],
)
def test_bad_libsvm_is_located(tmp_path, content, message):
    (tmp_path / "bad").write_bytes(content)
    with fails(message):
        load(tmp_path / "bad")


def test_truncated_gzip_is_named(tmp_path):
    path = write_libsvm(tmp_path, packed=True)
    path.write_bytes(path.read_bytes()[:-9])
    with fails("toy.gz cannot be read as LIBSVM text"):
        load(path)


# IDX


def idx(array: np.ndarray) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def write_idx(folder: Path, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, rows in (("train", 6), ("t10k", 2)):
        for name, array in (("images-idx3", IMAGES), ("labels-idx1", LABEL)):
            content = idx(array[:rows])
            path = folder / f"{kind}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_idx(tmp_path, packed):
    dataset = load(write_idx(tmp_path / "digits", packed))
    assert dataset.name == "digits"
    for part, rows in ((dataset, 6), (official(dataset), 2)):
        assert isinstance(part.features, np.memmap) is not packed
        assert part.features.dtype == np.uint8
        np.testing.assert_array_equal(part.features, IMAGES[:rows])
        np.testing.assert_array_equal(part.label, CODES[:rows])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:-1], "has 135 bytes, but its header announces 136"),
        (lambda whole: whole + b"x", "has 137 bytes, but its header announces 136"),
        (lambda whole: whole[:9], "has 9 bytes"),
        (lambda whole: idx(LABEL), "begins with the bytes 00000801, .* 00000803"),
        (lambda whole: b"no", "begins with the bytes 6e6f"),
    ],
)
def test_damaged_idx_is_explained(tmp_path, packed, damage, message):
    folder = write_idx(tmp_path, packed)
    path = folder / f"train-images-idx3-ubyte{'.gz' if packed else ''}"
    content = damage(idx(IMAGES))
    path.write_bytes(gzip.compress(content) if packed else content)
    with fails(message):
        load(folder)


def test_incomplete_idx_folders_are_explained(tmp_path):
    folder = write_idx(tmp_path)
    (folder / "train-images-idx3-ubyte").write_bytes(b"")
    with fails("train-images-idx3-ubyte cannot be read as IDX"):
        load(folder)
    write_idx(tmp_path)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with fails("has no t10k-labels-idx1-ubyte"):
        load(folder)
    (folder / "t10k-images-idx3-ubyte").unlink()
    assert load(folder).test is None


# Images


def png(value: int, size: int = 4, mode: str = "1") -> bytes:
    picture = Image.new(mode, (size, size), 255 if mode == "1" else (value,) * 3)
    picture.putpixel((value % size, 0), 0 if mode == "1" else (0, 0, 0))
    stream = io.BytesIO()
    picture.save(stream, "png")
    return stream.getvalue()


DRAWINGS = {
    f"{alphabet}/character{character}/0{number}.png": png(number)
    for alphabet in ("Greek", "Latin")
    for character in (1, 2)
    for number in (1, 2, 3)
}


def write_drawings(place: Path, drawings: dict[str, bytes] = DRAWINGS) -> Path:
    if place.suffix == ".zip":
        with zipfile.ZipFile(place, "w") as file:
            file.writestr("images/", b"")
            for name, content in drawings.items():
                file.writestr(f"images/{name}", content)
                file.writestr(f"__MACOSX/images/{name}", b"shadow")
        return place
    for name, content in drawings.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def test_images_from_folder_zip_and_folder_of_zips(tmp_path):
    greek = {name: one for name, one in DRAWINGS.items() if "Greek" in name}
    (tmp_path / "zips").mkdir()
    write_drawings(tmp_path / "zips" / "1.zip", greek)
    write_drawings(tmp_path / "zips" / "2.zip")
    sources = [
        write_drawings(tmp_path / "folder"),
        write_drawings(tmp_path / "one.zip"),
        tmp_path / "zips",
    ]
    for source in sources:
        dataset = load(source)
        assert dataset.name == source.stem
        assert dataset.features.shape == (12, 4, 4)
        assert dataset.features.dtype == np.uint8
        np.testing.assert_array_equal(dataset.features[0, 0], [255, 0, 255, 255])
        assert dataset.classes[1:3] == ("Greek/character2", "Latin/character1")
        np.testing.assert_array_equal(dataset.label, np.repeat(range(4), 3))
        assert list(dataset.columns["alphabet"]) == ["Greek"] * 6 + ["Latin"] * 6


def test_color_images_keep_their_channels(tmp_path):
    drawings = {f"a/b/{n}.png": png(n, mode="RGB") for n in range(3)}
    dataset = load(write_drawings(tmp_path / "c.zip", drawings))
    assert dataset.features.shape == (3, 4, 4, 3)


@pytest.mark.parametrize(
    ("drawings", "message"),
    [
        ({"a/b/1.png": png(1)[:40]}, "1.png cannot be read as PNG"),
        ({"a/b/1.png": b"text"}, "1.png cannot be read as PNG"),
        ({"a/b/1.png": png(1), "a/b/2.png": png(1, 5)}, r"a/b/2.png has shape \(5, 5"),
        ({"a/b/1.txt": b""}, "holds no class/"),
    ],
)
def test_bad_images_are_named(tmp_path, drawings, message):
    with fails(message):
        load(write_drawings(tmp_path / "bad.zip", drawings))


def test_bad_archives_are_explained(tmp_path):
    (tmp_path / "bad.zip").write_bytes(b"PK garbage")
    with fails("bad.zip cannot be read as a zip file"):
        load(tmp_path / "bad.zip")
    with zipfile.ZipFile(tmp_path / "flat.zip", "w") as file:
        file.writestr("1.png", png(1))
    with fails("1.png is not in a folder of a class"):
        load(tmp_path / "flat.zip")
    folder = tmp_path / "differing"
    folder.mkdir()
    for number in (1, 2):
        write_drawings(folder / f"{number}.zip", {"a/b/1.png": png(number)})
    with fails("two different images a/b/1.png"):
        load(folder)


def test_shrinking_takes_the_mean_of_the_area():
    images = RNG.integers(0, 256, (3, 6, 6), dtype=np.uint8)
    blocks = images.reshape(3, 3, 2, 3, 2).mean(axis=(2, 4))
    assert datasets.shrink(images, 3).dtype == np.uint8
    np.testing.assert_array_equal(datasets.shrink(images, 3), np.rint(blocks))
    np.testing.assert_array_equal(datasets.shrink(images, 6), images)
    # A new pixel covers one and a half old ones.
    row = np.asarray([[[3.0, 6.0, 9.0]] * 3])
    np.testing.assert_allclose(datasets.shrink(row, 2)[0], [[4, 8], [4, 8]])
    many = RNG.random((1030, 7, 5, 3)).astype(np.float32)
    small = datasets.shrink(many, 4)
    assert small.shape == (1030, 4, 4, 3) and small.dtype == np.float32
    whole = many.mean(axis=(1, 2))
    np.testing.assert_allclose(small.mean(axis=(1, 2)), whole, rtol=1e-5)
    for size in (0, 6):
        with fails("cannot be shrunk"):
            datasets.shrink(many, size)


# Names


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("digits", (1797, 64), "0 1 2 3 4 5 6 7 8 9"),
        ("breast_cancer", (569, 30), "malignant benign"),
        ("wine", (178, 13), "class_0 class_1 class_2"),
        ("iris", (150, 4), "setosa versicolor virginica"),
    ],
)
def test_bundled_sets(name, shape, classes):
    from sklearn import datasets as sklearn

    dataset = load(name)
    assert (dataset.name, dataset.features.shape) == (name, shape)
    assert dataset.classes == tuple(classes.split())
    expected = getattr(sklearn, f"load_{name}")()
    np.testing.assert_array_equal(dataset.label, expected.target)
    np.testing.assert_array_equal(dataset.features, expected.data)


def test_unknown_names_and_paths(tmp_path):
    with fails("unknown data set 'digit'. Did you mean 'digits'. Known: a9a, .*openml"):
        load("digit")
    with fails("unknown data set 'openml:'"):
        load("openml:")
    for missing in ("./digit", "digit.csv", tmp_path / "digit"):
        with fails("no file or folder .*digit"):
            load(missing)
    with fails("no known layout. Known: .*features.npy"):
        load(tmp_path)
    assert {"a9a", "mnist", "huggingface:NAME"} <= set(datasets.names())


def test_mnist_and_fashion_are_found_in_the_cache(tmp_path, monkeypatch):
    for name in ("mnist", "fashion-mnist"):
        write_idx(tmp_path / name)
    assert load("mnist", cache=tmp_path).classes == ("1", "2", "3")
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path))
    fashion = load("fashion-mnist")
    assert fashion.classes == ("Trouser", "Pullover", "Dress")
    assert official(fashion).classes == fashion.classes
    np.testing.assert_array_equal(fashion.label, CODES)


def test_fashion_is_found_where_debian_puts_it(tmp_path, monkeypatch):
    monkeypatch.setattr(named, "_DEBIAN_FASHION", write_idx(tmp_path / "debian"))
    assert load("fashion-mnist", cache=tmp_path).classes[0] == "Trouser"


def test_absent_sets_say_where_they_belong(tmp_path, monkeypatch):
    monkeypatch.setattr(named, "_DEBIAN_FASHION", tmp_path / "debian")
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with fails("apt-get install dataset-fashion-mnist.*--data FOLDER", FedbilevelError):
        load("fashion-mnist")
    expected = re.escape(str(tmp_path / ".cache/fedbilevel/mnist"))
    with fails(f"not in {expected}.*--data FOLDER", FedbilevelError):
        load("mnist")


def test_a9a_comes_from_the_cache_or_is_fetched_whole(tmp_path, monkeypatch):
    asked = []

    def fetch(address, timeout):
        asked.append(address)
        return contextlib.closing(io.BytesIO(TEST.encode()))

    monkeypatch.setattr(urllib.request, "urlopen", fetch)
    (tmp_path / "a9a.gz").write_bytes(gzip.compress(TRAIN.encode()))
    for _ in range(2):
        dataset = load("a9a", cache=tmp_path)
        assert dataset.features.shape == (3, 123)
        assert official(dataset).features.shape == (1, 123)
    page = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/a9a.t"
    assert asked == [page]


@pytest.mark.parametrize("reply", [b"<html>Log in</html>", b"", None])
def test_a9a_that_cannot_be_fetched_leaves_nothing(tmp_path, monkeypatch, reply):
    def fetch(address, timeout):
        if reply is None:
            raise urllib.error.URLError("no network")
        return contextlib.closing(io.BytesIO(reply))

    monkeypatch.setattr(urllib.request, "urlopen", fetch)
    with fails("could not be fetched.*Put a9a or a9a.gz into", FedbilevelError):
        load("a9a", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


# Hubs


def test_openml(tmp_path, monkeypatch):
    from scipy.sparse import csr_matrix

    target = np.asarray(["b", "a"], object)
    bunch = SimpleNamespace(data=csr_matrix([[0.0, 1.0], [2.0, 0.0]]), target=target)
    asked = {}

    def fetch(name, **options):
        asked.update(options, name=name)
        return bunch

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    dataset = load("openml:toy", cache=tmp_path)
    np.testing.assert_array_equal(dataset.features, [[0, 1], [2, 0]])
    assert dataset.classes == ("a", "b")
    assert (asked["name"], asked["data_home"]) == ("toy", str(tmp_path))
    bunch.target = None
    with fails("names no column as its label"):
        load("openml:toy", cache=tmp_path)

    def no_network(name, **options):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", no_network)
    with fails("'toy' could not be fetched from OpenML.*no network", FedbilevelError):
        load("openml:toy", cache=tmp_path)


class Split:
    """What is used of a part of a Hugging Face data set."""

    def __init__(self, label_names=None, **columns):
        self.columns = columns
        self.column_names = list(columns)
        kinds = {name: SimpleNamespace() for name in columns}
        if label_names:
            kinds["label"] = SimpleNamespace(names=label_names)
        self.features = kinds

    def __getitem__(self, name):
        return self.columns[name]


def hugging_face(monkeypatch, splits: Any) -> None:
    def load_dataset(name, cache_dir):
        if isinstance(splits, Exception):
            raise splits
        return splits

    library = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(__import__("sys").modules, "datasets", library)


def test_hugging_face_images(monkeypatch):
    pictures = [Image.fromarray(image) for image in IMAGES]
    train = Split(["n", "a", "b", "c"], image=pictures, label=list(LABEL), site=[1] * 6)
    test = Split(image=pictures[:2], label=[3, 1], site=[2, 2])
    hugging_face(monkeypatch, {"train": train, "test": test})
    dataset = load("huggingface:some/thing")
    assert dataset.name == "some/thing"
    np.testing.assert_array_equal(dataset.features, IMAGES)
    assert dataset.classes == official(dataset).classes == ("a", "b", "c")
    assert list(dataset.columns["site"]) == [1] * 6
    assert list(official(dataset).label) == [2, 0]


def test_hugging_face_tables(monkeypatch):
    train = Split(a=[1.0, 2.0], text=["x", "y"], b=[3, 4], kind=["u", "v"])
    hugging_face(monkeypatch, {"train": train})
    dataset = load("huggingface:table")
    np.testing.assert_array_equal(dataset.features, [[1, 3], [2, 4]])
    assert dataset.classes == ("u", "v")
    assert list(dataset.columns["text"]) == ["x", "y"]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            ConnectionError("no network"),
            "could not be fetched from Hugging Face: no net",
        ),
        ({"validation": Split(label=[1])}, "no part 'train', only validation"),
        ({"train": Split(text=["x"], label=[1])}, "0 of numbers"),
        ({"train": Split(a=[[1], [2, 3]], label=[1, 2])}, "column 'a' differ in shape"),
        ({"train": Split(["x"], a=[1], label=[-1])}, "label -1 is none of the 1"),
    ],
)
def test_hugging_face_errors(monkeypatch, splits, message):
    hugging_face(monkeypatch, splits)
    with fails(message, FedbilevelError):
        load("huggingface:toy")


@pytest.mark.parametrize(
    ("library", "source", "message"),
    [
        ("PIL", "drawings.zip", r"install fedbilevel\[data\]"),
        ("sklearn", "iris", r"install fedbilevel\[data\]"),
        ("sklearn", "toy", r"by scikit-learn: install fedbilevel\[data\]"),
        ("sklearn.datasets", "openml:toy", r"install fedbilevel\[data\]"),
        ("datasets", "huggingface:toy", "pip install datasets"),
    ],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, library, source, message):
    write_drawings(tmp_path / "drawings.zip")
    write_libsvm(tmp_path, packed=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)  # so that any import of it fails
    with fails(message, FedbilevelError):
        load(source)


# The real files, where they are


def test_real_fashion_mnist():
    try:
        dataset = load("fashion-mnist")
    except FedbilevelError as error:
        if "is neither in" not in str(error):  # it is there, and was not understood
            raise
        pytest.skip(str(error))
    assert dataset.features.shape == (60000, 28, 28)
    assert official(dataset).features.shape == (10000, 28, 28)
    assert list(np.bincount(dataset.label)) == [6000] * 10
    assert dataset.classes[dataset.label[0]] == "Ankle boot"


def test_real_a9a():
    held = {path.name.removesuffix(".gz") for path in REAL.glob("a9a*")}
    if not {"a9a", "a9a.t"} <= held:
        pytest.skip(f"a9a and a9a.t are not in {REAL}")
    dataset = load("a9a", cache=REAL)
    assert dataset.features.shape[0] in (32560, 32561)
    assert official(dataset).features.shape == (16281, 123)
    assert set(np.unique(dataset.features)) == {0, 1}
    assert list(np.bincount(official(dataset).label)) == [12435, 3846]


def test_real_omniglot():
    archives = sorted(REAL.glob("omniglot*small1.zip"))
    if not archives:
        pytest.skip(f"omniglot*small1.zip is not in {REAL}")
    dataset = load(archives[0])
    assert dataset.features.shape == (2720, 105, 105)
    assert len(set(dataset.columns["alphabet"])) == 5
    assert list(np.bincount(dataset.label)) == [20] * 136
    assert set(np.unique(dataset.features)) == {0, 255}
