"""Direction estimators: their identities, and their recursions written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import _evaluation
from fedbilevel._types import Pair
from fedbilevel.estimators import HeavyBall, MovingAverage, Plain, Storm, at_both

STEPS = 10


def normals(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def tree(*seed):
    """Return a point: a pair of dicts, as algorithms carry it."""
    x = {"p": normals([*seed, 0], 2), "q": normals([*seed, 1])}
    return Pair(x, {"w": normals([*seed, 2], 2, 3)})


def sampled(seed):
    """Return G with its sample fixed: additive and multiplicative noise."""
    slope, offset = tree(seed, 1), tree(seed, 2)

    def evaluate(point):
        return jax.tree.map(
            lambda w, m, s: jnp.sin(w) * (1 + m) + s, point, slope, offset
        )

    return evaluate


def deterministic(point):
    return jax.tree.map(lambda w: w**3 - jnp.cos(w), point)


def assert_close(actual, expected, tolerance):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)

    jax.tree.map(compare, actual, expected)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("estimator", [Storm(), MovingAverage(), HeavyBall()])
def test_weight_one_is_plain_whatever_the_memory(estimator):
    G, point = sampled(0), tree(1)
    plain, sample = Plain()(G, point, tree(2), tree(3), 0.3)
    assert_same(plain, G(point))
    assert_same(sample, G(point))
    # A second memory, so that it is really not used.
    for memory in ((tree(2), tree(3)), (tree(4), tree(5))):
        direction, sample = estimator(G, point, *memory, 1.0)
        assert_close(direction, plain, 1e-14)
        assert_close(sample, plain, 1e-14)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.99])
def test_without_noise_the_direction_is_exact(weight):
    before = tree(0)
    direction = deterministic(before)
    for t in range(1, STEPS):
        point = tree(t)
        direction, _ = Storm()(deterministic, point, before, direction, weight)
        assert_close(direction, deterministic(point), 1e-12)
        before = point


def storm(weight, d, now, before):
    return now + (1 - weight) * (d - before)


def moving_average(weight, d, now, before):
    return (1 - weight) * d + weight * now


def heavy_ball(weight, d, now, before):
    return (1 - weight) * d + now


def plain(weight, d, now, before):
    return now


@pytest.mark.parametrize(
    "estimator, recursion",
    [
        (Storm(), storm),
        (MovingAverage(), moving_average),
        (HeavyBall(), heavy_ball),
        (Plain(), plain),
    ],
)
def test_recursion_with_a_weight_per_block(estimator, recursion):
    weight = Pair(x=0.3, y=0.8)
    direction = tree(100)
    expected = jax.tree.map(np.asarray, direction)
    for t in range(STEPS):
        G, point, before = sampled(t), tree(t + 1), tree(t)
        direction, sample = estimator(G, point, before, direction, weight)
        assert_close(sample, G(point), 1e-14)
        now, then = (jax.tree.map(np.asarray, G(w)) for w in (point, before))

        def block(a, d, g, h):
            return jax.tree.map(lambda *leaves: recursion(a, *leaves), d, g, h)

        expected = Pair(
            block(0.3, expected.x, now.x, then.x),
            block(0.8, expected.y, now.y, then.y),
        )
        assert_close(direction, expected, 1e-12)


def test_both_points_see_the_same_sample():
    # Noise that is added cancels in the difference, but only if it is the same one.
    offset = tree(7)

    def noisy(point):
        return jax.tree.map(jnp.add, deterministic(point), offset)

    memory = (tree(1), tree(2), tree(3), 0.0)
    (found, _), (quiet, _) = Storm()(noisy, *memory), Storm()(deterministic, *memory)
    assert_close(found, quiet, 1e-12)


@pytest.mark.parametrize(
    ("way", "stacks", "writes_out"),
    [
        (_evaluation.PROCESSOR, False, False),
        (_evaluation.ACCELERATOR, True, False),
        (_evaluation.WIDE_PRODUCTS, False, True),
    ],
)
def test_at_both_is_two_calls(way, stacks, writes_out):
    # The three ways of visiting the points must agree, and each can run here.
    G, point, before = sampled(0), tree(1), tree(2)
    assert (way.stacks_points, way.writes_out_points) == (stacks, writes_out)
    with _evaluation.using(way):
        now, then = at_both(G, point, before)
    assert_close(now, G(point), 1e-14)
    assert_close(then, G(before), 1e-14)
