"""The task minimax against its closed form, and FedNest's figure in small."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.errors import HeterogeneityWarning, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.hypergradient import Exact, Neumann
from fedbilevel.problem import Oracle
from fedbilevel.tasks import minimax

POINT = (jnp.linspace(-1.0, 2.0, 10), jnp.linspace(0.5, -3.0, 10))


def make(*sizes: Any, **options: Any) -> Any:
    """Return the task; its metrics are known to be more than a function."""
    return minimax.make(*sizes, **options)


def together(task) -> Oracle:
    return Oracle(task.problem, task.data.pooled(), 0, None, None)


def test_the_losses_are_those_of_the_formula():
    task = make(3, spread=0.7)
    x, y = (np.asarray(block) for block in POINT)
    for client in range(3):
        A, b = (np.asarray(task.data.upper[name])[client, 0] for name in ("A", "b"))
        f = y @ A @ x - b @ y - 0.5 * y @ y + 0.05 * x @ x
        oracle = Oracle(task.problem, task.data, client, None, None)
        upper = oracle.upper_loss(*POINT, oracle.all_upper())
        lower = oracle.lower_loss(*POINT, oracle.all_lower())
        np.testing.assert_allclose((upper, lower), (f, -f))


def test_the_closed_form_is_that_of_the_mean_problem():
    task = make(4, spread=1.0)
    closed, oracle = task.metrics, together(task)
    rows = oracle.all_upper()
    A = np.mean(np.asarray(task.data.upper["A"]), axis=(0, 1))
    np.testing.assert_allclose(closed.A, A, atol=1e-12)
    x, y = POINT
    best = closed.lower_solution(x)
    np.testing.assert_allclose(oracle.lower_gradient(x, best, rows), 0, atol=1e-12)

    def phi(x):
        return oracle.upper_loss(x, closed.lower_solution(x), rows)

    np.testing.assert_allclose(closed.gradient(x), jax.grad(phi)(x), atol=1e-12)
    np.testing.assert_allclose(closed.gradient(closed.solution()), 0, atol=1e-12)


def test_all_metrics_vanish_at_the_saddle_point():
    closed = make().metrics
    x = closed.solution()
    found = closed(x, closed.lower_solution(x))
    assert set(found) == {"grad_norm_sq", "upper_error", "lower_error"}
    np.testing.assert_allclose(list(found.values()), 0, atol=1e-12)


@pytest.mark.parametrize("rule", [Exact(), Neumann(3, 0.5)])
def test_where_fy_is_zero_a_hypergradient_is_fx(rule):
    task = make(4, spread=1.0)
    closed, oracle, (x, _) = task.metrics, together(task), POINT
    y = closed.lower_solution(x)
    fx, fy = oracle.upper_gradients(x, y, oracle.all_upper())
    np.testing.assert_allclose(fy, 0, atol=1e-12)
    found = rule(oracle, x, y, rule.draw(oracle, jr.key(0)))
    np.testing.assert_allclose(found, fx, atol=1e-12)
    np.testing.assert_allclose(found, closed.gradient(x), atol=1e-12)


def test_the_noise_is_that_of_a_sample():
    task = make(1, noise=2.0)
    oracle = Oracle(task.problem, task.data, 0, 4000, 4000)
    drawn = np.asarray(oracle.draw_upper(jr.key(0)).rows["b"])
    np.testing.assert_allclose(drawn.mean(axis=0), task.metrics.b, atol=0.15)
    np.testing.assert_allclose(drawn.std(axis=0), 2.0, rtol=0.05)


@pytest.mark.slow
def test_a_run_as_recommended_comes_close():
    result = Experiment("minimax").run()
    assert result.final["grad_norm_sq"] < 0.01 < 100 < result.columns["grad_norm_sq"][0]
    assert result.final["upper_error"] < 0.1


@pytest.mark.slow
def test_fednest_converges_where_averaged_hypergradients_do_not():
    options = {"spread": "1", "noise": "0"}
    plain: Any = {"rounds": 120, "options": options, "safeguard": False}
    nest = Experiment("minimax", "fednest", **plain).run()
    assert nest.final["grad_norm_sq"] < 1e-9
    with pytest.warns(HeterogeneityWarning):
        light = Experiment("minimax", "local-bsgvrm", **plain).run()
    assert light.final["grad_norm_sq"] > 0.1


@pytest.mark.parametrize("option", ["spread", "noise"])
def test_negative_widths_are_refused(option):
    with pytest.raises(
        InvalidInputError, match=f"{option}=-1.*neither may be negative"
    ):
        make(**{option: -1.0})
