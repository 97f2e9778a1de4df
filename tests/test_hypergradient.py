"""Hypergradient rules against dense linear algebra and the listings they come from."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel.hypergradient as hg
from fedbilevel.problem import ClientData, Oracle, Problem
from fedbilevel.tasks.quadratic import PROBLEM, ClosedForm, client_rows

DX, DY = 3, 4

by_seed = settings(max_examples=15)
any_seed = st.integers(0, 2**31 - 1)
any_share = st.floats(0.05, 0.98)  # of 1/L, below which the series converges


class Quadratic:
    """A random quadratic in the letters of `tasks.quadratic`, and a point (x, y)."""

    def __init__(self, seed):
        draw = np.random.default_rng(seed)
        basis, _ = np.linalg.qr(draw.standard_normal((DY, DY)))
        half = basis @ np.diag(np.sqrt(draw.uniform(0.4, 3.0, DY)))
        self.A, self.C = half @ half.T, draw.standard_normal((DX, DY))
        self.a, self.b, self.y = draw.standard_normal((3, DY))
        self.r, self.x = draw.uniform(0.1, 1.0), draw.standard_normal(DX)

    @property
    def fx(self):
        return self.r * self.x

    @property
    def fy(self):
        return self.y - self.b

    def theta(self, share):
        return share / np.linalg.norm(self.A, 2)

    def with_inverse(self, inverse):
        return self.fx - self.C @ inverse @ self.fy

    def with_series(self, theta, terms):
        factor, power = np.eye(DY) - theta * self.A, np.linalg.matrix_power
        return self.with_inverse(theta * sum(power(factor, i) for i in range(terms)))

    def data(self):
        up, low = client_rows(self.A, self.C, self.a, self.b, self.r, noise=0.0)
        return ClientData.from_clients([up], [low])

    def estimate(self, rule):
        return estimate(rule, deterministic(PROBLEM, self.data()), self.x, self.y)


def deterministic(problem, data):
    return Oracle(problem, data, 0, upper_batch=None, lower_batch=None)


@eqx.filter_jit
def evaluate(rule, oracle, x, y, bundle):
    return rule(oracle, jnp.asarray(x), jnp.asarray(y), bundle)


draw = eqx.filter_jit(lambda rule, oracle, key: rule.draw(oracle, key))
draw_each = eqx.filter_vmap(draw, in_axes=(None, None, 0))
evaluate_each = eqx.filter_vmap(evaluate, in_axes=(None, None, None, None, 0))


def estimate(rule, oracle, x, y):
    """Return the rule's value with deterministic oracles, where any key will do."""
    return np.asarray(evaluate(rule, oracle, x, y, draw(rule, oracle, jr.key(0))))


def assert_close(actual, expected, tolerance):
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


@by_seed
@given(seed=any_seed)
def test_exact_is_the_dense_solve_and_the_gradient_at_the_lower_solution(seed):
    q = Quadratic(seed)
    assert_close(q.estimate(hg.Exact()), q.with_inverse(np.linalg.inv(q.A)), 1e-12)
    closed = ClosedForm.of(q.data())
    q.y = np.asarray(closed.lower_solution(jnp.asarray(q.x)))
    assert_close(q.estimate(hg.Exact()), closed.gradient(jnp.asarray(q.x)), 1e-12)


@by_seed
@given(seed=any_seed, damping=st.floats(0.0, 2.0))
def test_conjugate_gradient_solves_in_as_many_steps_and_then_stays(seed, damping):
    q = Quadratic(seed)
    damped = q.with_inverse(np.linalg.inv(q.A + damping * np.eye(DY)))
    assert_close(q.estimate(hg.ConjugateGradient(DY, damping)), damped, 1e-10)
    assert_close(q.estimate(hg.ConjugateGradient(20 * DY, damping)), damped, 1e-10)
    assert_close(q.estimate(hg.ConjugateGradient(DY)), q.estimate(hg.Exact()), 1e-10)
    # With fy an eigenvector one step is enough, and 0/0 threatens from then on.
    q.b = q.y - np.linalg.eigh(q.A)[1][:, 0]
    long = hg.ConjugateGradient(20 * DY)
    assert_close(q.estimate(long), q.estimate(hg.Exact()), 1e-10)


@pytest.mark.parametrize("rule", [hg.FrozenNeumann, hg.Neumann])
@pytest.mark.parametrize("factors", [0, 1, 5])
@by_seed
@given(seed=any_seed, share=any_share)
def test_neumann_sums_one_term_more_than_factors(rule, factors, seed, share):
    q = Quadratic(seed)
    theta = q.theta(share)
    # Without a factor the one term is theta I, so that h = fx - theta C fy.
    series = q.with_series(theta, factors + 1)
    assert_close(q.estimate(rule(factors, theta)), series, 1e-12)
    assert_close(q.estimate(rule(factors, 0.0)), q.fx, 0)


@pytest.fixture(scope="module")
def sampled():
    """Draw 20,000 bundles from rows that scatter around a quadratic, their mean."""
    q, normal = Quadratic(1), np.random.default_rng(1).standard_normal
    rows = client_rows(q.A, q.C, q.a, q.b, q.r, noise=0.0)

    def scatter(value):
        off = 0.7 * normal((6, *value.shape[1:]))
        off = off - off.mean(0)
        return value + (off + off.swapaxes(1, 2) if off.shape[1:] == (DY, DY) else off)

    up, low = jax.tree.map(scatter, rows)
    data = ClientData.from_clients([up], [low])
    oracle = Oracle(Problem(PROBLEM.upper, PROBLEM.lower), data, 0, 2, 2)
    rule = hg.Neumann(5, q.theta(0.9))
    return q, oracle, rule, draw_each(rule, oracle, jr.split(jr.key(1), 20_000))


def test_stochastic_neumann_is_the_listing_on_its_bundle(sampled):
    q, oracle, rule, bundles = sampled
    values, theta = evaluate_each(rule, oracle, q.x, q.y, bundles), float(rule.theta)
    bundles = jax.tree.map(np.asarray, bundles)
    for k in range(50):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], bundles)
        assert own.factors.rows["A"].shape == (5, 2, DY, DY)
        r = s = q.y - own.upper.rows["b"].mean(0)
        for hessian in own.factors.rows["A"].mean(1):
            r = r - theta * hessian @ r
            s = s + r
        fx = own.upper.rows["r"].mean(0) * q.x + own.upper.rows["c"].mean(0)
        assert_close(values[k], fx - theta * own.cross.rows["C"].mean(0) @ s, 1e-12)


def test_stochastic_neumann_has_the_finite_sum_as_mean(sampled):
    q, oracle, rule, bundles = sampled

    def standard_errors_away(bundles):
        values = evaluate_each(rule, oracle, q.x, q.y, bundles)
        error = np.std(values, axis=0, ddof=1) / np.sqrt(len(values))
        away = np.mean(values, axis=0) - q.with_series(float(rule.theta), 6)
        return np.abs(away / error).max()

    assert standard_errors_away(bundles) <= 4
    # One sample for all factors has another mean: such a mistake would be seen.
    one = jax.tree.map(lambda a: jnp.repeat(a[:, :1], 5, axis=1), bundles.factors)
    assert standard_errors_away(dataclasses.replace(bundles, factors=one)) > 8


def test_random_neumann_averages_over_lengths_to_one_term_per_length():
    q, terms, draws = Quadratic(2), 4, 2_000
    theta = q.theta(0.7)
    rule, oracle = hg.RandomNeumann(terms, theta), deterministic(PROBLEM, q.data())
    bundles = draw_each(rule, oracle, jr.split(jr.key(2), draws))
    values = np.asarray(evaluate_each(rule, oracle, q.x, q.y, bundles))
    lengths = np.asarray(bundles[1])
    assert set(lengths) == set(range(terms))
    error = np.sqrt(1 / terms * (1 - 1 / terms) / draws)
    assert np.abs(np.bincount(lengths) / draws - 1 / terms).max() <= 4 * error
    groups = [values[lengths == length] for length in range(terms)]
    for length, group in enumerate(groups):
        # The length is part of the bundle, and all that distinguishes two of them here.
        power = np.linalg.matrix_power(np.eye(DY) - theta * q.A, length)
        expected = q.with_inverse(terms * theta * power)
        assert_close(group, np.broadcast_to(expected, group.shape), 1e-12)
    mean = np.mean([group[0] for group in groups], axis=0)
    assert_close(mean, q.with_series(theta, terms), 1e-12)


def bias_bound(q, theta, factors):
    eigenvalues = np.linalg.eigvalsh(q.A)
    mu, L0 = eigenvalues[0], np.linalg.norm(q.fy)
    L1 = max(np.linalg.norm(q.C, 2), eigenvalues[-1])
    return (1 - theta * mu) ** (factors + 1) * L0 * L1 / mu


@by_seed
@given(seed=any_seed, share=any_share, factors=st.sampled_from([0, 1, 5, 20]))
def test_neumann_bias_is_within_its_bound_and_reaches_it(seed, share, factors):
    q = Quadratic(seed)
    theta = q.theta(share)

    def bias():
        series, exact = hg.FrozenNeumann(factors, theta), hg.Exact()
        return np.linalg.norm(q.estimate(series) - q.estimate(exact))

    assert bias() <= bias_bound(q, theta, factors) + 1e-12
    # The worst case: fy and the strongest direction of C along the flattest of A.
    flattest = np.linalg.eigh(q.A)[1][:, 0]
    q.C, q.b = np.outer([5.0, 0.0, 0.0], flattest), q.y - flattest
    assert_close(bias(), bias_bound(q, theta, factors), 1e-11)


@pytest.mark.parametrize("steps", [1, 2, 6])
@by_seed
@given(seed=any_seed, share=any_share)
def test_unrolled_is_frozen_neumann_at_the_last_lower_iterate(steps, seed, share):
    q = Quadratic(seed)
    step = q.theta(share)
    unrolled = q.estimate(hg.Unrolled(steps, step))
    for _ in range(steps):
        q.y = q.y - step * (q.A @ q.y + q.C.T @ q.x + q.a)
    assert_close(unrolled, q.estimate(hg.FrozenNeumann(steps - 1, step)), 1e-11)


def test_unrolled_steps_move_every_leaf_of_y():
    q = Quadratic(3)
    step = q.theta(0.5)

    def in_parts(loss):
        return lambda x, y, rows: loss(x, jnp.concatenate([y["a"], y["b"]]), rows)

    problem = Problem(in_parts(PROBLEM.upper), in_parts(PROBLEM.lower))
    oracle, rule = deterministic(problem, q.data()), hg.Unrolled(3, step)
    parts = {"a": jnp.asarray(q.y[:1]), "b": jnp.asarray(q.y[1:])}
    bundle = rule.draw(oracle, jr.key(0))
    assert_close(rule(oracle, jnp.asarray(q.x), parts, bundle), q.estimate(rule), 1e-12)


def product_rules(theta):
    series = (hg.Neumann, hg.FrozenNeumann, hg.RandomNeumann)
    return hg.Exact(), hg.ConjugateGradient(DY), *(rule(5, theta) for rule in series)


@by_seed
@given(seed=any_seed)
def test_finite_differences_are_exact_on_quadratics(seed):
    q = Quadratic(seed)
    for rule in product_rules(q.theta(0.8)):
        assert_close(q.estimate(hg.FiniteDifference(rule)), q.estimate(rule), 1e-8)


def logistic_loss(y, rows):
    return jnp.mean(jnp.logaddexp(0.0, 3 * rows["u"] @ y))


def upper(x, y, rows):
    return jnp.mean(jnp.sin(rows["u"] @ y)) + jnp.sum(jnp.cos(x))


def near_x(x, y, rows):
    """T6: a smooth loss, and y held near x; lam = 0.7."""
    return logistic_loss(y, rows) + 0.35 * jnp.sum((y - x) ** 2)


def weighted(x, y, rows):
    return logistic_loss(y, rows) + 0.5 * jnp.sum(jnp.exp(x) * y**2)


def smooth_oracle(lower):
    draw = np.random.default_rng(3)
    up, low = ({"u": draw.standard_normal((6, DY))} for _ in range(2))
    return deterministic(Problem(upper, lower), ClientData.from_clients([up], [low]))


def test_finite_differences_are_of_second_order():
    oracle = smooth_oracle(weighted)
    x, y = np.random.default_rng(4).standard_normal((2, DY)) / 2
    exact = estimate(hg.Exact(), oracle, x, y)

    def error(radius):
        rule = hg.FiniteDifference(hg.Exact(), radius)
        return np.linalg.norm(estimate(rule, oracle, x, y) - exact)

    # The next term of the error is smaller by about radius^2, at most 1e-2.
    for radius in (0.1, 0.05, 0.025):
        assert 3.9 <= error(radius) / error(radius / 2) <= 4.1


@by_seed
@given(seed=any_seed)
def test_proximal_lower_level_gives_the_meta_learning_formula(seed):
    oracle, lam = smooth_oracle(near_x), 0.7
    x, y = jnp.asarray(np.random.default_rng(seed).standard_normal((2, DY)))
    rows = jax.tree.map(lambda leaf: leaf[0], oracle.data.lower)
    fx, fy = oracle.upper_gradients(x, y, oracle.all_upper())
    H = np.asarray(jax.hessian(logistic_loss)(y, rows))
    expected = fx + lam * np.linalg.solve(H + lam * np.eye(DY), fy)
    assert_close(estimate(hg.Exact(), oracle, x, y), expected, 1e-12)


@by_seed
@given(seed=any_seed)
def test_every_rule_returns_fx_where_fy_is_zero(seed):
    q = Quadratic(seed)
    # Also at the lower solution, so that unrolled steps do not leave it.
    q.b = q.y = -np.linalg.solve(q.A, q.C.T @ q.x + q.a)
    theta = q.theta(0.8)
    others = hg.Unrolled(3, theta), hg.FiniteDifference(hg.Exact())
    for rule in (*product_rules(theta), *others):
        assert_close(q.estimate(rule), q.fx, 1e-13)
