"""One machine: a problem, its rows, a start and a method are all there is to say."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel
from fedbilevel import SOBA, Pair, Problem, SimulatorRuntime, algorithms, minimize
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.options import algorithm_from, as_options, options_of
from fedbilevel.runtime import execute
from tests.cases import case_of, quadratic_data, some_of
from tests.reference.bent_job import bent_job


def upper(x, y, rows):
    return 0.5 * jnp.mean((rows["a"] @ y - rows["b"]) ** 2)


def lower(x, y, rows):
    fit = 0.5 * jnp.mean((rows["a"] @ y - rows["b"]) ** 2)
    return fit + 0.5 * jnp.exp(x) @ y**2


PROBLEM = Problem(upper, lower)
NUMBERS = np.random.default_rng(0)
TRUE = np.asarray([1.0, 0.0])


def level(count, noise):
    a = NUMBERS.standard_normal((count, 2))
    return {"a": a, "b": a @ TRUE + noise * NUMBERS.standard_normal(count)}


ROWS = (level(40, 0.1), level(8, 1.0))


def phi(x):
    """Return the upper loss at the ridge solution, in closed form."""
    below = ROWS[1]
    H = below["a"].T @ below["a"] / 8 + np.diag(np.exp(x))
    y = np.linalg.solve(H, below["a"].T @ below["b"] / 8)
    return 0.5 * np.mean((ROWS[0]["a"] @ y - ROWS[0]["b"]) ** 2)


def slope_at(x):
    """Return the norm of grad Phi, by differences."""
    steps = 1e-5 * np.eye(2)
    return np.linalg.norm([(phi(x + h) - phi(x - h)) / 2e-5 for h in steps])


def test_a_problem_its_rows_and_a_method_are_enough():
    start = (jnp.zeros(2), jnp.zeros(2))
    soba = SOBA(0.5, 0.3, 0.3, local_steps=100)
    found = minimize(PROBLEM, ROWS, start, soba, rounds=40, batch=None)
    assert slope_at(np.asarray(found.x)) < 0.05 * slope_at(np.zeros(2))
    assert found.counts["exchanges"] == found.counts["floats_up"] == 0
    assert found.config["clients"] == 1


def test_the_guide_keeps_the_only_true_coefficient(capsys):
    text = (Path(__file__).parent.parent / "docs" / "one-machine.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(block, found)
    assert np.argmin(found["result"].x) == 0
    assert np.argmax(np.abs(found["result"].y)) == 0
    assert capsys.readouterr().out.startswith("[")


def test_samples_are_batches_of_rows():
    start = (jnp.zeros(2), jnp.zeros(2))
    found = minimize(PROBLEM, ROWS, start, SOBA(0.1, 0.1, 0.1), rounds=3, batch=4)
    assert found.counts["samples"] == {"upper_samples": 12, "lower_samples": 12}


@pytest.mark.slow
def test_what_is_private_may_be_in_one_place_of_one_client():
    """It is the same run as with rows that stay there, and nothing is sent."""
    algorithm, private = SOBA(0.1, 0.2, 0.15), Pair(True, False)
    apart = quadratic_data(1)
    ends = []
    for data in (apart, apart.pooled()):
        job = bent_job(algorithm, data, private=private, batch=None)
        state = execute(SimulatorRuntime(job), 3, measure_every=3).state
        ends.append(jax.tree.leaves(algorithm.point(state.joined())))
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    with pytest.raises(InvalidInputError, match="--clients 1"):
        bent_job(algorithm, quadratic_data(2).pooled(), private=private)


@pytest.mark.parametrize("rows", [ROWS[0], (ROWS[0],)])
def test_rows_are_a_pair(rows):
    start = (jnp.zeros(2), jnp.zeros(2))
    with pytest.raises(InvalidInputError, match="upper level, and those of the lower"):
        minimize(PROBLEM, rows, start, SOBA(0.1, 0.1, 0.1), rounds=1)


SINGLE = [
    n for n in algorithms.names() if "single machine" in algorithms.find(n).answers
]


@pytest.mark.parametrize("name", some_of(SINGLE, 3))
def test_a_method_of_one_machine_takes_what_tasks_recommend(name):
    """It needs no option but what its row chooses, and runs on pooled rows."""
    entry, chosen = algorithms.find(name), case_of(name).choices
    assert entry.pools
    built = Experiment("quadratic", name, options=chosen).build()
    assert built.setting.data.clients == 1
    written = as_options(entry, built.algorithm)
    assert set(written) <= set(options_of(entry))
    again = algorithm_from(
        entry, written, 1, getattr(built.algorithm, "local_steps", 1)
    )
    for one, other in zip(
        jax.tree.leaves(again), jax.tree.leaves(built.algorithm), strict=True
    ):
        np.testing.assert_allclose(one, other)


def test_all_methods_can_be_imported_from_the_package():
    for name in algorithms.names():
        make = algorithms.find(name).make
        assert any(getattr(fedbilevel, one) is make for one in dir(fedbilevel))
