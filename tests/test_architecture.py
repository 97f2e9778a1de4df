"""The task architecture: its operations, what they are named, search and retraining."""

from itertools import product
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from PIL import Image

from fedbilevel.datasets.preparation import NumericColumn
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.models import Model
from fedbilevel.tasks import architecture
from fedbilevel.tasks.architecture import OPERATIONS, mixed_scores, single_scores

IMAGES: Any = np.random.default_rng(0).normal(size=(2, 64))


def convolve(layer, images, stride):
    """Return relu of the convolution with zeros around, by loops."""
    kernel, bias = np.asarray(layer.kernel), np.asarray(layer.bias)
    size, side = int(len(kernel) ** 0.5), images.shape[1]
    pad = size // 2
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    out = np.zeros((len(images), side // stride, side // stride, len(bias)))
    for i, j in product(range(side // stride), repeat=2):
        window = padded[:, i * stride :, j * stride :][:, :size, :size]
        flat = window.reshape(len(images), size**2, -1)
        out[:, i, j] = np.einsum("nsc,scd->nd", flat, kernel) + bias
    return np.maximum(out, 0)


def average(images) -> Any:
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    steps = product(range(3), repeat=2)
    return sum(padded[:, i : i + 4, j : j + 4] for i, j in steps) / 9


def mixed(x, y, images) -> Any:
    """Return the scores of the mixed network, in NumPy."""
    hidden: Any = convolve(y.first, images.reshape(-1, 8, 8, 1), 2)
    for logits, edge in zip(x, y.edges, strict=True):
        outputs = (
            convolve(edge.convolution_3, hidden, 1),
            convolve(edge.convolution_5, hidden, 1),
            average(hidden),
            hidden,
        )
        share = np.exp(logits) / np.exp(logits).sum()
        hidden = sum(s * output for s, output in zip(share, outputs, strict=True))
    flat = hidden.reshape(len(hidden), -1)
    return flat @ np.asarray(y.last.weight).T + np.asarray(y.last.bias)


@pytest.fixture(scope="module")
def task() -> Any:
    return architecture.make(2)


def test_the_losses_are_those_of_the_formula(task):
    x = np.asarray([[0.3, -1.0, 0.5, 0.0], [1.0, 0.2, -0.4, 0.1]])
    scores = mixed(x, task.y, IMAGES)
    np.testing.assert_allclose(mixed_scores(jnp.asarray(x), task.y, IMAGES), scores)
    rows = {"image": jnp.asarray(IMAGES), "label": jnp.asarray([3, 7], jnp.int32)}
    chosen = scores[[0, 1], [3, 7]]
    entropy = np.mean(np.log(np.exp(scores).sum(axis=1)) - chosen)
    square = sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(task.y))
    found = task.problem.upper(jnp.asarray(x), task.y, rows)
    np.testing.assert_allclose(found, entropy)
    found = task.problem.lower(jnp.asarray(x), task.y, rows)
    np.testing.assert_allclose(found, entropy + 0.0005 * square)


def test_a_decided_mixture_is_a_single_operation(task):
    for choice in (("convolution_5", "average"), ("identity", "convolution_3")):
        x = np.full((2, len(OPERATIONS)), -1e3)
        for edge, name in enumerate(choice):
            x[edge, OPERATIONS.index(name)] = 0
        x = jnp.asarray(x)
        np.testing.assert_allclose(
            mixed_scores(x, task.y, IMAGES),
            single_scores(choice, task.y, IMAGES),
            atol=1e-12,
        )
        assert architecture.operation_names(x) == choice
        found = task.metrics(x, task.y)
        names = [OPERATIONS[int(found[f"operation_{edge}"])] for edge in (0, 1)]
        assert tuple(names) == choice


def test_all_images_are_shared_out_once(task):
    pooled = architecture._pooled(task.data)
    assert len(pooled["label"]) + int(task.metrics.size) == 1797
    assert pooled["image"].shape[1:] == (64,)


@pytest.mark.slow
def test_the_search_learns_and_leaves_a_model(task, tmp_path):
    sizes: Any = {"clients": 2, "rounds": 12, "measure_every": 11}
    result = Experiment("architecture", "fedbio", **sizes).run(tmp_path / "run")
    model = Model.load(tmp_path / "run")
    told = result.final["test_accuracy"]
    held = (task.metrics.features, task.metrics.label)
    rows, label = (np.asarray(one)[: task.metrics.size] for one in held)
    guesses = model.scores(rows).argmax(axis=1)  # they are scaled already
    assert np.mean(guesses == label) == pytest.approx(told, abs=1e-6)
    start = float(task.metrics(task.x, task.y)["test_loss"])
    assert result.final["test_loss"] < start - 0.1
    names = architecture.operation_names(result.point["x"])
    assert set(names) <= set(OPERATIONS)


def test_retraining_depends_on_choice_and_seed_only(task):
    choice = ("identity", "identity")
    first = architecture.retrained_accuracy(task, choice, steps=60)
    assert first > 0.8
    assert first == architecture.retrained_accuracy(task, choice, steps=60)
    other = architecture.retrained_accuracy(task, choice, steps=60, seed=1)
    assert abs(other - first) < 0.1
    # From scratch: what the search has learned does not matter.
    y = jax.tree.map(lambda leaf: leaf + jr.normal(jr.key(0), leaf.shape), task.y)
    moved = eqx.tree_at(lambda one: one.y, task, y)
    assert first == architecture.retrained_accuracy(moved, choice, steps=60)


def test_retraining_goes_down_the_loss_with_its_penalty():
    """One image many times is every batch: two steps, with momentum, by hand."""
    rows = {"image": jnp.tile(IMAGES[:1], (5, 1)), "label": jnp.full(5, 3, jnp.int32)}
    choice = ("convolution_3", "average")

    def loss(y):
        scores = single_scores(choice, y, rows["image"][:1])[0]
        square = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))
        return jnp.log(jnp.exp(scores).sum()) - scores[3] + 0.0005 * square

    start, once, twice = (
        architecture._train(choice, steps, 10, rows, jr.key(4)) for steps in range(3)
    )
    first, second = jax.grad(loss)(start), jax.grad(loss)(once)
    for a, b, c, g, h in zip(
        *map(jax.tree.leaves, (start, once, twice, first, second)), strict=True
    ):
        np.testing.assert_allclose(b, a - 0.02 * g, atol=1e-12)
        np.testing.assert_allclose(c, b - 0.02 * (h + 0.9 * g), atol=1e-12)


@pytest.mark.parametrize(
    "choice", [("identity",), ("identity", "zero"), ("identity",) * 3]
)
def test_choices_that_cannot_be(task, choice):
    with pytest.raises(InvalidInputError, match="for each of the 2 edges"):
        architecture.retrained_accuracy(task, choice)


@pytest.mark.parametrize("train", [-0.1, 0.81, 2.0])
def test_shares_that_cannot_be(train):
    with pytest.raises(InvalidInputError, match=f"train={train}.*between 0 and 0.8"):
        architecture.make(train=train)


# The model that a search leaves


def moved(task: Any) -> tuple[Any, Any]:
    """Return a point with biases and unequal mixtures."""
    draw = np.random.default_rng(5)
    x = jnp.asarray(draw.normal(size=task.x.shape))
    y = jax.tree.map(lambda leaf: leaf + 0.1 * draw.normal(size=leaf.shape), task.y)
    return x, y


def model_at(task: Any, x: Any, y: Any) -> Model:
    made = task.preparation
    classes = made.label.classes if made else task.classes
    return Model(task.predictor.layers(x, y), classes, made, task.predictor.pixels)


def test_the_model_is_the_mixed_network(task):
    """Of a set of 64 columns, scaled by one mean and one deviation."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    raw = digits.data
    x, y = moved(task)
    scores = mixed(np.asarray(x), y, (raw[:7] - raw.mean()) / raw.std())
    model = model_at(task, x, y)
    found = model.scores(model.features(raw[:7]))
    np.testing.assert_allclose(found, scores, rtol=1e-9, atol=1e-9)
    assert not model.is_linear


def test_images_in_colors_of_any_size_are_predicted(tmp_path):
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 256, (40, 24, 16, 3), dtype=np.uint8)
    for number, image in enumerate(raw):
        place = tmp_path / "ab"[number // 20]
        place.mkdir(exist_ok=True)
        Image.fromarray(image).save(place / f"{number:02d}.png")
    task = architecture.make(1, data=str(tmp_path))
    # Means over 3x2 blocks and the colors.
    small = raw.reshape(40, 8, 3, 8, 2, 3).mean(axis=(2, 4, 5)).reshape(40, 64)
    x, y = moved(task)
    scores = mixed(np.asarray(x), y, (small - small.mean()) / small.std())
    model = model_at(task, x, y)
    np.testing.assert_allclose(model.scores(model.features(raw)), scores, rtol=1e-6)


def write_pixels(path: Path, raw: np.ndarray) -> str:
    names = ",".join(f"p{k}" for k in range(raw.shape[1]))
    lines = [",".join(map(str, [*row, "ab"[k % 2]])) for k, row in enumerate(raw)]
    path.write_text("\n".join([f"{names},label", *lines]))
    return str(path)


def test_the_model_of_a_table_predicts(tmp_path):
    raw = np.random.default_rng(1).integers(0, 99, (50, 100))
    table = write_pixels(tmp_path / "pixels.csv", raw)
    task = architecture.make(1, data=table)
    x, y = moved(task)
    model_at(task, x, y).save(tmp_path)
    model = Model.load(tmp_path)
    made = model.preparation
    assert made is not None and made.feature_names[-1] == "p99"
    (column, *_) = made.columns
    assert isinstance(column, NumericColumn)
    # All columns have as many rows: the mean and variance of all numbers.
    assert column.center == pytest.approx(raw.mean())
    assert column.spread == pytest.approx(raw.std())
    shrunk = architecture.shrink(raw.reshape(-1, 10, 10).astype(float), 8)
    small = (shrunk.reshape(-1, 64) - raw.mean()) / raw.std()
    scores = mixed(np.asarray(x), y, small)
    columns = {f"p{k}": raw[:, k] for k in range(100)}
    found = model.scores(model.features(columns))
    np.testing.assert_allclose(found, scores, rtol=1e-6, atol=1e-9)
    assert list(model.predict(columns)) == ["ab"[k] for k in scores.argmax(axis=1)]
