"""Regressions below: no curvature, heavy tails, kinks, ill-conditioned columns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.zoo.cases import (
    Case,
    federated,
    halves,
    line,
    listed,
    normal,
    split,
    squares,
)

from fedbilevel import ClientData, Problem, Sampling
from fedbilevel.algorithms.wrappers import box


def _squared_error(x, y, batch):
    return jnp.mean((batch["a"] @ y - batch["t"]) ** 2)


def _ridge(x, y, batch):
    return _squared_error(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)


@listed("One ridge strength exp(x) per column of a regression with useless columns.")
def ridge(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(line(draw, 400, 20), draw), partition, draw)
    return Case(Problem(_squared_error, _ridge), data, (np.zeros(20), np.zeros(20)))


def _scaled_error(x, y, batch):
    return jnp.mean((batch["a"] @ (jnp.exp(x) * y) - batch["t"]) ** 2)


@listed("Least squares of rank 10 in 60 columns without decay; x scales the columns.")
def rank_deficient(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    rows = line(draw, 400, 10)
    rows = {**rows, "a": rows["a"] @ draw.normal(size=(10, 60)) / 10**0.5}
    data = federated(halves(rows, draw), partition, draw)
    start = (np.zeros(60), np.zeros(60))
    return Case(Problem(_scaled_error, _scaled_error), data, start)


def _distance_upper(x, y, batch):
    return jnp.mean(jnp.sum((y - batch["c"]) ** 2, -1)) + 0.1 * squares(x)


def _flat_lower(x, y, batch):
    return jnp.mean(jnp.sum(batch["a"] * (y - x - batch["c"]) ** 2, -1)) / 2


@listed("A quadratic below that is flat in half of the coordinates of y.")
def zero_curvature(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    weights = np.where(np.arange(20) < 10, draw.uniform(0.1, 10, 20), 0)
    c = draw.normal(size=(400, 20)) + draw.normal(size=20)
    rows = {"a": np.tile(weights, (400, 1)), "c": c, "t": c[:, 0]}
    data = federated(halves(rows, draw), partition, draw)
    start = (np.zeros(20), 3 * np.ones(20))
    return Case(Problem(_distance_upper, _flat_lower), data, start)


def _huber(error, width):
    size = jnp.abs(error)
    return jnp.where(size < width, error**2 / 2, width * (size - width / 2))


def _robust_upper(x, y, batch):
    return jnp.mean(_huber(batch["a"] @ y - batch["t"], 1.0))


def _shaped_lower(x, y, batch):
    error = batch["a"] @ y - batch["t"]
    return jnp.mean(_huber(error, jnp.exp(x[0]))) + jnp.exp(x[1]) * squares(y)


@listed("The shape of the loss is learned: Huber's width and a ridge, with outliers.")
def huber_width(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    rows = line(draw, 400, 15)
    outliers = 30 * draw.normal(size=400) * (draw.random(400) < 0.2)
    rows = {**rows, "t": rows["t"] + outliers}
    data = federated(halves(rows, draw), partition, draw)
    start = (np.asarray([3.0, -3.0]), np.zeros(15))
    return Case(Problem(_robust_upper, _shaped_lower), data, start)


def _log_cosh(x, y, batch):
    error = batch["a"] @ y - batch["t"]
    return jnp.mean(jnp.logaddexp(error, -error) - jnp.log(2.0))


def _gated_squares(x, y, batch):
    trust = jax.nn.sigmoid(jnp.abs(batch["a"]) @ x)
    return jnp.mean(trust * (batch["a"] @ y - batch["t"]) ** 2) + 0.01 * squares(y)


@listed("Columns and noise without variance; x says by size which rows to trust.")
def heavy_tails(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    a = draw.standard_t(2.5, size=(400, 10))
    rows = {"a": a, "t": a @ draw.normal(size=10) + draw.standard_t(1.5, size=400)}
    data = federated(halves(rows, draw), partition, draw)
    start = (np.zeros(10), np.zeros(10))
    return Case(Problem(_log_cosh, _gated_squares), data, start)


@listed("Columns of scales from 1e-3 to 1e3 in float32, a ridge strength for each.")
def column_scales(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    rows = line(draw, 400, 12)
    rows = {**rows, "a": rows["a"] * draw.permutation(np.logspace(-3, 3, 12))}
    data = federated(halves(rows, draw), partition, draw)
    start = (np.full(12, -5.0), np.zeros(12))
    return Case(Problem(_squared_error, _ridge), data, start)


def _counts_upper(x, y, batch):
    rate = batch["a"] @ y
    return jnp.mean(jnp.exp(rate) - batch["t"] * rate)


def _counts_lower(x, y, batch):
    return _counts_upper(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)


@listed("Counts with an exponential loss, whose curvature has no bound.")
def poisson(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    a = draw.normal(size=(500, 10))
    rate = np.exp(np.clip(a @ (0.5 * draw.normal(size=10)) + 1, -5, 5))
    rows = {"a": a, "t": draw.poisson(rate).astype(float)}
    data = federated(halves(rows, draw), partition, draw)
    start = (np.full(10, -2.0), np.zeros(10))
    return Case(Problem(_counts_upper, _counts_lower), data, start)


def _group_lower(x, y, batch):
    norms = jnp.linalg.norm(y.reshape(8, 5), axis=1)
    return _squared_error(x, y, batch) + jnp.sum(jnp.exp(x) * norms)


@listed("Unsquared norms of groups of columns, each with a strength exp(x).")
def group_norms(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(line(draw, 400, 40), draw), partition, draw)
    start = (np.full(8, -1.0), np.asarray(draw.normal(size=40)))
    return Case(Problem(_squared_error, _group_lower), data, start)


def _lasso_lower(x, y, batch):
    return _squared_error(x, y, batch) + jnp.exp(x) * jnp.sum(jnp.abs(y))


@listed("The strength of an l1 penalty, a single number x, with kinks at zero.")
def lasso(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(line(draw, 300, 50, 1.0), draw), partition, draw)
    start = (np.asarray(-3.0), np.zeros(50))
    return Case(Problem(_squared_error, _lasso_lower), data, start)


def _pinball(x, y, batch):
    error = batch["t"] - batch["a"] @ y
    return jnp.mean(jnp.maximum(0.8 * error, -0.2 * error))


def _pinball_lower(x, y, batch):
    return _pinball(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)


@listed("Quantile regression: piecewise linear, curved only by a weak ridge.")
def quantile(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(line(draw, 400, 15), draw), partition, draw)
    start = (np.full(15, -6.0), np.zeros(15))
    return Case(Problem(_pinball, _pinball_lower), data, start)


def _ratings(x, y, batch):
    user, item = y["user"][batch["u"]], y["item"][batch["i"]]
    return jnp.mean((jnp.sum(user * item, -1) - batch["t"]) ** 2)


def _ratings_lower(x, y, batch):
    strengths = jax.nn.softplus(x["user"]) * squares(y["user"])
    strengths += jax.nn.softplus(x["item"]) * squares(y["item"])
    return _ratings(x, y, batch) + strengths / 100


@listed("Matrix factorization below, not convex, two strengths above.")
def factorization(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    user, item = draw.normal(size=(40, 3)), draw.normal(size=(30, 3))
    u, i = draw.integers(40, size=1500), draw.integers(30, size=1500)
    t = np.sum(user[u] * item[i], -1) + 0.3 * draw.normal(size=1500)
    rows = {"u": u.astype(np.int32), "i": i.astype(np.int32), "t": t}
    data = federated(halves(rows, draw), partition, draw)
    x = {"user": np.asarray(0.0), "item": np.asarray(0.0)}
    own = [np.asarray(0.3 * draw.normal(size=(n, 3))) for n in (40, 30)]
    start = (x, {"user": own[0], "item": own[1]})
    return Case(Problem(_ratings, _ratings_lower), data, start, Sampling(16))


def _adversarial(x, y, batch):
    error = (batch["a"] + y) @ x - batch["t"]
    return jnp.mean(error**2) - 10 * squares(y)


def _negative(x, y, batch):
    return -_adversarial(x, y, batch)


@listed(
    "The lower loss is minus the upper: a regression against a shift of its columns."
)
def minimax(seed: int, partition: str) -> Case:
    # It is concave in y only while ||x||^2 < 10.
    draw = np.random.default_rng(seed)
    data = federated(halves(line(draw, 400, 10), draw), partition, draw)
    start = (np.zeros(10), np.zeros(10))
    return Case(Problem(_adversarial, _negative), data, start, opposed=True)


def _wavy_lower(x, y, batch):
    bowl = jnp.mean(jnp.sum((y - x * batch["c"]) ** 2, -1)) / 2
    return bowl + 0.3 * jnp.sum(jnp.cos(3 * y))


@listed("A lower level with many local minima, curved either way.")
def wavy(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    c = 1 + 0.5 * draw.normal(size=(400, 10))
    data = federated(halves({"c": c, "t": c[:, 0]}, draw), partition, draw)
    start = (np.full(10, 3.0), np.full(10, 3.0))
    return Case(Problem(_distance_upper, _wavy_lower), data, start)


def _plain_ridge(x, y, batch):
    return _squared_error(x, y, batch) + jnp.sum(x * y**2)


@listed("Ridge strengths that are x itself, kept between 0 and 10 by projection.")
def boxed_ridge(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(line(draw, 300, 30, 1.0), draw), partition, draw)
    start = (np.full(30, 0.1), np.zeros(30))
    wrap = partial(box, low=0.0, high=10.0)
    return Case(Problem(_squared_error, _plain_ridge), data, start, wrap=wrap)


@listed("Sites measure in units of their own, from 0.1 to 10 times those of others.")
def site_scales(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    levels = split(halves(line(draw, 400, 10), draw), partition, draw)
    upper, lower = (
        [
            {name: column * scale for name, column in rows.items()}
            for rows, scale in zip(level, np.logspace(-1, 1, 10), strict=True)
        ]
        for level in levels
    )
    data = ClientData.from_clients(upper, lower)
    start = (np.zeros(10), np.zeros(10))
    return Case(Problem(_squared_error, _ridge), data, start)


@listed("Forty sites with one row for each level; four of them take part in a round.")
def one_row_sites(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(line(draw, 120, 5), draw), partition, draw, clients=40)
    start = (np.zeros(5), np.zeros(5))
    sampling = Sampling(batch=1, participants=4)
    return Case(Problem(_squared_error, _ridge), data, start, sampling)


def _prior_lower(x, y, batch):
    return _squared_error(x, y, batch) + 0.1 * squares(y - x)


@listed(
    "The center that y is drawn to is learned, in more columns than a site has rows."
)
def prior(seed: int, partition: str) -> Case:
    draw = np.random.default_rng(seed)
    data = federated(halves(line(draw, 200, 40), draw), partition, draw)
    start = (np.zeros(40), normal(draw, (40,))[0])
    return Case(Problem(_squared_error, _prior_lower), data, start)
