"""The runtimes compute the same numbers, whatever the devices, chunks and cohorts."""

import dataclasses
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.algorithms import Gathered
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Problem
from fedbilevel.runtime import (
    Outcome,
    ReferenceRuntime,
    SimulatorRuntime,
    SweepRuntime,
    compilation,
    execute,
    keys,
    program,
)
from fedbilevel.runtime.driver import NEVER
from fedbilevel.runtime.exchange import Link, for_place
from fedbilevel.runtime.job import ABSENT, PRESENT, RENEWED
from fedbilevel.runtime.sweeping import single_outcomes
from tests.cases import (
    DEMANDING,
    DX,
    DY,
    ROWWISE,
    STRUCTURES,
    case_of,
    cohort_of,
    data_for,
    for_cases,
    quadratic_data,
    quadratic_job,
)

pytestmark = pytest.mark.two_devices

BSGM, BSGVRM = (case_of(name).algorithm for name in ("local-bsgm", "local-bsgvrm"))


def assert_close(a, b, tolerance):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def shorter(algorithm):
    """Return the algorithm with all its numbers a little smaller."""
    return jax.tree.map(lambda leaf: 0.9 * leaf, algorithm)


@pytest.mark.exhaustive
@STRUCTURES
def test_simulator_is_reference_for_all_clients(case):
    assert_simulator_is_reference(case, 3, "float64", 1e-12)


@pytest.mark.slow
@for_cases(lambda case: case.algorithm is BSGVRM)
def test_simulator_is_reference_in_single_precision(case):
    assert_simulator_is_reference(case, 2, "float32", 1e-6)


def assert_simulator_is_reference(case, participants, precision, tolerance):
    job = quadratic_job(
        case.algorithm,
        data_for(case, 3),
        participants=cohort_of(case, participants),
        precision=precision,
    )
    fast = execute(SimulatorRuntime(job), 2)
    slow = execute(ReferenceRuntime(job), 2)
    assert_close(fast.state, slow.state, tolerance)
    assert list(fast.columns) == list(slow.columns)
    assert_close(fast.columns, slow.columns, tolerance)
    assert case.algorithm.point(fast.state.server).x.dtype == precision


def test_devices_and_chunks_do_not_matter(monkeypatch):
    # Five clients do not fill two devices evenly: padding must weigh nothing.
    job = quadratic_job(BSGM, quadratic_data(5))
    assert_devices_do_not_matter(job, monkeypatch)


@pytest.mark.slow
@DEMANDING
def test_devices_do_not_matter_to_cohorts(case, monkeypatch):
    # What three of five clients keep is gathered from both devices.
    data, cohort = data_for(case, 5), cohort_of(case, 3)
    job = quadratic_job(case.algorithm, data, participants=cohort)
    assert_devices_do_not_matter(job, monkeypatch)


def assert_devices_do_not_matter(job, monkeypatch):
    spread = SimulatorRuntime(job, clients_at_once=2)
    assert spread.layout.devices == min(2, job.participants)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    alone = SimulatorRuntime(job, clients_at_once=1)
    assert alone.layout.devices == 1
    here, there = execute(spread, 4), execute(alone, 4)
    assert_close(here.state, there.state, 1e-12)
    assert_close(here.columns, there.columns, 1e-12)


@pytest.mark.exhaustive
@DEMANDING
def test_clients_may_be_reordered_with_their_names(case, monkeypatch):
    order, data = jnp.asarray([2, 0, 1]), data_for(case, 3)
    assert data.clients == order.size
    job = quadratic_job(case.algorithm, data)
    moved = quadratic_job(case.algorithm, jax.tree.map(lambda a: a[order], data))
    here = execute(SimulatorRuntime(job), 3).state.server
    client_key, reduced = keys.client_key, Link.reduced

    def renamed(root, stage, phase, client):
        return client_key(root, stage, phase, order[client])

    def by_name(link, *arguments):
        found = reduced(link, *arguments)
        if not isinstance(found, Gathered):
            return found
        return jax.tree.map(lambda leaf: leaf[jnp.argsort(order)], found)

    monkeypatch.setattr(keys, "client_key", renamed)
    # What is for one client alone, or from it alone, goes by its name as well.
    monkeypatch.setattr(program, "for_place", lambda m, j: for_place(m, order[j]))
    monkeypatch.setattr(Link, "reduced", by_name)
    compilation._programs.clear()
    there = execute(SimulatorRuntime(moved), 3).state.server
    compilation._programs.clear()
    assert_close(here, there, 1e-12)


@pytest.mark.slow
@DEMANDING
def test_a_sweep_is_one_compilation_and_equals_single_runs(case):
    job = quadratic_job(case.algorithm, data_for(case, 3))
    both, seeds = (case.algorithm, shorter(case.algorithm)), (0, 7)
    before = len(compilation._programs)
    runtime = SweepRuntime(job, algorithms=both, seeds=seeds)
    many = single_outcomes(runtime, execute(runtime, 4), NEVER, 4, 1)
    phases = 1 + bool(case.algorithm.setup())
    assert len(compilation._programs) - before == phases
    for algorithm, seed, outcome in zip(both, seeds, many, strict=True):
        assert isinstance(outcome, Outcome)
        single = dataclasses.replace(job, algorithm=algorithm, key=jr.key(seed))
        alone = execute(SimulatorRuntime(single), 4)
        assert_close(alone.state, outcome.state, 1e-12)
        assert_close(alone.columns, outcome.columns, 1e-12)


def test_cohorts_are_uniform_without_replacement():
    root, rounds, clients, count = jr.key(3), 4000, 6, 2

    def draw(index):
        return keys.draw_cohort(root, keys.ROUNDS, 0, index, clients, count)

    drawn = np.asarray(jax.vmap(draw)(jnp.arange(rounds)))
    assert (drawn[:, 0] != drawn[:, 1]).all()
    pairs = np.zeros((clients, clients))
    np.add.at(pairs, (drawn.min(axis=1), drawn.max(axis=1)), 1)
    seen = pairs[np.triu_indices(clients, 1)]
    # 15 pairs, each binomial with mean 266.7: five standard deviations are 79.
    assert np.abs(seen - rounds / 15).max() < 79


@pytest.mark.slow
def test_weights_of_clients_weigh():
    # Weight 3 to 1 is the client three times, if all copies draw the same: no noise.
    quiet = quadratic_data(2, noise=0.0)
    heavy = eqx.tree_at(lambda one: one.weights, quiet, jnp.asarray([3.0, 1.0]))
    copies = jax.tree.map(lambda leaf: leaf[jnp.asarray([0, 0, 0, 1])], quiet)
    algorithm = BSGM
    weighted = execute(SimulatorRuntime(quadratic_job(algorithm, heavy)), 4)
    repeated = execute(SimulatorRuntime(quadratic_job(algorithm, copies)), 4)
    assert_close(weighted.state.server, repeated.state.server, 1e-12)
    assert_close(weighted.columns, repeated.columns, 1e-12)


@pytest.mark.slow
def test_trees_of_any_shape_travel():
    """The same problem with x and y as dicts gives the same numbers."""

    def join(x, y):
        return jnp.concatenate([x["a"], x["b"]]), jnp.concatenate([y["l"][0], y["m"]])

    nested = Problem(
        lambda x, y, rows: ROWWISE.upper(*join(x, y), rows),
        lambda x, y, rows: ROWWISE.lower(*join(x, y), rows),
    )
    flat = quadratic_job(BSGVRM, quadratic_data(2))
    tree = dataclasses.replace(
        flat,
        problem=nested,
        metrics=None,
        x={"a": flat.x[:1], "b": flat.x[1:]},
        y={"l": [flat.y[:2]], "m": flat.y[2:]},
    )
    here = execute(SimulatorRuntime(flat), 3).state.server.point
    there = execute(SimulatorRuntime(tree), 3).state.server.point
    x, y = join(there.x, there.y)
    assert x.shape == (DX,) and y.shape == (DY,)
    assert_close((x, y), (here.x, here.y), 1e-12)


# Many dense solves at once, on as many devices as there are cores.
SOLVES = """
import jax.numpy as jnp, numpy as np
from fedbilevel import ClientData, Problem, configure, run
from fedbilevel.algorithms.local.fedbio_clientwise import FedBiOClientwise
from fedbilevel.hypergradient import Exact
configure()
def loss(x, y, rows):
    return jnp.mean((rows["a"] @ y - 1) ** 2) + jnp.exp(x) * jnp.sum(y**2)
rows = [{"a": np.random.default_rng(k).normal(size=(3, 41))} for k in range(32)]
data, start = ClientData.from_clients(rows, rows), (jnp.zeros(()), jnp.zeros(41))
algorithm = FedBiOClientwise(Exact(), 0.01, 0.01, local_steps=2)
run(Problem(loss, loss), data, start, algorithm, rounds=3)
print("done")
"""


@pytest.mark.slow
def test_dense_solves_do_not_wait_for_each_other(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SOLVES],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "done\n", done.stderr


# As in a notebook, where something was computed before anybody thought of settings.
LATE = """
import jax.numpy as jnp, numpy as np
assert jnp.ones(3).sum() == 3
from fedbilevel import ClientData, FedAvg, Problem, configure, run
configure(precision="float64", cores=2)
def loss(x, y, rows):
    return jnp.mean((rows["a"] - y) ** 2) + x**2
rows = [{"a": np.arange(3.0) + k} for k in range(2)]
data, start = ClientData.from_clients(rows, rows), (jnp.zeros(()), jnp.zeros(()))
result = run(Problem(loss, loss), data, start, FedAvg(0.1, local_steps=1), rounds=2)
print(result.columns["round"], result.point["y"].dtype)
"""


@pytest.mark.slow
def test_settings_that_come_late_warn_and_the_run_works(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LATE],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == "[1 2] float64\n"
    assert "ConfigurationWarning: JAX has computed already" in done.stderr
    assert "1 device(s) of this machine's 2 cores" in done.stderr
    # What else was asked for is done: the run's programs are kept.
    assert any((tmp_path / "fedbilevel" / "compiled").iterdir())


@pytest.mark.slow
@for_cases(lambda case: case.algorithm is BSGVRM)
def test_a_recorded_cohort_is_replayed(case, monkeypatch):
    job = quadratic_job(case.algorithm, quadratic_data(3), participants=2)
    drawn, original = [], keys.draw_cohort

    def recorded(*arguments):
        drawn.append(np.asarray(original(*arguments)))
        return original(*arguments)

    monkeypatch.setattr(keys, "draw_cohort", recorded)
    ran = execute(ReferenceRuntime(job), 3)
    record = np.zeros((len(drawn), 3), np.uint8)
    np.put_along_axis(record, np.asarray(drawn), PRESENT, axis=1)
    again = execute(SimulatorRuntime(job.replaying(record)), 3)
    assert_close(ran.state.server, again.state.server, 1e-12)
    assert_close(ran.state.clients, again.state.clients, 1e-12)
    # The first client is back without its memory, which then counts for nothing.
    record[-2:] = [[PRESENT, PRESENT, ABSENT], [RENEWED, PRESENT, ABSENT]]
    renewed = job.replaying(record)
    fast, slow = SimulatorRuntime(renewed), ReferenceRuntime(renewed)
    fast, slow = execute(fast, 3), execute(slow, 3)
    assert_close(fast.state, slow.state, 1e-12)
    record[-1, 0] = PRESENT
    present = execute(SimulatorRuntime(job.replaying(record)), 3).state.server
    assert not np.allclose(present.point.x, fast.state.server.point.x, atol=1e-6)


def test_an_attendance_that_does_not_fit_is_refused():
    job = quadratic_job(BSGM, quadratic_data(3))
    for record in (np.ones((4, 2)), np.ones(3), np.zeros((1, 3))):
        with pytest.raises(InvalidInputError, match="a row per exchange"):
            job.replaying(record)
