"""Networks: features above and a head below, or a whole network below."""

import equinox as eqx
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
    normal,
    row_entropies,
    squares,
)
from benchmarks.zoo.classification import noisy_levels

from fedbilevel import Problem, Sampling

WIDTH = 24  # of hidden layers; 200 in FedNest's experiment


def _dropped_logits(x, y, batch):
    hidden = jax.nn.relu(batch["a"] @ x["w"] + x["b"])
    return (batch["m"] * hidden) @ y["w"] + y["b"]


def _fednest_upper(x, y, batch):
    return cross_entropy(_dropped_logits(x, y, batch), batch["t"])


def _fednest_lower(x, y, batch):
    size = jnp.linalg.norm(y["w"]) + jnp.linalg.norm(y["b"])
    return _fednest_upper(x, y, batch) + 0.05 * size


def _drop(key, batch):
    kept = jr.bernoulli(key, 0.5, batch["m"].shape)
    return {**batch, "m": 2.0 * kept}


@listed(
    "FedNest's published problem, small: unsquared norms, dropout, 10 of 100 clients."
)
def fednest(seed: int, partition: str) -> Case:
    # Its network is 784-200-10 on MNIST with batches of 64; this one is 64-24-10 on
    # digits with batches of 16.
    draw = np.random.default_rng(seed)
    rows = digits(draw, 1797)
    rows = {**rows, "m": np.ones((1797, WIDTH))}
    data = federated(halves(rows, draw), partition, draw, clients=100)
    first, last = normal(draw, (64, WIDTH), (WIDTH, 10))
    # The norm of a bias of zeros has no gradient; PyTorch draws biases, too.
    bias = np.asarray(draw.uniform(-1, 1, 10) / WIDTH**0.5)
    start = ({"w": first, "b": np.zeros(WIDTH)}, {"w": last, "b": bias})
    problem = Problem(
        _fednest_upper, _fednest_lower, upper_noise=_drop, lower_noise=_drop
    )
    return Case(problem, data, start, Sampling(batch=16, participants=10))


def _head_logits(x, y, batch):
    return jax.vmap(x)(batch["a"]) @ y["w"] + y["b"]


def _head(x, y, batch):
    return cross_entropy(_head_logits(x, y, batch), batch["t"])


def _decayed_head(x, y, batch):
    return _head(x, y, batch) + 1e-3 * squares(y)


def _features(inputs: int, depth: int, seed: int) -> eqx.nn.MLP:
    last = {"final_activation": jax.nn.relu, "key": jr.key(seed)}
    return eqx.nn.MLP(inputs, WIDTH, WIDTH, depth, **last)


@listed("An Equinox network of two layers above, a linear head with decay below.")
def representation(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(digits(draw), draw), partition, draw)
    head = {"w": normal(draw, (WIDTH, 10))[0], "b": np.zeros(10)}
    start = (_features(64, 1, seed), head)
    return Case(Problem(_head, _decayed_head), data, start)


@listed("A network of four layers above, and a head of zeros without decay below.")
def deep_features(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(digits(draw), draw), partition, draw)
    head = {"w": np.zeros((WIDTH, 10)), "b": np.zeros(10)}
    return Case(Problem(_head, _head), data, (_features(64, 3, seed), head))


def _head_error(x, y, batch):
    return jnp.mean((jnp.tanh(batch["a"] @ x) @ y - batch["t"]) ** 2)


@listed("Features for a regression of waves; the head has no decay.")
def sine_features(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    a = draw.normal(size=(600, 4))
    t = np.sin(2 * a[:, 0]) + np.cos(a[:, 1] * a[:, 2]) + 0.1 * draw.normal(size=600)
    data = federated(halves({"a": a, "t": t}, draw), partition, draw)
    start = (normal(draw, (4, 32))[0], np.zeros(32))
    return Case(Problem(_head_error, _head_error), data, start)


def _layers(columns, y):
    for weights in y[:-1]:
        columns = jax.nn.relu(columns @ weights["w"] + weights["b"])
    return columns @ y[-1]["w"] + y[-1]["b"]


def _network(draw: np.random.Generator, *widths: int) -> list[dict[str, np.ndarray]]:
    shapes = zip(widths[:-1], widths[1:], strict=True)
    return [{"w": w, "b": np.zeros(w.shape[1])} for w in normal(draw, *shapes)]


def _network_upper(x, y, batch):
    return cross_entropy(_layers(batch["a"], y), batch["t"])


def _decay_by_layer(x, y, batch):
    penalties = [jnp.exp(one) * squares(layer) for one, layer in zip(x, y, strict=True)]
    return _network_upper(x, y, batch) + sum(penalties)


@listed("A network with one hidden layer below, the decay of each layer above.")
def network_decay(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(digits(draw, 600), draw), partition, draw)
    start = (np.full(2, -6.0), _network(draw, 64, WIDTH, 10))
    return Case(Problem(_network_upper, _decay_by_layer), data, start)


def _scaled_inputs(x, y, batch):
    return cross_entropy(_layers(batch["a"] * jnp.exp(x), y), batch["t"])


@listed("Two hidden layers below without decay, the scales of all pixels above.")
def deep_network(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(digits(draw, 600), draw), partition, draw)
    start = (np.zeros(64), _network(draw, 64, WIDTH, WIDTH, 10))
    return Case(Problem(_scaled_inputs, _scaled_inputs), data, start)


def _network_rows(x, y, batch):
    losses = row_entropies(_layers(batch["a"], y), batch["t"])
    return jnp.mean(jax.nn.sigmoid(x[batch["i"]]) * losses) + 1e-4 * squares(y)


@listed("Wrong labels for a network below, a weight for every row above.")
def network_cleaning(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(noisy_levels(digits(draw), 0.4, draw), partition, draw)
    start = (np.zeros(500), _network(draw, 64, WIDTH, 10))
    return Case(Problem(_network_upper, _network_rows), data, start)


def _weighed_by_loss(x, y, batch):
    losses = row_entropies(batch["a"] @ y, batch["t"])
    hidden = jnp.tanh(losses[:, None] * x["in"] + x["shift"])
    return jnp.mean(jax.nn.sigmoid(hidden @ x["out"]) * losses) + 1e-3 * squares(y)


def _plain_upper(x, y, batch):
    return cross_entropy(batch["a"] @ y, batch["t"])


@listed("A network above gives a row its weight by its loss; labels are wrong below.")
def weighting_network(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    levels = noisy_levels(classes(draw, 600, 15, 4), 0.4, draw)
    data = federated(levels, partition, draw)
    width = np.asarray(draw.normal(size=(3, 16)))
    x = {"in": width[0], "shift": width[1], "out": width[2] / 4}
    start = (x, np.zeros((15, 4)))
    return Case(Problem(_plain_upper, _weighed_by_loss), data, start)


def _reconstructed(x, y, batch):
    code = jnp.tanh(batch["a"] @ y["encode"])
    return jnp.mean(jnp.sum((code @ y["decode"] - batch["a"]) ** 2, -1))


def _coded_lower(x, y, batch):
    code = jnp.tanh(batch["a"] @ y["encode"])
    error = (code @ y["decode"] - batch["a"]) ** 2
    weights = 64 * jax.nn.softmax(x)
    return jnp.mean(jnp.sum(weights * error, -1)) + 1e-3 * squares(y)


@listed("An autoencoder below, the weights of pixels in its loss above.")
def autoencoder(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(digits(draw, 600), draw), partition, draw)
    encode, decode = normal(draw, (64, 12), (12, 64))
    start = (np.zeros(64), {"encode": encode, "decode": decode})
    return Case(Problem(_reconstructed, _coded_lower), data, start)
