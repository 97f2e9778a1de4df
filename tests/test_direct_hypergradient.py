"""`fedbilevel.hypergradient`: ridge regression, whose answer has a closed form."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.hypergradient.conjugate_gradient import solve_if_convex

DRAW = np.random.default_rng(0)
SIZE = 6
TRAIN = {"a": DRAW.normal(size=(30, SIZE)), "b": DRAW.normal(size=30)}
JUDGE = {"a": DRAW.normal(size=(20, SIZE)), "b": DRAW.normal(size=20)}


def squares(y, rows):
    return jnp.mean((rows["a"] @ y - rows["b"]) ** 2)


def upper(x, y, rows):
    return squares(y, rows)


def lower(x, y, rows):
    return squares(y, rows) + jnp.exp(x) * y @ y


PROBLEM = fb.Problem(upper, lower)


def solution(x):
    a, b = jnp.asarray(TRAIN["a"]), jnp.asarray(TRAIN["b"])
    return jnp.linalg.solve(a.T @ a / 30 + jnp.exp(x) * jnp.eye(SIZE), a.T @ b / 30)


def judged(x):
    """Return f(x, y*(x))."""
    return squares(solution(x), jax.tree.map(jnp.asarray, JUDGE))


def found(x, estimator=None):
    return fb.hypergradient(PROBLEM, x, solution(x), JUDGE, TRAIN, estimator)


@pytest.mark.parametrize(
    "estimator",
    [None, fb.Exact(), fb.ConjugateGradient(SIZE), fb.Neumann(400, 0.1)],
    ids=["default", "exact", "conjugate gradient", "series"],
)
def test_it_is_the_gradient_of_the_judged_solution(estimator):
    x = jnp.asarray(-1.0)
    np.testing.assert_allclose(found(x, estimator), jax.grad(judged)(x), rtol=1e-5)


def test_it_can_be_compiled_mapped_and_differentiated():
    many = jnp.asarray([-2.0, -1.0, 0.5])
    mapped = jax.jit(jax.vmap(found))(many)
    np.testing.assert_allclose(mapped, jax.vmap(jax.grad(judged))(many), rtol=1e-5)
    second = jax.vmap(jax.grad(found))(many)
    expected = jax.vmap(jax.grad(jax.grad(judged)))(many)
    np.testing.assert_allclose(second, expected, rtol=1e-4)


def test_derivatives_of_a_converged_solve_are_numbers_in_single_precision():
    # 20 steps after the sixth, which is the last one that does anything.
    rule, x = fb.ConjugateGradient(26), jnp.asarray(-1.0, jnp.float32)
    y = solution(jnp.asarray(-1.0)).astype(jnp.float32)
    rows = [{n: a.astype(np.float32) for n, a in one.items()} for one in (JUDGE, TRAIN)]

    def estimate(x):
        return fb.hypergradient(PROBLEM, x, y, rows[0], rows[1], rule)

    slope = jax.grad(estimate)(x)
    step = 1e-2
    difference = (estimate(x + step) - estimate(x - step)) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-2)


def residuals(hessian, b):
    """Return the relative residual after every step of conjugate gradient."""
    r = d = b
    found = []
    for _ in range(SIZE):
        along = hessian @ d
        a = r @ r / (d @ along)
        r, before = r - a * along, r
        d = r + (r @ r / (before @ before)) * d
        found.append(np.linalg.norm(r) / np.linalg.norm(b))
    return found


@pytest.mark.parametrize("tolerance", [0.3, 0.1])
def test_a_tolerance_ends_a_solve(tolerance):
    x, a, c = jnp.asarray(-1.0), TRAIN["a"], JUDGE["a"]
    fy = 2 * c.T @ (c @ np.asarray(solution(x)) - JUDGE["b"]) / 20
    left = residuals(2 * (a.T @ a / 30 + np.exp(-1) * np.eye(SIZE)), fy)
    steps = 1 + next(k for k, one in enumerate(left) if one <= tolerance)
    ended = found(x, fb.ConjugateGradient(SIZE, tolerance=tolerance))
    np.testing.assert_array_equal(ended, found(x, fb.ConjugateGradient(steps)))
    assert steps < SIZE


def test_a_tolerance_ends_the_work_of_a_batch_of_solves_too():
    """A branch around a step would run in all of them."""
    done: list[Any] = []
    diagonal, b = jnp.arange(1.0, 4.0), jnp.asarray([[1.0, 0, 0], [1.0, 1.0, 0]])

    def product(d):
        jax.debug.callback(lambda: done.append(1))
        return diagonal * d

    solve = partial(solve_if_convex, product, steps=500, tolerance=1e-6)
    z, _ = jax.jit(jax.vmap(solve))(b)
    jax.effects_barrier()
    np.testing.assert_allclose(z, b / diagonal, rtol=1e-6)
    # Two steps for two different eigenvalues, in both.
    assert len(done) <= 2 * len(b)


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_what_is_no_number_stays_none(tolerance):
    b = jnp.asarray([1.0, jnp.nan])
    z, _ = solve_if_convex(lambda d: d, b, 5, tolerance)
    assert jnp.isnan(z).any()


def test_a_tolerance_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"tolerance=\.\.\.\)` must be at least 0"):
        fb.ConjugateGradient(3, tolerance=1.0)


def test_the_block_of_the_guide_is_right():
    text = (Path(__file__).parents[1] / "docs" / "hypergradients.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "hypergradients.md", "exec"), names)
    x, y, train, judge = (names[name] for name in ("x", "y", "train", "judge"))
    a, c = train["a"], judge["a"]
    hessian = 2 * (a.T @ a / 40 + np.diag(np.exp(x)))
    fy = 2 * c.T @ (c @ y - judge["b"]) / 40
    expected = -2 * np.exp(x) * y * np.linalg.solve(hessian, fy)
    np.testing.assert_allclose(names["slope"](x, y), expected, rtol=1e-4)
