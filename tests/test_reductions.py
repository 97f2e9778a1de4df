"""Every degenerate case of the two algorithms, over random numbers.

Shapes stay fixed within a test, so that hypothesis varies inputs of one program.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel._types import Pair
from fedbilevel.algorithms.local.adafbio import AdaFBiO
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import ReferenceRuntime, SimulatorRuntime, execute
from tests.cases import quadratic_data, quadratic_job
from tests.reference import listings
from tests.reference.quadratic_oracles import hypergradient, lower_gradient
from tests.reference.replay import draw_samples

BOTH = pytest.mark.parametrize("kind", [LocalBSGM, LocalBSGVRM])
few = settings(max_examples=4)
seeds = st.integers(0, 2**31 - 1)
small = st.floats(0.01, 0.2)
weights = st.floats(0.05, 1.0)


def effective(kind, p, *, q=2, theta=0.3, upper=0.05, lower=0.1, weight=0.4, **rest):
    """Return an algorithm by its effective values."""
    return kind.effective(
        Neumann(q, theta),
        upper_step=upper,
        lower_step=lower,
        upper_weight=weight,
        lower_weight=weight,
        local_steps=p,
        **rest,
    )


def last_iterate(job, rounds, runtime: Any = SimulatorRuntime):
    return execute(runtime(job), rounds, measure_every=rounds).state.server


def assert_close(a, b, tolerance=1e-12):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)


def assert_rounded(a, b):
    """Two programs of the same sums: a processor may fuse products into some."""
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-14, atol=1e-14)


def assert_identical(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
@BOTH
@few
@given(seed=seeds, upper=small, lower=small)
def test_one_client_ignores_the_period(kind, seed, upper, lower):
    data = quadratic_data(1)
    ends = []
    for p in (1, 3, 12):
        algorithm = effective(kind, p, upper=upper, lower=lower)
        job = quadratic_job(algorithm, data, seed=seed)
        ends.append(last_iterate(job, 12 // p))
    assert_rounded(ends[0], ends[1])
    assert_rounded(ends[0], ends[2])


@pytest.mark.slow
@BOTH
def test_one_client_ignores_the_period_uncompiled(kind):
    data = quadratic_data(1)
    ends = [
        last_iterate(quadratic_job(effective(kind, p), data), 4 // p, ReferenceRuntime)
        for p in (1, 4)
    ]
    assert_identical(*ends)


@pytest.mark.slow
@few
@given(seed=seeds, upper=small, lower=small)
def test_weights_of_one_make_the_two_algorithms_one(seed, upper, lower):
    data = quadratic_data(3)
    ends = []
    for kind in (LocalBSGM, LocalBSGVRM):
        algorithm = effective(kind, 3, upper=upper, lower=lower, weight=1.0)
        ends.append(last_iterate(quadratic_job(algorithm, data, seed=seed), 4))
    assert_close(*ends)


@pytest.mark.slow
@few
@given(seed=seeds, upper=small, lower=small, weight=weights)
def test_period_one_is_the_mean_of_the_estimators(seed, upper, lower, weight):
    algorithm = effective(LocalBSGM, 1, upper=upper, lower=lower, weight=weight)
    job = quadratic_job(algorithm, quadratic_data(3), seed=seed)
    samples, _ = draw_samples(job, 6)
    x, y = np.asarray(job.x), np.asarray(job.y)
    u, v = np.zeros_like(x), np.zeros_like(y)
    for t, drawn in enumerate(zip(*samples, strict=True)):
        G = np.mean([hypergradient(x, y, bundle, 0.3) for bundle, _ in drawn], axis=0)
        D = np.mean([lower_gradient(x, y, zeta) for _, zeta in drawn], axis=0)
        a = 1.0 if t == 0 else weight
        u, v = (1 - a) * u + a * G, (1 - a) * v + a * D
        x, y = x - upper * u, y - lower * v
    point = last_iterate(job, 6).point
    np.testing.assert_allclose(point.x, x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(point.y, y, rtol=0, atol=1e-12)


@pytest.mark.slow
@few
@given(seed=seeds, upper=small, lower=small, weight=weights)
def test_scales_that_are_drowned_make_adafbio_local_bsgvrm(seed, upper, lower, weight):
    """For r to infinity with gamma / r fixed, up to a few parts in r."""
    r, data = 1e12, quadratic_data(3)
    scaled = AdaFBiO(
        Neumann(2, 0.3),
        1.0,
        gamma=upper * r,
        lam=lower * r,
        c1=weight,
        c2=weight,
        r=r,
        local_steps=3,
    )
    plain = effective(LocalBSGVRM, 3, upper=upper, lower=lower, weight=weight)
    ends = [
        last_iterate(quadratic_job(one, data, seed=seed), 4) for one in (scaled, plain)
    ]
    assert_close(*((end.point, end.direction) for end in ends), tolerance=1e-10)


@pytest.mark.slow
@few
@given(scale=st.floats(1e-3, 1e3))
def test_steps_of_adafbio_forget_how_long_directions_are(scale):
    """Where r is negligible, a slope that is multiplied moves x and y as far."""
    direction = Pair(jnp.asarray([0.3, -2.0]), jnp.asarray([1.0, 0.0, -4.0]))
    letters: dict[str, Any] = {"gamma": 0.1, "lam": 0.1, "c1": 0.5, "c2": 0.5}
    both = AdaFBiO(Neumann(2, 0.3), 1.0, **letters, r=1e-300, local_steps=1)
    (scale_of,) = both.parts()
    moved = [
        scale_of.scaled(scale_of.seen(one), one)
        for one in (direction, jax.tree.map(lambda leaf: scale * leaf, direction))
    ]
    assert_close(moved[0], moved[1])
    np.testing.assert_allclose(np.abs(moved[0].x), 1, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(moved[0].y), 1, atol=1e-12)


@pytest.mark.slow
@BOTH
@few
@given(data_seed=st.integers(0, 1000), upper=small, lower=small)
def test_alike_exact_clients_are_one_client(kind, data_seed, upper, lower):
    many = quadratic_data(4, noise=0.0, alike=True, seed=data_seed)
    one = quadratic_data(1, noise=0.0, alike=True, seed=data_seed)
    algorithm = effective(kind, 3, upper=upper, lower=lower)
    together = last_iterate(quadratic_job(algorithm, many), 3)
    alone = last_iterate(quadratic_job(algorithm, one), 3)
    assert_close(together, alone)


@pytest.mark.slow
def test_alike_exact_clients_follow_the_hypergradient_itself():
    job = quadratic_job(
        effective(LocalBSGVRM, 3), quadratic_data(3, noise=0.0, alike=True)
    )
    outcome = execute(SimulatorRuntime(job), 4, measure_every=4)
    oracle, rule = job.oracle(0), job.algorithm.hypergradient  # pyright: ignore[reportAttributeAccessIssue]
    # Without noise the momentum is exact: u is h at the point before the last move.
    at = jax.tree.map(lambda leaf: leaf[0], outcome.state.clients.memory.evaluated[0])
    exact = rule(oracle, at.x, at.y, rule.draw(oracle, jax.random.key(9)))
    np.testing.assert_allclose(
        outcome.state.server.direction.x, exact, rtol=0, atol=1e-12
    )


@pytest.mark.slow
@BOTH
@few
@given(seed=seeds, upper=small)
def test_no_theta_leaves_the_direct_gradient(kind, seed, upper):
    # Then x never sees y: moving the lower start changes nothing above.
    algorithm = effective(kind, 2, theta=0.0, upper=upper)
    job = quadratic_job(algorithm, quadratic_data(2), seed=seed)
    elsewhere = eqx.tree_at(lambda one: one.y, job, job.y + 1.0)
    assert_identical(last_iterate(job, 3).point.x, last_iterate(elsewhere, 3).point.x)


@pytest.mark.slow
@BOTH
@few
@given(seed=seeds, theta=st.floats(0.0, 0.4))
def test_no_factors_leave_one_term(kind, seed, theta):
    # One step from the start: x moves by fx - theta jvp[fy], nothing more.
    algorithm = effective(kind, 1, q=0, theta=theta)
    job = quadratic_job(algorithm, quadratic_data(2), seed=seed)
    samples, _ = draw_samples(job, 1)
    x, y = np.asarray(job.x), np.asarray(job.y)
    terms = []
    for (xi, zeta_0, factors), _ in (client[0] for client in samples):
        assert factors == []
        fx = np.mean(xi["r"]) * x + xi["c"].mean(axis=0)
        fy = y - xi["b"].mean(axis=0)
        terms.append(fx - theta * zeta_0["C"].mean(axis=0) @ fy)
    expected = x - 0.05 * np.mean(terms, axis=0)
    np.testing.assert_allclose(last_iterate(job, 1).point.x, expected, atol=1e-12)


@pytest.mark.slow
@BOTH
@few
@given(seed=seeds, upper=small)
def test_frozen_lower_level_is_local_momentum_descent(kind, seed, upper):
    algorithm = effective(kind, 2, upper=upper, lower=0.0)
    job = quadratic_job(algorithm, quadratic_data(2), seed=seed)
    end = last_iterate(job, 3)
    np.testing.assert_array_equal(end.point.y, job.y)
    samples, firsts = draw_samples(job, 6)
    letters = {"alpha": 0.4, "beta": 0.4, "rho1": upper, "rho2": 0.0, "theta": 0.3}
    start = (np.asarray(job.x), np.asarray(job.y), samples)
    expected = {
        LocalBSGM: lambda: listings.local_bsgm(*start, p=2, eta=1.0, **letters),
        LocalBSGVRM: lambda: listings.local_bsgvrm(
            *start, firsts, p=2, eta=lambda t: 1.0, **letters
        ),
    }[kind]()
    np.testing.assert_allclose(
        end.point.x, np.mean(expected[0], axis=0), rtol=0, atol=1e-12
    )


@BOTH
def test_zero_steps_move_nothing(kind):
    algorithm = effective(kind, 2, upper=0.0, lower=0.0)
    job = quadratic_job(algorithm, quadratic_data(2))
    end = last_iterate(job, 3)
    np.testing.assert_array_equal(end.point.x, job.x)
    np.testing.assert_array_equal(end.point.y, job.y)
    assert jnp.all(jnp.isfinite(end.direction.x))
