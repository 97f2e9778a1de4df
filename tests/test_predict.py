"""From a finished run to predictions, and to the formats of others."""

import csv
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from fedbilevel import Result
from fedbilevel._text import without_apostrophe
from fedbilevel.cli.app import app
from fedbilevel.errors import CheckpointError, FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.models import Convolution, Dense, Model, Multiply, Pixels
from fedbilevel.models.export import FORMATS
from fedbilevel.tasks import _networks

COLORS = ("blue", "green", "red")


def write(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def people(count: int = 60) -> list[list[Any]]:
    draw = np.random.default_rng(0)
    rows = []
    for number in range(count):
        age, dose = round(draw.normal(50, 12), 1), round(draw.normal(3, 1), 2)
        color = COLORS[draw.integers(3)]
        ill = (age - 50) / 12 + (2 if color == "red" else -1) > 0
        site = ("north", "south")[number % 2]
        rows.append([site, age, color, dose, "yes" if ill else "no"])
    return rows


HEADER = ["hospital", "age", "color", "dose", "ill"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of a run on a table with text and two hospitals."""
    home = tmp_path_factory.mktemp("run")
    path = write(home / "people.csv", HEADER, people())
    options = {"data": str(path), "label": "ill", "site": "hospital"}
    own = Experiment("regularization", "fedavg", rounds=3, options=options)
    own.run(home / "out")
    return home / "out"


def command(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def by_hand(arrays: dict[str, np.ndarray], rows: list[list[Any]]) -> np.ndarray:
    """Return probabilities by the exported arrays, and by nothing else of ours."""
    names = list(arrays["feature_names"])
    found = []
    for _, age, color, dose, *_ in rows:
        values = {"age": age, "dose": dose, f"color={color}": 1.0}
        raw = np.asarray([float(values.get(name, 0.0)) for name in names])
        scores = arrays["weight"] @ ((raw - arrays["center"]) / arrays["spread"])
        chances = np.exp(scores + arrays["bias"])
        found.append(chances / chances.sum())
    return np.asarray(found)


@pytest.mark.slow
def test_predictions_are_those_of_the_exported_arrays(folder, tmp_path):
    rows = people(9)
    # Other columns, in another order, and no label.
    table = [[row[2], "extra", row[1], row[3]] for row in rows]
    path = write(tmp_path / "new.csv", ["color", "more", "age", "dose"], table)
    out = tmp_path / "predictions.csv"
    done = command("predict", folder, path, "--out", out)
    assert done.exit_code == 0, done.output
    assert command("export", folder, "--to", "npz", "--out", tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as file:
        arrays = dict(file)
    assert set(arrays["classes"]) == {"no", "yes"}
    expected = by_hand(arrays, rows)
    with out.open() as file:
        header, *lines = list(csv.reader(file))
    chance = [f"probability of {name}" for name in ("no", "yes")]
    assert header == ["line", "predicted", *chance, "unseen"]
    assert [int(line[0]) for line in lines] == list(range(2, 11))
    chances = np.asarray([[float(value) for value in line[2:4]] for line in lines])
    assert np.allclose(chances, expected, rtol=0, atol=1e-6)
    named = [("no", "yes")[place] for place in expected.argmax(axis=1)]
    assert [line[1] for line in lines] == named


def test_predictions_hold_no_formula(folder, tmp_path, monkeypatch):
    """Read back, one apostrophe less is the name; what is a number is as it was."""
    named = dataclasses.replace(Model.load(folder), classes=("=1+1", "-1"))
    monkeypatch.setattr(Model, "load", lambda _: named)
    table = [[row[2], row[1], row[3]] for row in people(30)]
    path = write(tmp_path / "new.csv", ["color", "age", "dose"], table)
    out = tmp_path / "predictions.csv"
    done = command("predict", folder, path, "--out", out)
    assert done.exit_code == 0, done.output
    with out.open() as file:
        header, *lines = list(csv.reader(file))
    assert header[2:4] == ["probability of =1+1", "probability of -1"]
    assert {line[1] for line in lines} == {"'=1+1", "-1"}
    assert {without_apostrophe(line[1]) for line in lines} == set(named.classes)
    frame = pandas.read_csv(out)
    assert frame["predicted"].str.removeprefix("'").isin(named.classes).all()


def test_labels_in_the_data_tell_the_accuracy(folder, tmp_path):
    rows = people(30)
    path = write(tmp_path / "a.csv", HEADER, rows)
    told = command("predict", folder, path, "--json")
    assert told.exit_code == 0, told.output
    command("export", folder, "--to", "npz", "--out", tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as file:
        guesses = by_hand(dict(file), rows).argmax(axis=1)
    pairs = zip(guesses, rows, strict=True)
    right = np.mean([("no", "yes")[g] == row[-1] for g, row in pairs])
    assert json.loads(told.stdout)["accuracy"] == pytest.approx(right)
    shown = command("predict", folder, path).output
    assert f"Accuracy {right:.4g}, by the labels in 'ill'." in shown


def test_labels_that_are_no_class_keep_nobody_from_predicting(folder, tmp_path):
    rows = [[*row[:-1], "perhaps"] for row in people(3)]
    done = command("predict", folder, write(tmp_path / "a.csv", HEADER, rows))
    assert done.exit_code == 0 and "3 rows" in done.output
    assert "not compared" in done.output and "'perhaps'" in done.output


class Frame:
    """What a frame of pandas and of polars have in common."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.held, self.columns = columns, list(columns)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.held[name])


def test_a_result_predicts_in_python(folder):
    rows = people(5)
    columns = {name: [row[place] for row in rows] for place, name in enumerate(HEADER)}
    result = Result.load(folder)
    named = list(result.predict(columns))
    assert set(named) <= {"no", "yes"}
    made = Model.load(folder).preparation
    assert made is not None
    assert made.feature_names == ("age", *(f"color={c}" for c in COLORS), "dose")
    one_hot = [[row[1], *(float(row[2] == c) for c in COLORS), row[3]] for row in rows]
    assert list(result.predict(np.asarray(one_hot))) == named
    assert list(result.predict(Frame(columns))) == named
    with pytest.raises(InvalidInputError, match=r"rows of shape \(5, 2\)"):
        result.predict(np.zeros((5, 2)))
    bare = dataclasses.replace(result, model=None)
    with pytest.raises(InvalidInputError, match="has no model that predicts"):
        bare.predict(columns)


def test_a_model_is_what_the_run_ended_with(folder):
    """The bias is the last column of W; the other columns divide by sqrt(features).

    The last of the folds' models was trained on all rows, and scores the second class.
    """
    result, model = Result.load(folder), Model.load(folder)
    (last,) = result.point["y"][-1]
    W = np.stack([np.zeros_like(last), last])
    scale, dense = model.layers
    assert isinstance(scale, Multiply) and isinstance(dense, Dense)
    assert scale.factor == pytest.approx(5**-0.5)
    assert np.array_equal(dense.weight, W[:, :-1])
    assert np.array_equal(dense.bias, W[:, -1])


def test_a_model_that_each_client_has_of_its_own_is_none(folder):
    experiment = Experiment.load(folder)
    built, result = experiment.build(), Result.load(folder)
    x, y = np.zeros(6), result.point["y"]
    assert built.named(dataclasses.replace(result, levels=(x, y))).model is not None
    stacked = dataclasses.replace(result, levels=(x, np.stack([y, y])))
    assert built.named(stacked).model is None


def test_rows_that_the_model_cannot_take_are_named_all_at_once(folder, tmp_path):
    path = write(tmp_path / "a.csv", ["color"], [["red"], ["blue"]])
    done = command("predict", folder, path)
    assert done.exit_code == 2
    assert "there is no column 'age', 'dose', which the model" in done.stderr
    rows = [[50, "red", ""], ["old", "red", 3], [51, "red", ""], [52, "red", "n/a"]]
    path = write(tmp_path / "b.csv", HEADER[1:4], rows)
    done = command("predict", folder, path)
    assert done.exit_code == 2
    told = " ".join(done.stderr.split())
    assert "line 3, column 'age': 'old' is not a finite number; line 2, column" in told
    assert "'dose': the number is missing (and in 2 more)" in told
    assert "--ignore" not in told and "--missing mean" in told
    # What it advises is what it has.
    path = write(tmp_path / "c.csv", HEADER[1:4], [rows[0], [51, "red", 3]])
    for how, count in {"mean": 2, "drop": 1}.items():
        done = command("predict", folder, path, "--missing", how, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["rows"] == count


def test_an_unknown_text_spoils_its_own_row_alone(folder, tmp_path):
    rows = [["a1", 50, "red", 3], ["=2", 51, "pink", 3], ["a3", 52, "", 3]]
    header = ["patient, id", *HEADER[1:4]]
    path, out = write(tmp_path / "b.csv", header, rows), tmp_path / "out.csv"
    words = ("predict", folder, path, "--keep", '"patient, id",age', "--out", out)
    done = command(*words)
    assert done.exit_code == 0, done.output
    assert "Unseen: 2 rows hold texts that the model does not know" in done.output
    assert "color=pink (1), color=(missing) (1)" in done.output
    found = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["patient, id"] for row in found] == ["a1", "'=2", "a3"]
    assert [row["age"] for row in found] == ["50", "51", "52"]
    assert [row["unseen"] for row in found] == ["", "color=pink", "color=(missing)"]
    # No value of the column is set in that row.
    command("export", folder, "--to", "npz", "--out", tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as file:
        expected = by_hand(dict(file), [[None, 51, "nothing", 3]])[0]
    chances = [float(found[1][f"probability of {name}"]) for name in ("no", "yes")]
    assert np.allclose(chances, expected, rtol=0, atol=1e-6)
    done = command(*words[:-1], tmp_path / "no.csv", "--unseen", "error")
    assert done.exit_code == 2 and not (tmp_path / "no.csv").exists()
    assert "line 3" in done.stderr and "'pink' is none of the values" in done.stderr
    assert "unknown column" in command("predict", folder, path, "--keep", "x").stderr
    done = command("predict", folder, path, "--unseen", "mark")
    assert done.exit_code == 2 and "unknown value of unseen 'mark'" in done.stderr


def test_nothing_is_overwritten(folder, tmp_path):
    path = write(tmp_path / "a.csv", HEADER, people(3))
    kept = tmp_path / "kept.csv"
    kept.write_text("mine")
    assert command("predict", folder, path, "--out", kept).exit_code == 2
    assert command("export", folder, "--to", "npz", "--out", kept).exit_code == 2
    (tmp_path / "m.json").write_text("mine")
    weights = tmp_path / "m.safetensors"
    done = command("export", folder, "--to", "safetensors", "--out", weights)
    assert done.exit_code == 2 and "m.json exists" in done.stderr
    assert kept.read_text() == (tmp_path / "m.json").read_text() == "mine"


def test_a_folder_without_a_model_says_so(tmp_path):
    done = command("predict", tmp_path, "rows.csv")
    assert done.exit_code == 2 and "holds no model.json" in done.stderr
    done = command("export", tmp_path, "--to", "npy")
    assert done.exit_code == 2 and "Did you mean 'npz'" in done.stderr


def target_model() -> Model:
    from fedbilevel.datasets import Preparation
    from fedbilevel.datasets.preparation import NumericColumn, TargetLabel

    made = Preparation(
        (NumericColumn("a", 2.0, 4.0), NumericColumn("b", -1.0, 0.5)),
        TargetLabel("price", 100.0, 10.0),
    )
    return Model((Dense(np.asarray([[3.0, 0.25]]), np.asarray([1.0])),), (), made)


def test_numbers_are_predicted_in_their_own_units(tmp_path):
    model = target_model()
    # 100 + 10 (3 (6-2)/4 + 0.25 (0+1)/0.5 + 1)
    assert model.predict({"a": [6.0], "b": [0.0]}) == pytest.approx([145.0])
    with pytest.raises(InvalidInputError, match="predicts a number"):
        model.probabilities({"a": [6.0], "b": [0.0]})
    model.save(tmp_path)
    path = write(tmp_path / "r.csv", ["a", "b", "price"], [[6, 0, 140], [2, -1, 110]])
    done = command("predict", tmp_path, path, "--json")
    assert done.exit_code == 0, done.output
    error = json.loads(done.stdout)["root_mean_squared_error"]
    assert error == pytest.approx(np.sqrt((5**2 + 0**2) / 2))


def convolved(images: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the layer by loops: 3x3 windows, relu, means of 2x2 blocks."""
    rows, height, width, channels = images.shape
    full = np.zeros((rows, height, width, len(bias)))
    kernel = weight.reshape(len(bias), 3, 3, channels)
    for i in range(height):
        for j in range(width):
            for di in range(3):
                for dj in range(3):
                    p, q = i + di - 1, j + dj - 1
                    if 0 <= p < height and 0 <= q < width:
                        full[:, i, j] += images[:, p, q] @ kernel[:, di, dj].T
    full = np.maximum(full + bias, 0)
    tall = full[:, ::2] + full[:, 1::2]
    return (tall[:, :, ::2] + tall[:, :, 1::2]) / 4


def test_a_convolution_is_that_of_loops():
    draw = np.random.default_rng(0)
    images, weight = draw.normal(size=(2, 4, 6, 2)), draw.normal(size=(3, 18))
    bias = draw.normal(size=3)
    expected = convolved(images, weight, bias)
    assert np.allclose(Convolution(weight, bias)(images), expected)


@pytest.mark.parametrize("kind", ["linear", "mlp", "convolutional"])
def test_a_network_of_a_task_becomes_the_same_model(kind):
    shape = (8, 8)
    network = _networks.build(kind, shape, 3, 5, jr.key(0))
    leaves, structure = jax.tree.flatten(network)
    keys = jr.split(jr.key(1), len(leaves))
    drawn = [jr.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)]
    network = jax.tree.unflatten(structure, drawn)
    pixels = Pixels(0.5, 0.25, shape)
    layers = _networks.network_layers(None, network)
    model = Model(layers, ("a", "b", "c"), pixels=pixels)
    images = np.random.default_rng(2).integers(0, 256, (4, *shape), dtype=np.uint8)
    numbers = (images / 255 - 0.5) / 0.25
    expected = np.asarray(network(jnp.asarray(numbers)))
    assert np.allclose(model.scores(model.features(images)), expected, rtol=1e-5)
    assert model.is_linear == (kind == "linear")
    with pytest.raises(InvalidInputError, match="images of bytes of shape"):
        model.predict(numbers)


def test_a_score_of_two_classes_is_that_of_the_logistic_function():
    y = np.asarray([1.0, -2.0, 0.5])  # the last one is the constant's
    layers = _networks.linear_layers(np.zeros(2), y)
    model = Model(layers, ("no", "yes"), pixels=Pixels(0.0, 1.0, (2,)))
    rows = np.asarray([[0, 255], [255, 0], [255, 255]], np.uint8)
    score = (rows / 255 @ y[:2]) / np.sqrt(2) + y[2]
    assert np.allclose(model.probabilities(rows)[:, 1], 1 / (1 + np.exp(-score)))


def test_a_model_of_images_comes_back_and_predicts(tmp_path):
    draw = np.random.default_rng(0)
    hidden = Dense(draw.normal(size=(4, 9)), draw.normal(size=4), relu=True)
    head = Dense(draw.normal(size=(2, 4)), np.zeros(2))
    model = Model((hidden, head), ("cat", "dog"), pixels=Pixels(0.1, 0.3, (3, 3)))
    model.save(tmp_path)
    again = Model.load(tmp_path)
    images = draw.integers(0, 256, (5, 3, 3), dtype=np.uint8)
    assert np.array_equal(again.probabilities(images), model.probabilities(images))
    flat = (images.reshape(5, 9) / 255 - 0.1) / 0.3
    scores = np.maximum(flat @ hidden.weight.T + hidden.bias, 0) @ head.weight.T
    named = [("cat", "dog")[place] for place in scores.argmax(axis=1)]
    assert list(again.predict(images)) == named
    np.savez(tmp_path / "images.npz", features=images, label=np.arange(5) % 2)
    done = command("predict", tmp_path, tmp_path / "images.npz", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"] == 5
    FORMATS["npz"](model, tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as file:
        assert list(file["layers"]) == ["dense relu", "dense"]
        assert np.array_equal(file["layers.0.weight"], hidden.weight)


def test_files_that_are_damaged_are_refused_by_name(tmp_path):
    target_model().save(tmp_path)
    whole = {
        n: (tmp_path / n).read_bytes() for n in ("model.json", "model.safetensors")
    }
    draw, refused, tried = np.random.default_rng(0), 0, 0
    for name, content in whole.items():
        for _ in range(60):
            place, bit = draw.integers(len(content)), 1 << draw.integers(8)
            damaged = bytearray(content)
            damaged[place] ^= bit
            (tmp_path / name).write_bytes(bytes(damaged))
            tried += 1
            try:
                Model.load(tmp_path)
            except CheckpointError as error:
                refused += "model." in str(error)
        for cut in (0, 1, len(content) // 2, len(content) - 1):
            (tmp_path / name).write_bytes(content[:cut])
            if content[cut:].strip():
                with pytest.raises(CheckpointError, match=r"model\."):
                    Model.load(tmp_path)
        (tmp_path / name).write_bytes(content)
    # Only a space of the JSON that became another one may mean the same.
    assert refused >= tried - 10
    Model.load(tmp_path)


def changed(folder: Path, **entries: Any) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"version": 2}, "version 2 is not known"),
        ({"fedbilevel": "sums"}, "no file of model"),
        ({"code": "import os"}, "missing entries: code"),
        ({"classes": ["a"]}, "not written together"),
    ],
)
def test_a_description_of_somebody_else_is_refused(tmp_path, entries, told):
    target_model().save(tmp_path)
    changed(tmp_path, **entries)
    with pytest.raises(CheckpointError, match=told):
        Model.load(tmp_path)


def test_weights_that_are_missing_or_pickled_are_refused(tmp_path):
    target_model().save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        Model.load(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        Model.load(tmp_path)


@pytest.mark.parametrize(
    ("layers", "classes", "told"),
    [
        ((), ("a", "b"), "last layer"),
        ((Multiply(1.0),), ("a", "b"), "last layer"),
        ((Dense(np.ones((3, 1)), np.ones(3)),), ("a", "b"), "3 scores for 2 classes"),
        (
            (Dense(np.ones((1, 1)), np.ones(1)),),
            (),
            "needs a `preparation` whose label is a number",
        ),
    ],
)
def test_what_is_no_model_is_refused(layers, classes, told):
    with pytest.raises(InvalidInputError, match=told):
        Model(layers, classes, pixels=Pixels(0.0, 1.0, (1,)))
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        Dense(np.full((1, 1), np.nan), np.ones(1))
    for weight, bias in (((2, 1), 3), ((2,), 2), ((2, 0), 2)):
        with pytest.raises(InvalidInputError, match="do not fit a bias"):
            Dense(np.ones(weight), np.ones(bias))


def test_a_result_is_kept_without_the_package_of_models(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbilevel.result.can_be_kept", lambda: False)
    made = Result(
        *("t", "a", {}, {}, {}, {"y": np.ones(1)}, {}, {}, {}), model=target_model()
    )
    with pytest.warns(UserWarning, match=r"safetensors: install fedbilevel\[cli\]"):
        made.save(tmp_path)
    assert Result.load(tmp_path).model is None
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(FedbilevelError, match="install fedbilevel"):
        made.model.save(tmp_path)  # pyright: ignore[reportOptionalMemberAccess]


def test_onnx_computes_the_same(folder, tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    rows = people(6)
    path = tmp_path / "m.onnx"
    done = command("export", folder, "--to", "onnx", "--out", path)
    assert done.exit_code == 0, done.output
    command("export", folder, "--to", "npz", "--out", tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as file:
        expected = by_hand(dict(file), rows)
    one_hot = [[row[1], *(float(row[2] == c) for c in COLORS), row[3]] for row in rows]
    fed = {"features": np.asarray(one_hot, np.float32)}
    (chances,) = ReferenceEvaluator(onnx.load(path)).run(None, fed)
    assert np.allclose(chances, expected, atol=1e-5)
    FORMATS["onnx"](target_model(), tmp_path / "t.onnx")
    fed = {"features": np.asarray([[6.0, 0.0]], np.float32)}
    (value,) = ReferenceEvaluator(onnx.load(tmp_path / "t.onnx")).run(None, fed)
    assert value == pytest.approx(np.asarray([[145.0]]), rel=1e-5)


def test_onnx_is_for_linear_models_and_needs_its_package(tmp_path, monkeypatch):
    hidden = Dense(np.ones((2, 1)), np.zeros(2), relu=True)
    deep = Model(
        (hidden, Dense(np.ones((2, 2)), np.zeros(2))),
        ("a", "b"),
        pixels=Pixels(0.0, 1.0, (1,)),
    )
    with pytest.raises(InvalidInputError, match="only linear models"):
        FORMATS["onnx"](deep, tmp_path / "a.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(FedbilevelError, match=r"install fedbilevel\[onnx\]"):
        FORMATS["onnx"](target_model(), tmp_path / "a.onnx")
