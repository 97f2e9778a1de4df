"""Sampling, padding, evaluation over all rows, and the oracle's derivatives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData, Oracle, Problem
from fedbilevel.runtime import (
    Job,
    ReferenceRuntime,
    SimulatorRuntime,
    checkpoint,
    compilation,
    execute,
)

# Client 2 has as many rows on both levels: one key for two samples would show there.
UPPER_SIZES, LOWER_SIZES = (5, 1, 4), (2, 6, 4)
CLIENTS = range(3)
DRAWS = 20_000
FEATURES = 3

by_seed = settings(max_examples=15)
seeds = given(seed=st.integers(0, 2**31 - 1))


def upper(x, y, rows):
    margin = rows["u"] @ y["w"] + y["c"] * jnp.sum(x["p"])
    return jnp.mean(jnp.tanh(margin + rows["v"] * x["q"]) ** 2 + jnp.exp(0.1 * margin))


def lower(x, y, rows):
    margin = rows["u"] @ y["w"] * jnp.exp(x["q"]) + y["c"]
    data = jnp.mean(jnp.logaddexp(0.0, margin) + jnp.sin(rows["v"] * margin))
    return data + jnp.sum(jnp.exp(x["p"])) * (jnp.sum(y["w"] ** 4) + y["c"] ** 2)


def noise(key, rows):
    return {**rows, "v": rows["v"] + jr.normal(key, rows["v"].shape)}


EXACT = Problem(upper, lower)
NOISY = Problem(upper, lower, noise, noise)


def client_rows(size, client, seed):
    draw = np.random.default_rng([seed, client])
    return {
        "id": 100 * client + np.arange(size),
        "u": draw.standard_normal((size, FEATURES)),
        "v": draw.standard_normal(size),
    }


def raw_rows(seed=0):
    return (
        [client_rows(size, k, 2 * seed) for k, size in enumerate(UPPER_SIZES)],
        [client_rows(size, k, 2 * seed + 1) for k, size in enumerate(LOWER_SIZES)],
    )


def point(seed=0):
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(draw.standard_normal(shape))

    return {"p": normal(2), "q": normal()}, {"w": normal(FEATURES), "c": normal()}


DATA = ClientData.from_clients(*raw_rows())


def poisoned(data):
    """Put NaN, or an impossible id, into every row that is padding."""

    def poison(rows, sizes):
        def spoil(leaf):
            values = np.array(leaf)
            for client, size in enumerate(np.asarray(sizes)):
                values[client, size:] = np.nan if values.dtype.kind == "f" else -1
            return jnp.asarray(values)

        return jax.tree.map(spoil, rows)

    return eqx.tree_at(
        lambda d: (d.upper, d.lower),
        data,
        (poison(data.upper, data.upper_sizes), poison(data.lower, data.lower_sizes)),
    )


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_uniform(cells, count):
    """Check the frequency of each of `count` cells against 4 standard errors."""
    frequency = np.bincount(np.asarray(cells).ravel(), minlength=count) / cells.size
    assert frequency.shape == (count,)
    error = np.sqrt(1 / count * (1 - 1 / count) / cells.size)
    assert np.abs(frequency - 1 / count).max() <= 4 * error


@pytest.mark.parametrize("client", CLIENTS)
def test_draws_are_uniform_over_own_rows_at_every_position(client):
    oracle = Oracle(EXACT, DATA, client, upper_batch=2, lower_batch=2)
    keys = jr.split(jr.key(client), DRAWS)
    for draw, sizes in (
        (oracle.draw_upper, UPPER_SIZES),
        (oracle.draw_lower, LOWER_SIZES),
    ):
        drawn = np.asarray(jax.vmap(draw)(keys).rows["id"])
        assert drawn.shape == (DRAWS, 2)
        row, size = drawn - 100 * client, sizes[client]
        for position in (0, 1):
            assert_uniform(row[:, position], size)
        # All pairs equally often: positions are drawn independently, with replacement.
        assert_uniform(row[:, 0] * size + row[:, 1], size**2)


def test_samples_of_a_bundle_are_independent_of_each_other():
    client = 2
    oracle = Oracle(EXACT, DATA, client)
    rule = Neumann(2, 0.1)
    keys = jr.split(jr.key(7), DRAWS)
    bundle = jax.vmap(lambda key: rule.draw(oracle, key))(keys)
    xi, zeta = bundle.upper.rows["id"][:, 0], bundle.cross.rows["id"][:, 0]
    first, second = (bundle.factors.rows["id"][:, j, 0] for j in (0, 1))
    up, low = UPPER_SIZES[client], LOWER_SIZES[client]
    for one, other, sizes in (
        (xi, zeta, (up, low)),
        (xi, first, (up, low)),
        (zeta, first, (low, low)),
        (zeta, second, (low, low)),
        (first, second, (low, low)),
    ):
        cell = (one - 100 * client) * sizes[1] + (other - 100 * client)
        assert_uniform(cell, sizes[0] * sizes[1])


def test_same_key_is_the_same_batch_and_another_key_is_not():
    oracle = Oracle(EXACT, DATA, 2, upper_batch=8, lower_batch=8)

    @jax.jit
    def draw_traced(client, key):
        traced = Oracle(EXACT, DATA, client, upper_batch=8, lower_batch=8)
        return traced.draw_upper(key), traced.draw_lower(key)

    one = oracle.draw_upper(jr.key(3)), oracle.draw_lower(jr.key(3))
    again = oracle.draw_upper(jr.key(3)), oracle.draw_lower(jr.key(3))
    assert_same(again, one)
    assert_same(draw_traced(jnp.asarray(2), jr.key(3)), one)
    assert (oracle.draw_upper(jr.key(4)).rows["id"] != one[0].rows["id"]).any()
    assert (oracle.draw_lower(jr.key(4)).rows["id"] != one[1].rows["id"]).any()


def test_noise_is_replayed_by_its_key_and_left_out_of_full_evaluations():
    noisy = Oracle(NOISY, DATA, 2, upper_batch=4, lower_batch=4)
    for draw, rows in ((noisy.draw_upper, DATA.upper), (noisy.draw_lower, DATA.lower)):
        one, other = draw(jr.key(0)), draw(jr.key(1))
        assert_same(draw(jr.key(0)), one)
        own = np.asarray(rows["v"][2])
        added = [
            np.asarray(batch.rows["v"]) - own[np.asarray(batch.rows["id"]) - 200]
            for batch in (one, other)
        ]
        # Every row of both draws is perturbed, each by its own number.
        assert np.unique(np.concatenate([[0.0], *added])).size == 1 + 4 + 4
    everything = Oracle(NOISY, DATA, 2, upper_batch=None, lower_batch=None)
    assert_same(everything.draw_upper(jr.key(0)), noisy.all_upper())
    assert_same(everything.draw_lower(jr.key(0)), noisy.all_lower())
    assert set(np.asarray(noisy.all_lower().rows["v"])) <= set(
        np.asarray(DATA.lower["v"][2])
    )


@jax.jit
def evaluations(data, client, key):
    """Return everything that an oracle computes, from drawn and from all rows."""
    oracle = Oracle(NOISY, data, client, upper_batch=6, lower_batch=6)
    x, y = point()
    results = {}
    for name, up, low in (
        ("drawn", oracle.draw_upper(key), oracle.draw_lower(key)),
        ("all", oracle.all_upper(), oracle.all_lower()),
    ):
        results[name] = (
            (up, low, oracle.upper_loss(x, y, up), oracle.lower_loss(x, y, low)),
            oracle.upper_gradients(x, y, up),
            oracle.lower_gradient(x, y, low),
            oracle.hessian_product(x, y, y, low),
            oracle.cross_product(x, y, y, low),
        )
    return results


@pytest.mark.parametrize("client", CLIENTS)
def test_padding_is_never_read(client):
    bad = poisoned(DATA)
    # Without a row of padding in each level there would be nothing to test.
    assert np.isnan(bad.upper["v"]).any() and np.isnan(bad.lower["v"]).any()
    for seed in range(5):
        clean = evaluations(DATA, jnp.asarray(client), jr.key(seed))
        assert_same(evaluations(bad, jnp.asarray(client), jr.key(seed)), clean)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))


@pytest.mark.parametrize("client", CLIENTS)
def test_full_evaluation_is_the_plain_mean_over_own_rows(client):
    x, y = point(1)
    oracle = Oracle(EXACT, DATA, client)
    for loss, batch, rows in (
        (upper, oracle.all_upper(), raw_rows()[0][client]),
        (lower, oracle.all_lower(), raw_rows()[1][client]),
    ):
        score = oracle.upper_loss if loss is upper else oracle.lower_loss
        np.testing.assert_allclose(
            score(x, y, batch), loss(x, y, jax.tree.map(jnp.asarray, rows)), rtol=1e-14
        )
        size, weights = rows["v"].size, np.asarray(batch.weights)
        np.testing.assert_array_equal(weights[:size], 1 / size)
        np.testing.assert_array_equal(weights[size:], 0)


def test_weights_are_one_unless_given():
    np.testing.assert_array_equal(DATA.weights, np.ones(3))
    given_weights = ClientData.from_clients(*raw_rows(), weights=[0.5, 2.0, 3.0])
    np.testing.assert_array_equal(given_weights.weights, [0.5, 2.0, 3.0])
    assert given_weights.clients == 3
    for bad in ([1.0, 2.0], [1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [1.0, np.nan, 1.0]):
        with pytest.raises(InvalidInputError, match="weights"):
            ClientData.from_clients(*raw_rows(), weights=bad)


@eqx.filter_jit
def products_and_dense(oracle, x, y, v, batches):
    """Return the oracle's derivatives, flat, next to dense ones of the plain losses."""
    flat_x, to_x = ravel_pytree(x)
    flat_y, to_y = ravel_pytree(y)
    w = ravel_pytree(v)[0]
    up, low = batches

    def f(a, b):
        return oracle.upper_loss(to_x(a), to_y(b), up)

    def g(a, b):
        return oracle.lower_loss(to_x(a), to_y(b), low)

    # Columns of dense matrices, reverse over reverse; the oracle goes forward over it.
    hessian = jax.jacrev(jax.jacrev(g, argnums=1), argnums=1)(flat_x, flat_y)
    cross = jax.jacrev(jax.jacrev(g, argnums=1), argnums=0)(flat_x, flat_y)
    slope_along_v = jax.grad(lambda a: jnp.vdot(jax.grad(g, argnums=1)(a, flat_y), w))
    fx, fy = oracle.upper_gradients(x, y, up)
    gx, both_gy = oracle.lower_gradients(x, y, low)
    found = {
        "fx": fx,
        "fy": fy,
        "gx": gx,
        "gy": oracle.lower_gradient(x, y, low),
        "gy of both": both_gy,
        "hvp": oracle.hessian_product(x, y, v, low),
        "jvp": oracle.cross_product(x, y, v, low),
    }
    expected = {
        "fx": jax.jacfwd(f, argnums=0)(flat_x, flat_y),
        "fy": jax.jacfwd(f, argnums=1)(flat_x, flat_y),
        "gx": jax.jacfwd(g, argnums=0)(flat_x, flat_y),
        "gy": jax.jacfwd(g, argnums=1)(flat_x, flat_y),
        "gy of both": jax.jacfwd(g, argnums=1)(flat_x, flat_y),
        "hvp": hessian @ w,
        "jvp": w @ cross,
    }
    return found, expected, slope_along_v(flat_x)


@pytest.mark.parametrize("rows", ["drawn", "all"])
@by_seed
@seeds
def test_derivatives_match_dense_ones(rows, seed):
    x, y = point(seed)
    _, v = point(seed + 1)
    oracle = Oracle(NOISY, DATA, jnp.asarray(seed % 3), upper_batch=4, lower_batch=4)
    key = jr.key(seed)
    drawn = oracle.draw_upper(key), oracle.draw_lower(key)
    batches = drawn if rows == "drawn" else (oracle.all_upper(), oracle.all_lower())
    found, expected, slope_along_v = products_and_dense(oracle, x, y, v, batches)
    for name, tree in found.items():
        like = x if name in ("fx", "gx", "jvp") else y
        assert jax.tree.structure(tree) == jax.tree.structure(like)
        value, right = ravel_pytree(tree)[0], np.asarray(expected[name])
        scale = max(1, np.abs(right).max())
        np.testing.assert_allclose(value, right, rtol=0, atol=1e-12 * scale)
    flat = ravel_pytree(found["jvp"])[0]
    atol = 1e-12 * max(1, np.abs(slope_along_v).max())
    np.testing.assert_allclose(flat, slope_along_v, rtol=0, atol=atol)


# Input that is never optimized, of shapes that nothing else has.
BACKBONE = {
    "in": jnp.asarray(np.random.default_rng(8).standard_normal((FEATURES, 7))),
    "out": jnp.asarray(np.random.default_rng(9).standard_normal((7, 4))),
}


def on_features(x, y, rows, frozen):
    features = jnp.tanh(rows["u"] @ frozen["in"]) @ frozen["out"]
    fit = jnp.mean((features @ y - rows["v"]) ** 2)
    return fit + 0.1 * jnp.sum(jnp.exp(x) * y**2)


def of_backbone(x, y, frozen):
    return {"reach": jnp.sum(x) + jnp.sum(frozen["out"] @ y)}


def frozen_job(frozen) -> Job:
    problem = Problem(on_features, on_features, frozen=frozen)
    return job_on(problem, of_backbone)


def job_on(problem, metrics) -> Job:
    algorithm = FedBiO(0.05, 0.05, 0.05, local_steps=1)
    start = (jnp.zeros(4), jnp.ones(4))
    return Job.of(algorithm, problem, DATA, *start, metrics=metrics)


def test_a_fingerprint_sees_one_number_of_frozen_arrays_of_half_precision():
    job = frozen_job(BACKBONE)

    def mark(frozen) -> str:
        own = eqx.tree_at(lambda one: one.problem.frozen, job, frozen)
        return checkpoint.fingerprint(own, every=1)

    half = {name: leaf.astype(jnp.bfloat16) for name, leaf in BACKBONE.items()}
    other = {**half, "out": half["out"].at[3, 2].multiply(-1)}
    assert len({mark(half), mark(other), mark(BACKBONE)}) == 3
    assert mark(half) == mark(dict(half))


@pytest.mark.slow
def test_frozen_arrays_give_the_numbers_of_arrays_closed_over():
    def loss(x, y, rows):
        return on_features(x, y, rows, BACKBONE)

    closed = job_on(Problem(loss, loss), lambda x, y: of_backbone(x, y, BACKBONE))
    one, other = (
        execute(SimulatorRuntime(job), 3) for job in (frozen_job(BACKBONE), closed)
    )
    slow = execute(ReferenceRuntime(frozen_job(BACKBONE)), 1)
    assert set(one.columns) == set(other.columns) and "reach" in one.columns
    for left, right in zip(
        jax.tree.leaves((one.state, one.columns)),
        jax.tree.leaves((other.state, other.columns)),
        strict=True,
    ):
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)
    for name, column in slow.columns.items():
        np.testing.assert_allclose(column, one.columns[name][:1], rtol=1e-12)


def test_frozen_arrays_are_one_input_and_other_values_do_not_compile_again():
    first = SimulatorRuntime(frozen_job(BACKBONE))
    second = SimulatorRuntime(frozen_job(jax.tree.map(jnp.negative, BACKBONE)))
    before = execute(first, 2)
    program = next(reversed(compilation._programs.values())).result().executable
    after = execute(second, 2)
    assert second.compile_seconds == 0
    assert (before.columns["reach"] != after.columns["reach"]).all()
    held = eqx.filter(first.job, eqx.is_array)
    for leaf in BACKBONE.values():
        for inputs in (held, program.args_info):
            ends = [one.shape[-2:] for one in jax.tree.leaves(inputs)]
            assert ends.count(leaf.shape) == 1
    # And they are part of what a checkpoint belongs to.
    assert first.fingerprint(1) != second.fingerprint(1)


def test_what_is_no_array_cannot_be_frozen():
    with pytest.raises(InvalidInputError, match="a leaf of type .*Give arrays alone"):
        Problem(on_features, on_features, frozen={**BACKBONE, "activation": jnp.tanh})
