"""How a program is written follows from its products, and changes rounding alone."""

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel._evaluation import (
    ACCELERATOR,
    PROCESSOR,
    THIN_PRODUCTS,
    WIDE_PRODUCTS,
)
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.experiments import Experiment
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute, products
from fedbilevel.runtime.compilation import Asked, compiled
from fedbilevel.runtime.products import evaluation

THIN = ("regularization", 64, {}, THIN_PRODUCTS)


def job_of(task, batch, options=None):
    """Return a job of LocalBSGVRM, which evaluates directions at two points."""
    plan = Experiment(
        task, "local-bsgvrm", 3, local_steps=2, batch=batch, options=options or {}
    )
    built = plan.build()
    return built.setting.job(built.algorithm)


def visited(job):
    """Return how points are visited, however the program is compiled."""
    return replace(evaluation(job), small_kernels=False)


@pytest.mark.parametrize(
    ("task", "batch", "options", "expected"),
    [
        THIN,
        ("regularization", 32, {}, THIN_PRODUCTS),
        ("regularization", 31, {}, PROCESSOR),  # fewer rows than were measured
        ("loss-tuning", 64, {"model": "mlp"}, PROCESSOR),  # wide weights
        ("representation", 64, {}, PROCESSOR),  # each point has its own features
    ],
)
def test_points_are_stacked_where_rows_are_shared_by_thin_weights(
    task, batch, options, expected
):
    assert visited(job_of(task, batch, options)) == expected


@pytest.mark.parametrize(
    ("own", "expected"), [(False, THIN_PRODUCTS), (True, PROCESSOR)]
)
def test_rows_that_each_point_scales_are_not_shared(own, expected):
    def loss(x, y, rows):
        features = rows["a"] * x if own else rows["a"]
        return jnp.mean((features @ y) ** 2) + jnp.sum(y**2)

    rows = {"a": np.ones((64, 5))}
    data = ClientData.from_clients([rows], [rows])
    method = LocalBSGVRM(Neumann(1, 0.1), 0.1, 1.0, 1.0, 0.5, 0.5, local_steps=1)
    point = jnp.ones(5), jnp.ones((5, 3))
    job = Job.of(method, Problem(loss, loss), data, *point, sampling=Sampling(64))
    assert visited(job) == expected


@pytest.mark.parametrize(
    ("rows", "expected"), [(999, ACCELERATOR), (1000, WIDE_PRODUCTS)]
)
def test_an_accelerator_takes_points_with_many_numbers_apart(
    monkeypatch, rows, expected
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    job = job_of(*THIN[:2])
    assert evaluation(replace(job, y=jnp.ones((rows, 1000)))) == expected


@pytest.mark.parametrize(("rows", "apart"), [(31, False), (32, True)])
def test_a_processor_takes_large_points_apart(rows, apart):
    job = replace(job_of("regularization", 31), x=jnp.ones(10**5 - 32_000))
    assert evaluation(replace(job, y=jnp.ones(rows * 1000))).writes_out_points == apart


@pytest.mark.slow
@pytest.mark.parametrize("other_way", [THIN_PRODUCTS, WIDE_PRODUCTS])
def test_how_points_are_visited_changes_rounding_alone(other_way):
    """The same rounds by both programs, which are not the same one."""
    ends = []
    for way in (PROCESSOR, other_way):
        runtime = SimulatorRuntime(job_of(*THIN[:2]))
        runtime._evaluation = way
        ends.append(execute(runtime, 3).state.server)
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.two_devices
@pytest.mark.parametrize(("clients", "splits"), [(1, True), (2, False), (3, False)])
def test_kernels_are_split_unless_every_device_has_clients(clients, splits):
    """One client leaves a device idle, whose core may help the other."""

    def loss(x, y, row):
        return jnp.sum((x - y) ** 2) + jnp.mean(row["a"])

    rows = [{"a": np.ones(2)}] * clients
    data, one = ClientData.from_clients(rows, rows), jnp.ones(3)
    method = LocalBSGVRM(Neumann(1, 0.1), 0.1, 1.0, 1.0, 0.5, 0.5, local_steps=1)
    job = Job.of(method, Problem(loss, loss), data, one, one, sampling=Sampling(1))
    assert evaluation(job).splits_kernels == splits


def test_one_device_splits_kernels():
    assert evaluation(job_of(*THIN[:2])).splits_kernels


@pytest.mark.parametrize(("numbers", "small"), [(10**6, True), (10**6 + 1, False)])
def test_kernels_are_small_up_to_a_million_numbers_a_pass(monkeypatch, numbers, small):
    job = job_of(*THIN[:2])
    parameters = sum(leaf.size for leaf in jax.tree.leaves((job.x, job.y)))
    assert products.numbers_of_pass(job) == job.clients * 64 * parameters
    monkeypatch.setattr(products, "numbers_of_pass", lambda job: numbers)
    assert evaluation(job).small_kernels == small


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core splits nothing")
def test_a_program_of_busy_devices_has_no_kernel_for_several_threads():
    rows, places = jnp.ones((2000, 500)), jnp.arange(1000, dtype=jnp.int32)

    def gathered(fixed, places):
        return fixed[places]

    def is_split(way):
        run, _ = compiled(Asked(gathered, rows, (places,), (), way))
        return 'outer_dimension_partitions":["' in run.executable.as_text()

    assert is_split(PROCESSOR)
    assert not is_split(replace(PROCESSOR, splits_kernels=False))
