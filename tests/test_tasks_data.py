"""The tasks on labeled data: their losses, their rows, and what they promise."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import datasets, tasks
from fedbilevel._types import Pair
from fedbilevel.algorithms.directions import hypergradient_and_slope
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import Oracle
from fedbilevel.problem.stored_rows import sources
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, count, execute
from fedbilevel.runtime.traced_calls import bodies
from fedbilevel.tasks import _labeled, cleaning, loss_tuning

NAMES = ("regularization", "cleaning", "representation", "loss-tuning")
CLASSES = 3


@pytest.fixture
def images(tmp_path):
    """Return the path of small images of bytes with an official test part."""
    draw = np.random.default_rng(0)
    arrays = {}
    for prefix, size in (("", 90), ("test_", 30)):
        arrays[f"{prefix}label"] = np.arange(size) % CLASSES
        arrays[f"{prefix}features"] = draw.integers(0, 256, (size, 4, 5), np.uint8)
    path = tmp_path / "images.npz"
    np.savez(path, **arrays)
    return str(path)


def make(name, *arguments, **options):
    return tasks.find(name)(*arguments, **options)


def perturbed(tree, seed):
    """Return a tree with random numbers in place of its own."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape)), tree)


def client_rows(task, client, level):
    """Return one client's rows of a level as NumPy arrays, without the padding."""
    size = int(getattr(task.data, f"{level}_sizes")[client])
    rows = getattr(task.data, level)
    return {name: np.asarray(leaf)[client, :size] for name, leaf in rows.items()}


def rows_for_testing(task):
    """Return features and labels of the tested rows, without the padding."""
    held = (task.metrics.features, task.metrics.label)
    return [np.asarray(rows)[: task.metrics.size] for rows in held]


def both_losses(task, x, y, client=1):
    """Return f_k and g_k over all rows, as a run would measure them."""
    oracle = Oracle(task.problem, task.data, client)

    @jax.jit
    def losses(x, y):
        return (
            oracle.upper_loss(x, y, oracle.all_upper()),
            oracle.lower_loss(x, y, oracle.all_lower()),
        )

    return losses(x, y)


def log_losses(scores, label):
    """Return -log softmax of the labels' scores, in NumPy."""
    top = scores.max(axis=1, keepdims=True)
    total = np.log(np.exp(scores - top).sum(axis=1)) + top[:, 0]
    return total - scores[np.arange(len(label)), label]


def pixels(path, features):
    """Return images as numbers of mean 0 and variance 1 over the training part."""
    with np.load(path) as file:
        every = file["features"] / 255
    return (features / 255 - every.mean()) / every.std()


def flat(features):
    return features.reshape(len(features), -1)


def dense(layer, inputs):
    return inputs @ np.asarray(layer.weight).T + np.asarray(layer.bias)


def sum_of_squares(tree):
    return sum(float(np.sum(np.asarray(leaf) ** 2)) for leaf in jax.tree.leaves(tree))


def sigmoid(values):
    return 1 / (1 + np.exp(-np.asarray(values)))


def test_losses_of_regularization(images):
    task = make("regularization", 3, data=images, train=0.5)
    x, y = 10 * perturbed(task.x, 1), perturbed(task.y, 2)
    values, W = [], np.asarray(y)
    for level in ("upper", "lower"):
        rows = client_rows(task, 1, level)
        scaled = flat(pixels(images, rows["features"])) / np.sqrt(20)
        scores = scaled @ W[:, :-1].T + W[:, -1]
        values.append(log_losses(scores, rows["label"]).mean())
    strength = np.exp(np.clip(np.asarray(x), -9, 0))
    values[1] += 0.5 * np.sum(strength * W**2)
    np.testing.assert_allclose(both_losses(task, x, y), values, rtol=1e-12)


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_losses_of_cleaning(images, model):
    options = {"data": images, "train": 0.5, "model": model, "width": 7, "penalty": 0.1}
    task = make("cleaning", 3, **options)
    x, y = perturbed(task.x, 1), perturbed(task.y, 2)

    def losses(rows):
        inputs = flat(pixels(images, rows["features"]))
        if model == "mlp":
            hidden = np.maximum(dense(y.hidden.layer, inputs), 0)
        else:
            hidden = inputs / np.sqrt(20)
        return log_losses(dense(y.head, hidden), rows["label"])

    lower = losses(client_rows(task, 1, "lower"))
    weighted = np.mean(sigmoid(x)[: len(lower)] * lower) + 0.1 * sum_of_squares(y)
    upper = losses(client_rows(task, 1, "upper"))
    # One's own labels are judges that may err: 1 - exp(-loss) is 1 - p(label).
    for trusted, judged in {"auto": 1 - np.exp(-upper), "true": upper}.items():
        task = make("cleaning", 3, trusted=trusted, **options)
        expected = (np.mean(judged), weighted)
        np.testing.assert_allclose(both_losses(task, x, y), expected, rtol=1e-12)


def test_losses_of_representation_with_one_hidden_layer(images):
    task = make("representation", 3, data=images, width=7, penalty=0.1)
    x, y = perturbed(task.x, 1), perturbed(task.y, 2)
    values = []
    for level in ("upper", "lower"):
        rows = client_rows(task, 1, level)
        inputs = flat(pixels(images, rows["features"]))
        scores = dense(y, np.maximum(dense(x.layer, inputs), 0))
        values.append(log_losses(scores, rows["label"]).mean())
    values[1] += 0.1 * sum_of_squares(y)
    np.testing.assert_allclose(both_losses(task, x, y), values, rtol=1e-12)


def convolved(layer, image):
    """Return one image after a layer: 3x3 windows, relu, means of 2x2 blocks."""
    height, width, _ = image.shape
    around = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    out = np.zeros((height, width, layer.weight.shape[0]))
    for i in range(height):
        for j in range(width):
            window = around[i : i + 3, j : j + 3].reshape(1, -1)
            out[i, j] = np.maximum(dense(layer, window)[0], 0)
    even = out[: height // 2 * 2, : width // 2 * 2]
    return (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]) / 4


def test_losses_of_representation_with_convolutions(images):
    task = make("representation", 3, data=images, model="convolutional", train=0.9)
    x, y = perturbed(task.x, 1), perturbed(task.y, 2)
    rows, scores = client_rows(task, 1, "upper"), []
    for image in pixels(images, rows["features"]):
        hidden = image[:, :, None]
        for layer in x.layers:
            hidden = convolved(layer, hidden)
        scores.append(dense(y, hidden.reshape(1, -1) / np.sqrt(hidden.size))[0])
    expected = log_losses(np.asarray(scores), rows["label"]).mean()
    np.testing.assert_allclose(both_losses(task, x, y)[0], expected, rtol=1e-12)


@pytest.mark.parametrize("setting", ["default", "fednest"])
def test_losses_of_loss_tuning(images, setting):
    task = make(
        "loss-tuning",
        3,
        data=images,
        train=0.5,
        setting=setting,
        model="linear",
        imbalance=4.0,
        penalty=0.1,
    )
    x, y = perturbed(task.x, 1), perturbed(task.y, 2)
    every = [client_rows(task, client, "upper")["label"] for client in range(3)]
    if setting == "fednest":
        weights = np.asarray([1, 2, 4]) / np.sqrt(1 + 4 + 16)
    else:
        sizes = np.bincount(np.concatenate(every))
        weights = sizes.sum() / 3 / sizes

    def scores(rows):
        inputs = pixels(images, rows["features"])
        if setting == "fednest":
            inputs = (rows["features"] / 255 - 0.1307) / 0.3081
        return dense(y.head, flat(inputs) / np.sqrt(20))

    up, low = client_rows(task, 1, "upper"), client_rows(task, 1, "lower")
    upper = np.mean(weights[up["label"]] * log_losses(scores(up), up["label"]))
    tuned = sigmoid(x["scales"]) * scores(low) + np.asarray(x["shifts"])
    lower = log_losses(tuned, low["label"]).mean() + 0.1 * sum_of_squares(y)
    np.testing.assert_allclose(both_losses(task, x, y), (upper, lower), rtol=1e-12)


def test_the_long_tail_has_the_published_counts():
    label = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))
    kept = loss_tuning.tail(label, 10, 100.0)
    expected = [6000, 3597, 2157, 1293, 775, 465, 279, 167, 101, 61]
    assert np.bincount(label[kept]).tolist() == expected
    assert len(set(kept.tolist())) == len(kept)
    # Rare classes are spread over the order, else only some clients would see them.
    rare = np.flatnonzero(label[kept] >= 5)
    assert rare.mean() == pytest.approx(len(kept) / 2, rel=0.1)
    # A class that is smaller than its place in the tail is kept as it is.
    shorter = np.concatenate([label[label != 0], np.zeros(500, label.dtype)])
    assert np.bincount(shorter[loss_tuning.tail(shorter, 10, 1.0)])[0] == 500


def test_both_levels_and_only_they_have_the_tail(images):
    task = make("loss-tuning", 3, data=images, imbalance=9.0)
    held = [
        client_rows(task, k, level) for k in range(3) for level in ("upper", "lower")
    ]
    label = np.concatenate([rows["label"] for rows in held])
    assert np.bincount(label).tolist() == [30, 10, 4]
    assert np.bincount(rows_for_testing(task)[1]).tolist() == [10, 10, 10]


def test_corruption_is_exact_wrong_and_drawn_once():
    dirty, again = (make("cleaning", 5, corrupted=0.3) for _ in range(2))
    clean = make("cleaning", 5, corrupted=0.0)
    jax.tree.map(np.testing.assert_array_equal, dirty.data, again.data)
    changes = set()
    for client in range(5):
        rows, true = (client_rows(task, client, "lower") for task in (dirty, clean))
        size, marks = len(rows["label"]), rows["corrupted"]
        assert marks.sum() == round(0.3 * size)
        np.testing.assert_array_equal(rows["label"] != true["label"], marks)
        np.testing.assert_array_equal(rows["features"], true["features"])
        np.testing.assert_array_equal(rows["index"], np.arange(size))
        changes |= set(((rows["label"] - true["label"])[marks] % 10).tolist())
    jax.tree.map(np.testing.assert_array_equal, dirty.data.upper, clean.data.upper)
    assert changes == set(range(1, 10))


def brute_force(score, positive):
    ours, others = score[positive], score[~positive]
    return np.mean([(p > n) + 0.5 * (p == n) for p in ours for n in others])


@pytest.mark.parametrize("values", [3, 1000])
def test_the_rank_statistic_counts_pairs(values):
    draw = np.random.default_rng(values)
    score = draw.integers(0, values, 60).astype(float)
    positive, counted = draw.random(60) < 0.4, draw.random(60) < 0.8
    expected = brute_force(score[counted], positive[counted])
    found = jax.jit(cleaning.rank_statistic)(score, positive, counted)
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_weights_are_compared_without_the_padding():
    task = make("cleaning", 4, partition="dirichlet:0.3", rows=300)
    marks, sizes = np.asarray(task.data.lower["corrupted"]), task.data.lower_sizes
    assert len(set(sizes.tolist())) > 1
    x = np.random.default_rng(0).normal(size=marks.shape)
    real = np.arange(marks.shape[1]) < np.asarray(sizes)[:, None]
    expected = brute_force(x[real], ~marks[real])
    assert cleaning.weight_auc(task, {"x": x}) == pytest.approx(expected, rel=1e-9)
    clean, corrupted = cleaning.mean_weights(task, {"x": x})
    assert clean == pytest.approx(sigmoid(x[real & ~marks]).mean())
    assert corrupted == pytest.approx(sigmoid(x[real & marks]).mean())
    with pytest.raises(InvalidInputError, match="Build the task with the run's opt"):
        cleaning.weight_auc(task, {"x": x[:2]})


@pytest.mark.slow
def test_the_weights_of_a_client_are_its_own():
    task = make("cleaning", 3, rows=200)
    algorithm = FedBiO(100.0, 1.0, 1.0, local_steps=3)
    job = Job.of(
        algorithm,
        task.problem,
        task.data,
        task.x,
        task.y,
        sampling=Sampling(8),
    )
    other = task.data.lower["label"].at[0].add(1) % 10
    changed = dataclasses.replace(task.data, lower={**task.data.lower, "label": other})
    x, x_changed = (
        execute(SimulatorRuntime(one), 1).state.joined().point.x
        for one in (job, dataclasses.replace(job, data=changed))
    )
    assert task.problem.private == Pair(True, False)
    assert x.shape == (3, task.x.size)
    assert (np.abs(x).max(axis=1) > 0).all()
    np.testing.assert_array_equal(x[1:], x_changed[1:])
    assert np.abs(x[0] - x_changed[0]).max() > 0
    # Only y and z travel.
    entries = sum(leaf.size for leaf in jax.tree.leaves(task.y))
    assert count(job, 1)["per_client_and_round"]["floats_up"] == 2 * entries


def test_dropout_is_part_of_the_sample():
    task = make("representation", 2, dropout=0.5, width=6, rows=200, penalty=0.1)
    oracle = Oracle(task.problem, task.data, 1, 4, 4)
    batch, same = oracle.draw_lower(jr.key(3)), oracle.draw_lower(jr.key(3))
    kept = np.asarray(batch.rows["kept"])
    assert kept.shape == (4, 6) and 0 < kept.sum() < kept.size
    np.testing.assert_array_equal(kept, same.rows["kept"])
    assert (kept != np.asarray(oracle.draw_lower(jr.key(4)).rows["kept"])).any()
    assert "kept" not in oracle.all_lower().rows
    x, y = perturbed(task.x, 1), perturbed(task.y, 2)
    rows = {name: np.asarray(leaf) for name, leaf in batch.rows.items()}
    hidden = np.maximum(dense(x.layer, rows["features"]), 0) * kept / 0.5
    expected = log_losses(dense(y, hidden), rows["label"]).mean()
    expected += 0.1 * sum_of_squares(y)
    np.testing.assert_allclose(oracle.lower_loss(x, y, batch), expected, rtol=1e-12)


@pytest.mark.parametrize(("rate", "bits"), [(0.5, 1), (0.25, 2), (0.3, 64)])
def test_dropout_takes_as_few_random_bits_as_it_can(rate, bits):
    """One bit of a flag where it is a coin; a whole number where 256 are not enough."""
    task = make("representation", 2, dropout=rate, width=32, rows=200)
    noise, rows = task.problem.lower_noise, {"label": jnp.zeros(64)}
    kept = np.asarray(noise(jr.key(5), rows)["kept"])
    assert kept.shape == (64, 32)
    deviation = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < 4 * deviation
    drawn = jax.make_jaxpr(lambda key: noise(key, rows)["kept"])(jr.key(0))
    assert bits_of(drawn.jaxpr) == bits * 64 * 32


def bits_of(jaxpr) -> int:
    """Return how many random bits a program draws."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "random_bits":
            wide = equation.params["bit_width"]
            found += wide * sum(one.aval.size for one in equation.outvars)
        found += sum(map(bits_of, bodies(equation.params)))
    return found


def test_both_points_of_a_correction_meet_the_same_mask():
    task = make("representation", 2, dropout=0.5, width=6, rows=200)
    oracle = Oracle(task.problem, task.data, 0, 4, 4)
    rule = Neumann(2, 0.1)
    blocks = hypergradient_and_slope(rule, oracle, jr.key(0))
    point = Pair(perturbed(task.x, 1), perturbed(task.y, 2))
    moved = Pair(perturbed(task.x, 3), perturbed(task.y, 4))
    # With one bundle the direction is a function of the point alone, ...
    for block in (blocks.x, blocks.y):
        jax.tree.map(np.testing.assert_array_equal, block(point), block(point))
        different = jax.tree.map(
            lambda a, b: (a != b).any(), block(point), block(moved)
        )
        assert all(jax.tree.leaves(different))
    # ... and with another bundle it is another one.
    others = hypergradient_and_slope(rule, oracle, jr.key(1))
    assert (blocks.y(point).bias != others.y(point).bias).any()


@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_regularization_has_the_rows_it_always_had(name):
    table = datasets.load(name)
    features, label = table.features, table.label
    spread = features.std(axis=0)
    features = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1)
    features = features / np.sqrt(features.shape[1])
    features = np.hstack([features, np.ones((len(features), 1))])
    order = np.random.default_rng(0).permutation(len(label))
    tested, trained = int(0.2 * len(label)), int(0.2 * len(label))
    test, rest = order[:tested], order[tested:]
    task = make("regularization", data=name)
    levels = {"lower": rest[:trained], "upper": rest[trained:]}
    for level, rows in levels.items():
        for client, part in enumerate(np.array_split(rows, 8)):
            found = client_rows(task, client, level)
            np.testing.assert_array_equal(found["features"], features[part])
            np.testing.assert_array_equal(found["label"], label[part])
    found_features, found_label = rows_for_testing(task)
    np.testing.assert_array_equal(found_features, features[test])
    np.testing.assert_array_equal(found_label, label[test])
    assert (task.recommended["upper_step"], task.recommended["rounds"]) == ("20", "200")


def test_test_metrics_count_rows_and_classes():
    label = jnp.asarray([0, 0, 0, 1, 2], jnp.int32)
    scores = jnp.eye(4)[jnp.asarray([0, 0, 1, 1, 0])]
    assert float(_labeled.accuracy(scores, label)) == pytest.approx(3 / 5)
    # Class 3 has no rows and does not count.
    expected = (2 / 3 + 1 + 0) / 3
    assert float(_labeled.balanced_accuracy(scores, label)) == pytest.approx(expected)


def test_many_test_rows_are_scored_in_parts():
    draw = np.random.default_rng(0)
    features = jnp.asarray(draw.normal(size=(1203, 4)))
    label = jnp.asarray(draw.integers(0, 3, 1203), jnp.int32)
    W = jnp.asarray(draw.normal(size=(3, 4)))
    size = jnp.asarray(1203, jnp.int32)
    held = _labeled.HeldOut(features, label, size, lambda x, y, rows: rows @ y.T)
    np.testing.assert_allclose(held.all_scores(None, W), features @ W.T, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_images_stay_bytes_and_the_official_test_part_is_used(name, images):
    task = make(name, 2, data=images, train=0.5)
    for rows in (task.data.upper, task.data.lower):
        assert rows["features"].dtype == jnp.uint8
        assert rows["features"].shape[2:] == (4, 5)
    with np.load(images) as file:
        found_features, found_label = rows_for_testing(task)
        np.testing.assert_array_equal(found_features, file["test_features"])
        np.testing.assert_array_equal(found_label, file["test_label"])
    assert all(np.isfinite(v) for v in task.metrics(task.x, task.y).values())


@pytest.mark.parametrize("scheme", ["iid", "dirichlet:0.3", "shards:2", "dominant:0.5"])
def test_every_row_is_held_once_and_levels_share_no_row(scheme, tmp_path):
    path = tmp_path / "table.npz"
    # The first feature numbers the rows; scaling keeps their order.
    features = np.stack([np.arange(100.0), np.ones(100)], axis=1)
    np.savez(path, features=features, label=np.arange(100) % 4)
    task = make("cleaning", 5, data=str(path), partition=scheme, train=0.4, split=3)
    found = {}
    for level in ("upper", "lower"):
        rows = [client_rows(task, k, level)["features"][:, 0] for k in range(5)]
        assert all(len(one) > 0 for one in rows)
        found[level] = np.concatenate(rows)
    assert abs(len(found["lower"]) - 40) <= 5
    left = rows_for_testing(task)[0][:, 0]
    everyone = np.concatenate([found["lower"], found["upper"], left])
    assert len(np.unique(everyone)) == len(everyone) == 100


def test_a_column_decides_who_the_clients_are(tmp_path):
    path = tmp_path / "sites.csv"
    draw = np.random.default_rng(0)
    lines = [f"{draw.normal()},{'abc'[i % 3]},{i % 2}" for i in range(90)]
    path.write_text("\n".join(["value,site,label", *lines]))
    task = make("regularization", data=str(path), partition="column:site")
    assert task.data.clients == 3


@pytest.mark.parametrize("name", [*NAMES, "architecture"])
def test_rows_limit_what_is_taken(name):
    more = {"imbalance": 1.0} if name == "loss-tuning" else {}
    task = make(name, 2, rows=100, **more)
    # Of the other four fifths loss-tuning leaves out what classes have too many.
    assert 60 < task.data.lower_sizes.sum() + task.data.upper_sizes.sum() <= 80


def test_rows_for_testing_are_of_those_that_are_taken():
    task = make("regularization", 2, rows=100)
    sizes = (task.data.lower_sizes.sum(), task.data.upper_sizes.sum())
    assert [int(size) for size in sizes] == [20, 60]
    assert len(rows_for_testing(task)[1]) == 20


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("cleaning", {"corrupted": 1.0}, "from 0 to below 1"),
        ("cleaning", {"model": "convolutional"}, "Known: linear, mlp"),
        ("cleaning", {"penalty": -1.0}, "penalty=-1.0: it must not be negative"),
        ("cleaning", {"model": "mlp", "width": -1}, "a hidden layer needs a unit"),
        ("representation", {"dropout": 1.0}, "a chance from 0 to below 1"),
        ("representation", {"setting": "fednets"}, "Did you mean 'fednest'"),
        ("representation", {"penalty": -1.0}, "penalty=-1.0: it must not be negative"),
        (
            "representation",
            {"model": "convolutional", "data": "wine"},
            r"shape \(13,\) is no image",
        ),
        ("loss-tuning", {"imbalance": 0.5}, "first class over the last"),
        ("loss-tuning", {"model": "tree"}, "unknown model 'tree'"),
        ("regularization", {"data": "digit"}, "Did you mean 'digits'"),
        ("regularization", {"partition": "shards"}, "write it as shards:2"),
        ("regularization", {"train": 0.9}, "a share between 0 and 0.8"),
        ("regularization", {"rows": 2000}, "digits has 1797"),
        ("regularization", {"rows": 20}, "Ask for fewer clients"),
        ("regularization", {"clients": -1}, "there must be at least one"),
    ],
)
def test_bad_options_are_named(name, options, told):
    with pytest.raises(InvalidInputError, match=told):
        make(name, **options)


def test_settings_of_fednest(images):
    task = make("representation", 3, setting="fednest", data=images)
    assert task.algorithm == "fednest" and task.recommended["batch"] == "64"
    assert task.x.layer.weight.shape == (200, 20)
    assert task.data.lower_sizes.sum() == 45
    apart = make("loss-tuning", 3, setting="fednest", data=images, partition="shards:2")
    assert apart.y.hidden.layer.weight.shape == (200, 20)
    sizes = (apart.data.lower_sizes.sum(), apart.data.upper_sizes.sum())
    assert int(sizes[0]) / int(sizes[1]) == pytest.approx(4, rel=0.3)
    assert make("representation", setting="fednest").data.clients == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounds", "gain"),
    [
        ("regularization", 20, 0.7),
        ("cleaning", 20, 0.6),
        ("representation", 30, 0.7),
    ],
)
def test_a_short_run_improves_the_headline(name, rounds, gain):
    # The default of most tasks takes several times longer to compile.
    algorithm = None if name == "cleaning" else "fedbio"
    result = Experiment(name, algorithm, clients=4, rounds=rounds, batch=16).run()
    headline = result.columns[result.config["headline"]]
    assert headline[-1] < gain * headline[0]
    if name == "cleaning":
        task = make(name, 4)
        assert result.algorithm == task.algorithm == "fedbio"
        assert cleaning.weight_auc(task, result.point) > 0.9
        clean, corrupted = cleaning.mean_weights(task, result.point)
        assert clean > 0.5 > corrupted


def test_only_clean_rows_are_kept():
    every, clean = make("cleaning", 3), make("cleaning", 3, kept="clean")
    assert not clean.data.lower["corrupted"].any()
    for client in range(3):
        rows, kept = (client_rows(task, client, "lower") for task in (every, clean))
        chosen = ~rows["corrupted"]
        np.testing.assert_array_equal(kept["label"], rows["label"][chosen])
        np.testing.assert_array_equal(kept["features"], rows["features"][chosen])
        np.testing.assert_array_equal(kept["index"], np.arange(chosen.sum()))


def test_images_in_a_mapped_file_stay_there(images, tmp_path):
    folder = tmp_path / "mapped"
    folder.mkdir()
    with np.load(images) as file:
        for name, array in file.items():
            np.save(folder / f"{name}.npy", array)
    task = make("cleaning", 3, data=str(folder))
    (source,) = sources(task.data.lower)
    assert isinstance(source.array, np.memmap)
    assert Path(str(source.array.filename)) == folder / "features.npy"
    plain = make("cleaning", 3, data=images)
    for kind in ("draw_upper", "draw_lower"):
        here, there = (
            getattr(Oracle(one.problem, one.data, 1, 4, 4), kind)(jr.key(0)).rows
            for one in (plain, task)
        )
        for name, leaf in here.items():
            np.testing.assert_array_equal(leaf, there[name])
