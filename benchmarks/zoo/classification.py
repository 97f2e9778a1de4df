"""Linear classifiers below: wrong labels, weights of rows, domains and losses above."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from benchmarks.zoo.cases import (
    Case,
    classes,
    cross_entropy,
    digits,
    federated,
    halves,
    listed,
    row_entropies,
    squares,
    taken,
)

from fedbilevel import Problem, Sampling
from fedbilevel.algorithms.wrappers import simplex


def _softmax(x, y, batch):
    return cross_entropy(batch["a"] @ y["w"] + y["b"], batch["t"])


def _linear(columns: int, count: int) -> dict:
    return {"w": np.zeros((columns, count)), "b": np.zeros(count)}


def _decayed(x, y, batch):
    return _softmax(x, y, batch) + jnp.sum(jnp.exp(x)[:, None] * y["w"] ** 2)


@listed("Softmax regression on digits with a strength exp(x) per pixel.")
def digit_strengths(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(digits(draw), draw), partition, draw)
    start = (np.full(64, -4.0), _linear(64, 10))
    return Case(Problem(_softmax, _decayed), data, start)


def _scaled_logistic(x, y, batch):
    return jnp.mean(jax.nn.softplus(-batch["s"] * (batch["a"] @ (jnp.exp(x) * y))))


@listed("Separable classes without regularization, so that y has no finite minimizer.")
def separable(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    a, truth = draw.normal(size=(400, 10)), draw.normal(size=10)
    a, sign = a + 0.3 * np.sign(a @ truth)[:, None] * truth, np.sign(a @ truth)
    rows = {"a": a, "s": sign, "t": (sign > 0).astype(np.int32)}
    data = federated(halves(rows, draw), partition, draw)
    start = (np.zeros(10), np.zeros(10))
    return Case(Problem(_scaled_logistic, _scaled_logistic), data, start)


def _tempered(x, y, batch):
    logits = (batch["a"] @ y["w"] + y["b"]) * jnp.exp(x["heat"]) + x["shift"]
    return cross_entropy(logits, batch["t"])


@listed("Softmax without decay: redundant below, and x scales and shifts its logits.")
def temperature(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(classes(draw, 500, 15, 5), draw), partition, draw)
    x = {"heat": np.asarray(0.0), "shift": np.zeros(5)}
    return Case(Problem(_softmax, _tempered), data, (x, _linear(15, 5)))


def _hinge(x, y, batch):
    return jnp.mean(jax.nn.relu(1 - batch["s"] * (batch["a"] @ y)))


def _hinge_lower(x, y, batch):
    return _hinge(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)


@listed("A support vector machine: kinks, and no curvature but that of the penalty.")
def hinge(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    rows = classes(draw, 400, 15, 2, 0.6)
    rows = {**rows, "s": 2.0 * rows["t"] - 1}
    data = federated(halves(rows, draw), partition, draw)
    start = (np.full(15, -4.0), np.zeros(15))
    return Case(Problem(_hinge, _hinge_lower), data, start)


def _weighted_rows(x, y, batch):
    losses = row_entropies(batch["a"] @ y["w"] + y["b"], batch["t"])
    return jnp.mean(jax.nn.sigmoid(x[batch["i"]]) * losses) + 1e-3 * squares(y)


def noisy_levels(rows, share: float, draw: np.random.Generator):
    """Return clean upper rows, and numbered lower rows with some wrong labels."""
    upper, lower = halves(rows, draw)
    count = len(lower["t"])
    wrong = draw.random(count) < share
    other = draw.integers(rows["t"].max() + 1, size=count)
    labels = np.where(wrong, other, lower["t"]).astype(np.int32)
    numbered = {**lower, "t": labels, "i": np.arange(count, dtype=np.int32)}
    return {**upper, "i": np.zeros(len(upper["t"]), np.int32)}, numbered


@listed("Half of the labels below are drawn anew; x has a weight for every row.")
def cleaning(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    levels = noisy_levels(digits(draw), 0.5, draw)
    data = federated(levels, partition, draw)
    return Case(
        Problem(_softmax, _weighted_rows), data, (np.zeros(500), _linear(64, 10))
    )


def _exponential_rows(x, y, batch):
    losses = row_entropies(batch["a"] @ y["w"] + y["b"], batch["t"])
    return jnp.mean(jnp.exp(x[batch["i"]]) * losses) + 1e-2 * squares(y)


@listed("Cleaning with 4,000 weights exp(x), which have no bound.")
def many_weights(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    upper, lower = noisy_levels(classes(draw, 8000, 10, 4), 0.4, draw)
    levels = (taken(upper, np.arange(1000)), lower)
    data = federated(levels, partition, draw)
    start = (np.zeros(4000), _linear(10, 4))
    return Case(Problem(_softmax, _exponential_rows), data, start)


def _class_weights(x, y, batch):
    losses = row_entropies(batch["a"] @ y["w"] + y["b"], batch["t"])
    return jnp.mean(jnp.exp(x[batch["t"]]) * losses) + 1e-3 * squares(y)


@listed(
    "Balanced classes above and rare ones below, with loss weights exp(x) per class."
)
def rare_classes(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    rows = classes(draw, 3000, 10, 5, 0.6)
    upper, lower = halves(rows, draw)
    kept = draw.random(1500) < 0.5 ** (2 * lower["t"])
    levels = (taken(upper, np.arange(300)), taken(lower, np.flatnonzero(kept)[:360]))
    data = federated(levels, partition, draw)
    return Case(Problem(_softmax, _class_weights), data, (np.zeros(5), _linear(10, 5)))


def _domain_weights(x, y, batch):
    losses = row_entropies(batch["a"] @ y["w"] + y["b"], batch["t"])
    return jnp.mean(6 * x[batch["d"]] * losses) + 1e-2 * squares(y)


@listed("Six sources of rows, of which two are useful; their weights are on a simplex.")
def domains(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    rows, d = classes(draw, 800, 12, 4), draw.integers(6, size=800).astype(np.int32)
    upper, lower = halves({**rows, "d": d}, draw)
    wrong = (lower["t"] + lower["d"]) % 4
    lower = {**lower, "t": np.where(lower["d"] < 2, lower["t"], wrong)}
    data = federated((upper, lower), partition, draw)
    start = (np.full(6, 1 / 6), _linear(12, 4))
    return Case(Problem(_softmax, _domain_weights), data, start, wrap=simplex)


def _tilted(x, y, batch):
    losses = row_entropies(batch["a"] @ y["w"] + y["b"], batch["t"])
    return jnp.mean(jnp.expm1(losses))


def _group_weights(x, y, batch):
    losses = row_entropies(batch["a"] @ y["w"] + y["b"], batch["t"])
    return jnp.mean(3 * jax.nn.softmax(x)[batch["d"]] * losses) + 1e-2 * squares(y)


@listed("Weights of three groups below, an exponential loss of the worst rows above.")
def fair_groups(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    rows, d = classes(draw, 900, 8, 2), draw.choice(3, 900, p=[0.8, 0.15, 0.05])
    flipped = {**rows, "a": rows["a"] * np.where(d == 2, -0.3, 1)[:, None]}
    levels = halves({**flipped, "d": d.astype(np.int32)}, draw)
    data = federated(levels, partition, draw)
    return Case(Problem(_tilted, _group_weights), data, (np.zeros(3), _linear(8, 2)))


@listed("Breast cancer with columns as they come, from thousandths to thousands.")
def raw_columns(seed: int, partition: str) -> Case:
    from sklearn.datasets import load_breast_cancer

    draw = np.random.default_rng(seed)
    a, t = map(np.asarray, load_breast_cancer(return_X_y=True))
    data = federated(halves({"a": a, "t": t.astype(np.int32)}, draw), partition, draw)
    start = (np.full(30, -5.0), _linear(30, 2))
    return Case(Problem(_softmax, _decayed), data, start)


def _focal(x, y, batch):
    losses = row_entropies(batch["a"] @ y["w"] + y["b"], batch["t"])
    sharp = jax.nn.softplus(x["sharp"])
    return jnp.mean((1 - jnp.exp(-losses) + 1e-6) ** sharp * losses) + jnp.exp(
        x["decay"]
    ) * squares(y)


@listed("The exponent of a focal loss and a decay are learned, with wrong labels.")
def focal(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    levels = noisy_levels(classes(draw, 600, 15, 4), 0.3, draw)
    data = federated(levels, partition, draw)
    x = {"sharp": np.asarray(0.0), "decay": np.asarray(-3.0)}
    return Case(Problem(_softmax, _focal), data, (x, _linear(15, 4)))


def _shaken(x, y, batch):
    shaken = batch["a"] + jnp.exp(x) * batch["e"]
    return cross_entropy(shaken @ y["w"] + y["b"], batch["t"]) + 1e-3 * squares(y)


def _shake(key, batch):
    return {**batch, "e": jr.normal(key, batch["e"].shape)}


@listed("Noise is added to the columns below; x is the logarithm of its sizes.")
def augmentation(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    rows = classes(draw, 400, 30, 4, 0.6)
    rows = {**rows, "e": np.zeros((400, 30))}
    data = federated(halves(rows, draw), partition, draw)
    problem = Problem(_softmax, _shaken, lower_noise=_shake)
    return Case(problem, data, (np.full(30, -1.0), _linear(30, 4)))


@listed("Two thousand columns that are mostly 0, with as many strengths above.")
def sparse_columns(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    a = (draw.random((400, 2000)) < 0.02).astype(float)
    t = (a @ draw.normal(size=2000) > 0).astype(np.int32)
    data = federated(halves({"a": a, "t": t}, draw), partition, draw)
    start = (np.full(2000, -5.0), _linear(2000, 2))
    return Case(Problem(_softmax, _decayed), data, start, rounds=100)


def _against(x, y, batch):
    logits = (batch["a"] + y) @ x["w"] + x["b"]
    return cross_entropy(logits, batch["t"]) - 5 * squares(y)


def _minus_against(x, y, batch):
    return -_against(x, y, batch)


@listed("A classifier above, a shift of its columns that harms it most below.")
def adversary(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(classes(draw, 500, 12, 4), draw), partition, draw)
    start = (_linear(12, 4), np.zeros(12))
    return Case(Problem(_against, _minus_against), data, start, opposed=True)


def _distilled(x, y, batch):
    labels = jnp.arange(20) % 10
    return cross_entropy(x @ y["w"] + y["b"], labels) + 0.01 * squares(y)


@listed("Twenty images, 1,280 pixels in all, on which alone y is trained.")
def distillation(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(digits(draw), draw), partition, draw)
    x = np.asarray(draw.random((20, 64)))
    return Case(Problem(_softmax, _distilled), data, (x, _linear(64, 10)))


def _mixed_strengths(x, y, batch):
    penalty = jnp.sum(jax.nn.softplus(x) * jnp.linalg.norm(y["w"], axis=1))
    return _softmax(x, y, batch) + 0.1 * penalty


@listed("Unsquared norms of the weights of every pixel; many pixels are always 0.")
def column_norms(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(digits(draw), draw), partition, draw)
    y = {**_linear(64, 10), "w": np.asarray(0.1 * draw.normal(size=(64, 10)))}
    start = (np.full(64, -2.0), y)
    return Case(Problem(_softmax, _mixed_strengths), data, start, Sampling(16, 5))


def _decay_between(x, y, batch):
    return _softmax(x, y, batch) + 10 * jax.nn.sigmoid(x) * squares(y)


@listed("One strength, begun so strong that y stays at 0 until x has gone far.")
def strong_start(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(classes(draw, 500, 20, 5), draw), partition, draw)
    start = (np.asarray(1.0), _linear(20, 5))
    return Case(Problem(_softmax, _decay_between), data, start)
