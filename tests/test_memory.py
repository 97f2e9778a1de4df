"""Memory: rows worked on in pieces, and what is told of a run before it runs."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA
from fedbilevel.cli.app import app
from fedbilevel.cli.theory import _size, memory_lines
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import ClientData, Oracle, Problem
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime
from fedbilevel.runtime.driver import first_span

WIDTH, ROWS = 64, 24


def upper(x, y, rows, frozen):
    return jnp.mean(jnp.sum(jnp.tanh(rows["a"] @ frozen * y), axis=-1) ** 2)


def lower(x, y, rows, frozen):
    wide = jnp.tanh((rows["a"] @ frozen) * y)
    return jnp.mean(jnp.exp(x) * jnp.sum(wide, -1) ** 2) + jnp.vdot(y, y)


def problem_of(clients, rows_at_once=None, seed=0):
    """Return a problem whose intermediate values are much larger than its rows."""
    draw = np.random.default_rng(seed)
    held = [{"a": draw.normal(size=(ROWS - k % 3, 3))} for k in range(clients)]
    frozen = jnp.asarray(draw.normal(size=(3, WIDTH)))
    problem = Problem(upper, lower, frozen=frozen, rows_at_once=rows_at_once)
    return problem, ClientData.from_clients(held, held)


def job_of(clients, rows_at_once=None):
    problem, data = problem_of(clients, rows_at_once)
    algorithm = FedF2SA(0.01, 0.01, 0.1, local_steps=2)
    start = (jnp.zeros(()), jnp.full(WIDTH, 0.1))
    return Job.of(algorithm, problem, data, *start, sampling=Sampling(12))


def test_pieces_add_up_to_the_whole():
    """Losses and derivatives of drawn rows, and of all rows with their weights."""
    whole, data = problem_of(2)
    pieces = replace(whole, rows_at_once=5)  # drawn are 12, and all are 23 of 24
    x, y = jnp.asarray(0.3), jr.normal(jr.key(0), (WIDTH,))

    def values(problem):
        oracle = Oracle(problem, data, 1, 12, 12)
        for above, below in (
            (oracle.draw_upper(jr.key(1)), oracle.draw_lower(jr.key(2))),
            (oracle.all_upper(), oracle.all_lower()),
        ):
            yield oracle.upper_loss(x, y, above), oracle.lower_loss(x, y, below)
            yield oracle.upper_gradients(x, y, above)
            yield oracle.lower_gradients(x, y, below)
            yield oracle.hessian_product(x, y, y, below)
            yield oracle.cross_product(x, y, y, below)

    found, expected = (jax.jit(lambda p=p: list(values(p)))() for p in (pieces, whole))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), found, expected
    )


def test_no_rows_at_once_is_refused():
    with pytest.raises(InvalidInputError, match="rows_at_once=0.*at least 1"):
        Problem(upper, lower, rows_at_once=0)


def plan_of(job):
    runtime = SimulatorRuntime(job)
    return runtime.memory(first_span(runtime, 5)), runtime


@pytest.mark.slow
def test_intermediate_values_do_not_grow_with_clients():
    few, runtime = plan_of(job_of(4, rows_at_once=2))
    many, _ = plan_of(job_of(16, rows_at_once=2))
    assert runtime.layout.at_once == 1
    # Only replies, of x and two copies of y, are held for every client.
    reply = 8 * (1 + 2 * WIDTH)
    assert many.working - few.working < 3 * 12 * reply


def test_parts_of_memory_are_those_of_the_arrays():
    plan, _ = plan_of(job_of(4, rows_at_once=2))
    assert plan.frozen == 8 * 3 * WIDTH
    rows, others = 2 * 4 * ROWS * 3 * 8, 2 * 4 * 4 + 4 * 8  # sizes, and weights
    assert plan.rows == rows + others
    assert plan.state == 8 * (1 + 2 * WIDTH)
    assert plan.frozen + plan.rows + plan.state + plan.working <= plan.total
    assert plan.limit is not None and plan.fits


_MEASURED = """
import jax.numpy as jnp, numpy as np
from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime
from fedbilevel.runtime.driver import first_span

def told(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(one for one in lines if one.startswith(name)).split()[1])

def loss(x, y, rows, frozen):
    wide = jnp.tanh(rows["a"] * frozen * y)
    return jnp.mean(jnp.exp(x) * jnp.sum(jnp.tanh(wide * y), -1) ** 2) + jnp.vdot(y, y)

width = 1_000_000
held = [{"a": np.ones((32, 1))} for _ in range(2)]
problem = Problem(loss, loss, frozen=jnp.ones((1, width)), rows_at_once=32)
algorithm = FedF2SA(1e-9, 1e-9, 0.1, local_steps=1)
data = ClientData.from_clients(held, held)
start = (jnp.zeros(()), jnp.full(width, 0.1))
job = Job.of(algorithm, problem, data, *start, sampling=Sampling(32))
runtime = SimulatorRuntime(job)
span = first_span(runtime, 1)
plan = runtime.memory(span)
state, _ = runtime.start()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = told("VmRSS")
runtime.advance(state, span)
inputs = plan.frozen + plan.rows + plan.state
print(plan.total, inputs + told("VmHWM") - before)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are told by /proc")
def test_what_is_planned_is_what_a_process_takes():
    ran = subprocess.run(
        [sys.executable, "-c", _MEASURED], capture_output=True, text=True, check=True
    )
    planned, taken = map(int, ran.stdout.split())
    # Kernels for a CPU take two buffers of 32 x 1,000,000 numbers that XLA plans not.
    apart = 2 * 4 * 32 * 1_000_000
    assert 0.95 < (planned + apart) / taken < 1.05, (planned, taken)


def test_bytes_are_told_in_the_largest_unit_that_they_fill():
    sizes = [
        _size(count)
        for count in (1500, 999_000, 10**6, 999 * 10**6, 10**9, 25 * 10**11)
    ]
    assert sizes == ["1.5 kB", "999 kB", "1 MB", "999 MB", "1 GB", "2.5e+03 GB"]


@pytest.mark.slow
def test_a_plan_of_memory_is_told_and_is_no_plan_by_a_theorem():
    runner = CliRunner()
    command = ["plan", "quadratic", "--memory", "--clients", "2"]
    told = runner.invoke(app, [*command, "--json"])
    found = json.loads(told.stdout)
    parts = sum(found[name] for name in ("frozen", "rows", "state", "working"))
    assert 0 < parts <= found["total"] and found["fits"] and found["clients"] == 2
    shown = "\n".join(memory_lines(found))
    assert "it fits" in shown and "intermediate values" in shown
    refused = runner.invoke(app, [*command, "--target", "0.1"])
    assert "--target is for a plan by a theorem" in refused.output
