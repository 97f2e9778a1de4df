"""The task few-shot: its lower problems, its episodes, and what is learned."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from typer.testing import CliRunner

from fedbilevel import datasets
from fedbilevel.cli.app import app
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.built import model_of
from fedbilevel.hypergradient import Exact
from fedbilevel.models import Model
from fedbilevel.problem import Oracle
from fedbilevel.result import Result
from fedbilevel.tasks import _domains, few_shot
from fedbilevel.tasks._domains import Sizes, alphabets_apart, characters, sinusoids


def make(*sizes: Any, **options: Any) -> Any:
    """Return the task; its metrics are known to be more than a function."""
    return few_shot.make(*sizes, **options)


def moved(tree: Any, seed: int) -> Any:
    """Return a point away from the start, where no two blocks are equal."""
    flat, restore = ravel_pytree(tree)
    return restore(flat + 0.3 * jr.normal(jr.key(seed), flat.shape))


def features(hidden, inputs):
    for layer in hidden.layers:
        inputs = np.tanh(inputs @ np.asarray(layer.weight).T + np.asarray(layer.bias))
    return inputs / np.sqrt(inputs.shape[1])


def half_square(hidden, head, rows, client):
    inputs, targets = (np.asarray(rows[name])[client, 0] for name in rows)
    scores = features(hidden, inputs) @ np.asarray(head.weight).T
    return 0.5 * np.mean((scores + np.asarray(head.bias) - targets) ** 2)


@pytest.mark.parametrize("lower", ["head", "proximal"])
def test_the_losses_are_those_of_the_formula(lower):
    task = make(2, lower=lower, shots=5, strength=0.7)
    x, y = moved(task.x, 0), moved(task.y, 1)
    hidden, head = (x, y) if lower == "head" else (y.hidden, y.head)
    flat_x, flat_y = (np.asarray(ravel_pytree(tree)[0]) for tree in (x, y))
    held = flat_y if lower == "head" else flat_y - flat_x
    oracle = Oracle(task.problem, task.data, 1, None, None)
    f = oracle.upper_loss(x, y, oracle.all_upper())
    g = oracle.lower_loss(x, y, oracle.all_lower())
    np.testing.assert_allclose(f, half_square(hidden, head, task.data.upper, 1))
    expected = half_square(hidden, head, task.data.lower, 1) + 0.35 * held @ held
    np.testing.assert_allclose(g, expected)


def test_the_proximal_hypergradient_is_that_of_imaml(monkeypatch):
    """With g = L + (lam/2) ||y - x||^2 it is (I + hess L / lam)^-1 fy."""
    monkeypatch.setattr(_domains, "_WIDTH", 4)
    lam = 3.0
    task = make(2, lower="proximal", strength=lam)
    x, y = moved(task.x, 0), moved(task.y, 1)
    oracle, rule = Oracle(task.problem, task.data, 0, None, None), Exact()
    flat, restore = ravel_pytree(y)

    def held(at):
        return oracle.lower_loss(x, restore(at), oracle.all_lower())

    hessian = jax.jit(jax.hessian(held))(flat) - lam * jnp.eye(flat.size)
    fx, fy = oracle.upper_gradients(x, y, oracle.all_upper())
    slope = ravel_pytree(fy)[0]
    expected = jnp.linalg.solve(jnp.eye(flat.size) + hessian / lam, slope)
    np.testing.assert_array_equal(ravel_pytree(fx)[0], 0)
    bundle = rule.draw(oracle, jr.key(0))
    found = jax.jit(lambda x, y: rule(oracle, x, y, bundle))(x, y)
    np.testing.assert_allclose(ravel_pytree(found)[0], expected, atol=1e-10)


def test_a_new_head_is_ridge_regression():
    task = make(2)
    episodes = task.metrics.episodes
    errors = []
    for k in range(len(episodes.support["inputs"])):
        (a, t), (b, u) = (
            [np.asarray(rows[name])[k] for name in ("inputs", "targets")]
            for rows in (episodes.support, episodes.query)
        )
        a, b = (np.hstack([features(task.x, one), np.ones_like(one)]) for one in (a, b))
        matrix = a.T @ a / len(a) + 0.001 * np.eye(a.shape[1])
        head = np.linalg.solve(matrix, a.T @ t / len(a))
        errors.append(np.mean((b @ head - u) ** 2))
    found = task.metrics(task.x, task.y)["new_task_error"]
    np.testing.assert_allclose(found, np.mean(errors), rtol=1e-8)


def test_adapting_lowers_the_support_loss():
    task = make(2, lower="proximal")
    kind, support = task.metrics.kind, jax.tree.map(lambda a: a[0, 0], task.data.lower)
    adapted = jax.jit(kind.adapt)(task.x, task.y, support)
    before, after = (kind.held_error(task.x, y, support) for y in (task.y, adapted))
    assert after < 0.85 * before


def maml(kind, x, support, query):
    """Return the query error after gradient steps on the support set."""
    for _ in range(kind.steps):
        slope = jax.grad(
            lambda at: kind.loss.error(at(support["inputs"]), support["targets"])
        )(x)
        x = jax.tree.map(lambda leaf, one: leaf - kind.step * one, x, slope)
    return kind.loss.error(x(query["inputs"]), query["targets"])


def test_the_unrolled_hypergradient_is_that_of_maml(monkeypatch):
    monkeypatch.setattr(_domains, "_WIDTH", 4)
    task = make(2, lower="unrolled", inner_steps=3, inner_step=0.2)
    kind, x = task.metrics.kind, moved(task.x, 0)
    oracle, rule = Oracle(task.problem, task.data, 1, None, None), Exact()
    support, query = (
        jax.tree.map(lambda a: a[1, 0], rows)
        for rows in (task.data.lower, task.data.upper)
    )
    expected = jax.jit(jax.grad(lambda x: maml(kind, x, support, query)))(x)
    bundle = rule.draw(oracle, jr.key(0))
    adapted = jax.jit(kind.adapt)(x, task.y, support)
    found = jax.jit(lambda x, y: rule(oracle, x, y, bundle))(x, adapted)
    flat, other = ravel_pytree(found)[0], ravel_pytree(expected)[0]
    np.testing.assert_allclose(flat, other, atol=1e-10)
    slope = oracle.lower_gradient(x, adapted, oracle.all_lower())
    np.testing.assert_allclose(ravel_pytree(slope)[0], 0, atol=1e-12)


def test_waves_that_are_flat_are_learned_without_error():
    task = make(2)
    flat = jax.tree.map(jnp.zeros_like, task.metrics.episodes)
    metrics = eqx.tree_at(lambda one: one.episodes, task.metrics, flat)
    assert metrics(task.x, task.y)["new_task_error"] == 0
    assert (task.data.clients, make().data.clients) == (2, 32)


def test_sinusoids_are_drawn_as_documented():
    draw = np.random.default_rng(0)
    episodes = sinusoids(2000, Sizes(0, 7, 40), draw)
    inputs, targets = episodes.support["inputs"], episodes.support["targets"]
    assert inputs.shape == targets.shape == (2000, 7, 1)
    assert -5 <= inputs.min() < -4.9 and 4.9 < inputs.max() <= 5
    assert np.abs(targets).max() <= 5
    # The square of a wave is a^2/2 in the mean over its phase, roughly.
    mean = np.mean(episodes.query["targets"] ** 2)
    assert mean == pytest.approx((5**3 - 0.1**3) / (3 * 4.9) / 2, rel=0.1)


@pytest.mark.slow
def test_learning_to_learn_makes_new_waves_ten_times_easier():
    sizes: Any = {"clients": 12, "rounds": 400, "measure_every": 400}
    options = {"q": "5", "upper_step": "0.1"}
    result = Experiment("few-shot", options=options, **sizes).run()
    task = make(12)
    start = float(task.metrics(task.x, task.y)["new_task_error"])
    assert result.final["new_task_error"] < 0.1 * start
    assert result.algorithm == "local-bsgvrm"
    assert result.final["random_features_error"] == pytest.approx(start, rel=1e-3)
    # Every client has a head of its own, and only x and its direction travel.
    assert result.point["y.weight"].shape == (12, 1, 40)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.x))
    # With them go three numbers: the curvature, the upper loss, and that all is well.
    assert result.counts["per_client_and_round"]["floats_up"] == 2 * size + 3


def draw_alphabets(folder: Path, alphabets=5, drawings=4, side=10) -> str:
    """Write alphabets of three characters; pixels tell alphabet, character, drawing."""
    image = pytest.importorskip("PIL.Image")
    for alphabet in range(alphabets):
        for character in range(3):
            place = folder / f"alphabet{alphabet}" / f"character{character}"
            place.mkdir(parents=True)
            for drawing in range(drawings):
                pixels = np.full((side, side), 10 * character, np.uint8)
                # In corners, which stay what they are when images are not shrunk.
                pixels[0, 0], pixels[0, -1] = alphabet, drawing
                image.fromarray(pixels).save(place / f"{drawing}.png")
    return str(folder)


def test_episodes_of_characters_are_apart_in_every_way(tmp_path):
    dataset = datasets.load(draw_alphabets(tmp_path))
    draw = np.random.default_rng(0)
    sides = alphabets_apart(dataset, draw)
    names = [set(side.columns["alphabet"]) for side in sides]
    assert not names[0] & names[1]
    assert [len(some) for some in names] == [4, 1]
    episodes = characters(30, sides[0], Sizes(3, 1, 2), draw)
    for sets, each in ((episodes.support, 1), (episodes.query, 2)):
        assert sets["inputs"].shape == (30, 3 * each, 10, 10)
        np.testing.assert_array_equal(sets["targets"][7], np.repeat([0, 1, 2], each))
    seen = {
        f"alphabet{number}" for number in np.unique(episodes.query["inputs"][..., 0, 0])
    }
    assert seen == names[0]
    for k in range(30):
        (a, t), (b, u) = (
            (sets["inputs"][k], sets["targets"][k])
            for sets in (episodes.support, episodes.query)
        )
        same = (a[:, None] == b[None]).all(axis=(2, 3))
        assert not same.any()
        # All but the mark of the drawing is the same just for the same character.
        a, b = (np.concatenate([one[:, 0, :1], one[:, 1]], axis=1) for one in (a, b))
        same = (a[:, None] == b[None]).all(axis=2)
        np.testing.assert_array_equal(same, t[:, None] == u[None])


@pytest.mark.slow
def test_characters_are_told_apart_after_a_short_run(tmp_path, monkeypatch):
    monkeypatch.setattr(_domains, "_CHANNELS", (4,))
    folder = draw_alphabets(tmp_path)
    options = {"data": folder, "ways": "2", "shots": "2", "queries": "2", "q": "1"}
    sizes: Any = {"clients": 2, "rounds": 1, "local_steps": 1}
    result = Experiment("few-shot", options=options, **sizes).run()
    final = result.final
    assert result.algorithm == "fedbio-clientwise"
    assert final["new_task_accuracy"] + final["new_task_error"] == pytest.approx(1)
    # Gray levels are told apart by any features.
    assert min(final["new_task_accuracy"], final["random_features_accuracy"]) > 0.7


def test_a_fitted_softmax_has_no_slope_left_and_never_overflows():
    draw = np.random.default_rng(0)
    features, targets = draw.normal(size=(10, 4)), jnp.arange(10) % 3
    zero = eqx.tree_at(
        lambda one: (one.weight, one.bias),
        eqx.nn.Linear(4, 3, key=jr.key(0)),
        (jnp.zeros((3, 4)), jnp.zeros(3)),
    )
    for length, strength in ((0.5, 0.1), (1e4, 0.01)):
        rows = jnp.asarray(length * features)

        def loss(y, rows=rows, strength=strength):
            error = _domains.cross_entropy(jax.vmap(y)(rows), targets)
            return error + strength / 2 * (jnp.sum(y.weight**2) + jnp.sum(y.bias**2))

        fitted = _domains._softmax_regression(rows, targets, zero, strength)
        assert loss(fitted) < loss(zero)
        if length < 1:
            slope = ravel_pytree(jax.grad(loss)(fitted))[0]
            np.testing.assert_allclose(slope, 0, atol=1e-4)


@pytest.mark.parametrize(
    ("drawn", "options", "told"),
    [
        ({"alphabets": 1}, {}, "has one alphabet, alphabet0. A second one is needed"),
        ({}, {"ways": 4}, "ways=4: the alphabets alphabet.* have 3 characters"),
        ({}, {"ways": 2, "queries": 4}, "shots=1 and queries=4: .* has 4 drawings of"),
        ({"side": 6}, {"ways": 2, "queries": 1}, "uint8 of shape \\(6, 6\\). Give"),
    ],
)
def test_drawings_that_do_not_suffice(drawn, options, told, tmp_path):
    folder = draw_alphabets(tmp_path, **drawn)
    with pytest.raises(InvalidInputError, match=told):
        make(2, data=folder, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data": "sinusoids"}, "unknown data set 'sinusoids'"),
        ({"data": "digits"}, "digits has no alphabets. Give a folder"),
        ({"lower": "heads"}, "unknown lower 'heads'. Did you mean 'head'"),
        ({"shots": -1}, "shots=-1: it must be positive, or 0 for the usual value"),
        ({"strength": -1.0}, "strength=-1.0: it must be positive"),
        ({"ways": 5}, "ways=5: data=sinusoid has no classes. Leave it out"),
        ({"inner_steps": 5}, "inner_steps=5: lower=head takes no such steps"),
        ({"lower": "unrolled", "strength": 1.0}, "strength=1.0: with lower=unrolled"),
    ],
)
def test_options_that_cannot_be(options, told):
    with pytest.raises(InvalidInputError, match=told):
        make(**options)


# What a run leaves: what new tasks begin with


def saved_model(task: Any, x: Any, folder: Path) -> Model:
    """Return the model of a finished run, through its files."""
    clients = task.data.clients
    y = jax.tree.map(lambda leaf: jnp.stack([leaf] * clients), task.y)
    about: Any = [{}] * 7
    result = Result("few-shot", "fedbio-clientwise", *about, levels=(x, y))
    model = model_of(task, result, {"shots": 5})
    assert model is not None
    model.save(folder)
    return Model.load(folder)


def command(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("lower", ["head", "proximal", "unrolled"])
def test_what_new_waves_begin_with_is_left_and_exported(lower, tmp_path):
    task = make(2, lower=lower)
    x = moved(task.x, 3)
    model = saved_model(task, x, tmp_path)
    rows = np.linspace(-5, 5, 9)[:, None]
    expected = features(x if lower == "head" else x.hidden, rows)
    if lower != "head":
        expected = expected @ np.asarray(x.head.weight).T + np.asarray(x.head.bias)
    np.testing.assert_allclose(model.scores(model.features(rows)), expected)
    done = command("predict", tmp_path, "digits")
    how = "fit a linear layer" if lower == "head" else "continue to train its layers"
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and "begin with" in told and how in told
    with pytest.raises(InvalidInputError, match=how):
        model.predict(rows)
    for kind in ("npz", "safetensors"):
        out = tmp_path / f"exported.{kind}"
        assert command("export", tmp_path, "--to", kind, "--out", out).exit_code == 0
    with np.load(tmp_path / "exported.npz") as arrays:
        assert list(arrays["layers"])[:3] == ["dense", "tanh", "dense"]
        first = (x if lower == "head" else x.hidden).layers[0]
        np.testing.assert_array_equal(arrays["layers.0.weight"], first.weight)
    done = command("export", tmp_path, "--to", "onnx", "--out", tmp_path / "m.onnx")
    assert done.exit_code == 2 and "Export it as npz" in done.stderr


@pytest.mark.slow
def test_what_new_characters_begin_with_takes_images(tmp_path, monkeypatch):
    monkeypatch.setattr(_domains, "_CHANNELS", (4,))
    folder = draw_alphabets(tmp_path / "images")
    task = make(2, data=folder, ways=2, shots=2, queries=2)
    x = moved(task.x, 3)
    model = saved_model(task, x, tmp_path)
    images = np.asarray(task.data.upper["inputs"])[0, 0]
    assert model.pixels is not None and images.dtype == np.uint8
    own = alphabets_apart(datasets.load(folder), np.random.default_rng(0))[0].features
    scaled = (images / 255 - (own / 255).mean()) / (own / 255).std()
    # Convolutions are checked elsewhere; what gives one length is not.
    flat = np.asarray(x.layers(jnp.asarray(scaled)))
    around = flat - flat.mean(axis=1, keepdims=True)
    square = np.sum(around**2, axis=1, keepdims=True)
    expected = around * np.sqrt(10 / (square + 1e-6))
    found = model.scores(model.features(images))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
