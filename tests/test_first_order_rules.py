"""Rules for large models: no Hessian, or a derivative that goes forwards alone."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel.hypergradient as hg
from fedbilevel import algorithms, tasks
from fedbilevel.algorithms.one_machine.stocbio import StocBiO
from fedbilevel.errors import ClientInputError, InvalidInputError
from fedbilevel.experiments.options import algorithm_from, as_options, options_of
from fedbilevel.problem import ClientData, Oracle
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from fedbilevel.tasks.quadratic import PROBLEM, client_rows
from tests.test_hypergradient import (
    DX,
    DY,
    Quadratic,
    any_seed,
    any_share,
    assert_close,
    by_seed,
    deterministic,
    evaluate,
    evaluate_each,
    smooth_oracle,
    weighted,
)
from tests.test_hypergradient import draw as drawn
from tests.test_hypergradient import estimate as estimated


@by_seed
@given(seed=any_seed, gamma=st.floats(0.05, 5.0))
def test_darts_takes_a_number_for_the_inverse(seed, gamma):
    q = Quadratic(seed)
    expected = q.with_inverse(gamma * np.eye(DY))
    assert_close(q.estimate(hg.DARTS(gamma)), expected, 1e-8)


@by_seed
@given(seed=any_seed, gamma=st.floats(0.05, 5.0), small=st.floats(1e-3, 1.0))
def test_sama_takes_the_diagonal_of_adam(seed, gamma, small):
    q = Quadratic(seed)
    slope = q.A @ q.y + q.C.T @ q.x + q.a
    P = np.diag(gamma / (np.abs(slope) + small))
    assert_close(q.estimate(hg.SAMA(gamma, small)), q.with_inverse(P), 1e-8)


def test_second_moments_are_a_mean_of_squares_over_samples():
    q, normal = Quadratic(5), np.random.default_rng(5).standard_normal
    up, low = client_rows(q.A, q.C, q.a, q.b, q.r, noise=0.0)
    rows = {n: np.repeat(leaf, 6, axis=0) for n, leaf in low.items()}
    rows["a"] = rows["a"] + normal((6, DY))
    oracle = Oracle(PROBLEM, ClientData.from_clients([up], [rows]), 0)
    rule = hg.SAMA(0.7, 0.1, 5)
    bundle = drawn(rule, oracle, jr.key(1))
    tilts = np.asarray(bundle.factors.rows["a"])[:, 0]
    assert tilts.shape == (5, DY) and len(np.unique(tilts, axis=0)) > 1
    v = np.mean((q.A @ q.y + q.C.T @ q.x + tilts) ** 2, axis=0)
    expected = q.with_inverse(np.diag(0.7 / (np.sqrt(v) + 0.1)))
    assert_close(evaluate(rule, oracle, q.x, q.y, bundle), expected, 1e-8)


def test_darts_is_the_shortest_series_by_differences():
    """Also where g is no quadratic, to the last digit."""
    oracle = smooth_oracle(weighted)
    x, y = np.random.default_rng(4).standard_normal((2, DY)) / 2
    series = hg.FiniteDifference(hg.FrozenNeumann(0, 0.3), 0.05)
    mine = estimated(hg.DARTS(0.3, 0.05), oracle, x, y)
    assert_close(mine, estimated(series, oracle, x, y), 1e-13)


@pytest.mark.slow
def test_two_clients_end_where_the_number_says():
    """T2 with gamma for 1/2: 0.25 x + gamma (x/2 - 1) = 0; one program for all."""
    task = tasks.find("two-client")()
    for gamma, printed in ((0.5, 1.0), (1.0, 1.333333), (0.25, 0.666667)):
        job = Job.of(
            StocBiO(hg.DARTS(gamma), 0.5, 0.3),
            *(task.problem, task.data, task.x, task.y),
            sampling=Sampling(None),
        )
        w = execute(SimulatorRuntime(job), 400, measure_every=400).state.server.point
        np.testing.assert_allclose(w.x, gamma / (0.25 + gamma / 2), atol=1e-9)
        np.testing.assert_allclose(w.x, printed, atol=1e-6)


@by_seed
@given(seed=any_seed, share=any_share)
def test_a_derivative_along_a_unit_is_an_entry_of_the_unrolled_one(seed, share):
    q, steps = Quadratic(seed), 3
    oracle, step = deterministic(PROBLEM, q.data()), jnp.asarray(q.theta(share))
    xi, zetas = drawn(hg.Unrolled(steps, step), oracle, jr.key(0))
    found = [
        oracle.unrolled_derivative(
            jnp.asarray(q.x), jnp.asarray(q.y), unit, xi, zetas, step
        )
        for unit in jnp.eye(DX)
    ]
    for _ in range(steps):
        q.y = q.y - float(step) * (q.A @ q.y + q.C.T @ q.x + q.a)
    assert_close(found, q.with_series(float(step), steps), 1e-11)


def test_forward_gradients_have_the_unrolled_mean_and_the_variance_of_normals():
    """Over 32 seeds of 500 draws: within 4 errors, and (dx + 1) ||h||^2."""
    q, seeds, draws = Quadratic(3), 32, 500
    step = q.theta(0.7)
    oracle = deterministic(PROBLEM, q.data())
    h = q.estimate(hg.Unrolled(4, step))
    rule = hg.ForwardGradient(4, step)
    xi, zetas, _ = drawn(rule, oracle, jr.key(0))
    keys = jax.vmap(lambda s: jr.split(jr.key(s), draws))(jnp.arange(seeds))

    def repeated(leaf):
        return jnp.broadcast_to(leaf, (seeds * draws, *leaf.shape))

    bundles = (*jax.tree.map(repeated, (xi, zetas)), keys.reshape(-1))
    values = np.asarray(evaluate_each(rule, oracle, q.x, q.y, bundles))
    means = values.reshape(seeds, draws, DX).mean(axis=1)
    error = means.std(axis=0, ddof=1) / np.sqrt(seeds)
    assert (np.abs(means.mean(axis=0) - h) <= 4 * error).all()
    assert np.linalg.norm(error) < 0.05 * np.linalg.norm(h)  # the test has power
    spread = np.mean(np.sum((values - h) ** 2, axis=1))
    np.testing.assert_allclose(spread, (DX + 1) * (h @ h), rtol=0.1)


def test_many_directions_are_averaged():
    q = Quadratic(3)
    step, oracle = q.theta(0.7), deterministic(PROBLEM, q.data())
    rule = hg.ForwardGradient(4, step, 20_000)
    h = q.estimate(hg.Unrolled(4, step))
    found = evaluate(rule, oracle, q.x, q.y, drawn(rule, oracle, jr.key(1)))
    away = np.linalg.norm(np.asarray(found) - h)
    assert away < 4 * np.sqrt((DX + 1) / 20_000) * np.linalg.norm(h)
    # A bundle has its directions: twice the same estimate, and another by another key.
    again = evaluate(rule, oracle, q.x, q.y, drawn(rule, oracle, jr.key(1)))
    other = evaluate(rule, oracle, q.x, q.y, drawn(rule, oracle, jr.key(2)))
    np.testing.assert_array_equal(found, again)
    assert not np.array_equal(found, other)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("darts", hg.DARTS(0.2)),
        ("sama", hg.SAMA(0.2)),
        ("unrolled", hg.Unrolled(3, 0.2)),
        ("forward-gradient", hg.ForwardGradient(3, 0.2, 7)),
    ],
)
def test_rules_are_read_and_written_as_options(name, made):
    entry = algorithms.find("local-bsgm")
    given = {"q": "3", "theta": "0.2", "directions": "7", "hypergradient": name}
    given |= dict.fromkeys(("upper_step", "lower_step"), "0.1")
    given |= dict.fromkeys(("upper_weight", "lower_weight"), "0.5")
    assert given.keys() <= options_of(entry).keys()
    built = algorithm_from(entry, given, 2, 1)
    assert built.parameters()["hypergradient"] == hg_text(made)
    again = algorithm_from(entry, as_options(entry, built), 2, 1)
    assert again.parameters() == built.parameters()
    with pytest.raises(InvalidInputError, match="'darst'. Did you mean 'darts'"):
        algorithm_from(entry, {**given, "hypergradient": "darst"}, 2, 1)


def hg_text(rule):
    """Write a rule as a method that has it does."""
    return StocBiO(rule, 0.1, 0.1).parameters()["hypergradient"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hg.DARTS(0.0), r"`DARTS\(gamma=...\)` must be above 0"),
        (lambda: hg.SAMA(0.1, -1.0), r"`SAMA\(small=...\)` must be above 0"),
        (lambda: hg.SAMA(0.1, samples=0), r"`SAMA\(samples=...\)` must be at least 1"),
        (
            lambda: hg.ForwardGradient(2, 0.1, 0),
            r"`ForwardGradient\(directions=...\)` must be at least 1",
        ),
        (
            lambda: hg.Neumann(cast(Any, 0.1), 50),
            r"`Neumann\(q=...\)` is a whole number, got 0.1, and theta is 50, as if "
            "the two were swapped",
        ),
        (
            lambda: hg.ConjugateGradient(cast(Any, 1e-6), 50),
            r"got 1e-06, and damping is 50, as if the two were swapped",
        ),
        (
            lambda: StocBiO(hg.Neumann(3, 0.1), 20, 0.1, inner_steps=cast(Any, 2.5)),
            r"`StocBiO\(inner_steps=...\)` is a whole number, got 2.5, and lr_x is 20",
        ),
        (lambda: hg.Neumann(cast(Any, 3.0), 0.1), "is a whole number, got 3.0.$"),
        (
            lambda: hg.RandomNeumann(0, 0.1),
            r"`RandomNeumann\(q=...\)` must be at least",
        ),
        (lambda: hg.Neumann(0, -0.1), r"`Neumann\(theta=...\)` must be at least 0"),
        (
            lambda: hg.ConjugateGradient(3, tolerance=1.0),
            r"`ConjugateGradient\(tolerance=...\)` must be at least 0 and below 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(InvalidInputError, match=said):
        make()


def test_lower_steps_that_diverge_are_refused():
    with pytest.raises(ClientInputError, match=r"`ForwardGradient\(step=1\)`: lower"):
        hg.ForwardGradient(2, 1.0).check(3.0, 0)
    hg.ForwardGradient(2, 0.5).check(3.0, 0)
