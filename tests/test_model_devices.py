"""Several devices share one copy of what is frozen: parts of it, and the same run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.cli.theory import memory_lines
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.models.transformer import Architecture, initialize
from fedbilevel.problem import Problem
from fedbilevel.runtime import SimulatorRuntime, SweepRuntime, execute
from fedbilevel.runtime.driver import NEVER, Outcome
from fedbilevel.runtime.layout import MODEL, Layout
from fedbilevel.runtime.sweeping import single_outcomes
from fedbilevel.tasks import reweighting
from tests.conftest import compiled
from tests.model_devices_worker import job_of, loss

pytestmark = pytest.mark.two_devices

ROOT = Path(__file__).parent.parent
SMALL = {"width": "16", "blocks": "3", "rank": "2", "adapted": "query,down"}


@pytest.fixture(scope="module", autouse=True)
def untrained():
    """Leave pretraining out: compiling it takes longest."""

    def initialized(width: int, blocks: int, longest: int):
        made = Architecture(258, width, blocks, 2, 1, width // 2, 3 * width, longest)
        return initialize(made, jr.key(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reweighting, "pretrained", initialized)
        yield


def assert_close(a, b, tolerance=1e-10):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def text_experiment(model_devices: int) -> Experiment:
    sizes = {"clients": 2, "rounds": 2, "local_steps": 1, "batch": 2}
    given = {"algorithm": "fedavg", "model_devices": model_devices, "options": SMALL}
    return Experiment("reweighting", **sizes, **given)


def text_runtime(model_devices: int) -> SimulatorRuntime:
    return SimulatorRuntime(text_experiment(model_devices).build().job())


def test_each_device_holds_half_of_a_transformer():
    made = Architecture(258, 16, 3, 2, 1, 8, 48, 32)
    layout = Layout(2, 2, devices=1, at_once=None, model_devices=2)
    whole = initialize(made, jr.key(0))
    base = layout.place(whole, layout.frozen_specs(whole))
    found = {}
    for name, leaf in {"embeddings": base.embeddings, **base.weights}.items():
        shards = leaf.addressable_shards
        assert len({shard.device for shard in shards}) == 2
        found[name] = {shard.data.shape for shard in shards}
    # Blocks are stacked along the first axis, and a loop goes through them.
    assert found == {
        "embeddings": {(129, 16)},
        "query": {(3, 8, 16)},
        "key": {(3, 8, 8)},
        "value": {(3, 8, 8)},
        "output": {(3, 8, 16)},
        "gate": {(3, 24, 16)},
        "up": {(3, 24, 16)},
        "down": {(3, 16, 24)},
    }


@pytest.mark.slow
def test_a_transformer_on_two_devices_is_that_on_one(monkeypatch):
    shared = text_runtime(2)
    assert (shared.layout.devices, shared.layout.model_devices) == (1, 2)
    found = execute(shared, 2)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    alone = text_runtime(1)
    assert alone.layout.devices == alone.layout.model_devices == 1
    expected = execute(alone, 2)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected.state.server))
    assert_close((found.state, found.columns), (expected.state, expected.columns))


@pytest.mark.slow
def test_runs_of_a_sweep_share_a_model_too():
    seeds = (3, 4)
    runtime = SweepRuntime(job_of(clients=3, model_devices=2), seeds=seeds)
    many = single_outcomes(runtime, execute(runtime, 2), NEVER, 2, 1)
    for seed, outcome in zip(seeds, many, strict=True):
        assert isinstance(outcome, Outcome)
        alone = execute(SimulatorRuntime(job_of(3, 1, seed=seed)), 2)
        assert_close(alone.state, outcome.state, 1e-12)


@pytest.fixture(scope="module")
def told_by_four():
    """Let a process with four devices run what it is asked, and tell of it."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.model_devices_worker"],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_NUM_CPU_DEVICES": "4",
            "JAX_ENABLE_X64": "1",
            "NPROC": "8",  # every device holds a thread while it waits for others
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all clients", "cohorts"])
def test_clients_and_model_are_spread_over_two_axes(told_by_four, who):
    told = told_by_four[who]
    assert told["devices"] == 4 and told["mesh"] == {"clients": 2, "model": 2}
    assert told["parts"] == {"inner": [[8, 32]], "outer": [[32, 4]], "bias": [[2]]}
    # Of three clients a device has two places; of a cohort, whoever it is, all rows.
    assert told["rows"] == (2 if who == "all clients" else 3)
    assert told["moved"] > 1e-3 and told["apart"] < 1e-12


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 64, 16), 1),
        ((4, 16, 64), 2),
        ((4, 5, 7), None),  # the first is that of the blocks
        ((258, 16), 0),
        ((5, 16), 1),
        ((8, 8), 0),
        ((6,), 0),
        ((), None),
    ],
)
def test_the_longest_axis_that_can_be_is_divided(shape, axis):
    layout = Layout(2, 2, devices=1, at_once=None, model_devices=2)
    (spec,) = layout.frozen_specs((jnp.zeros(shape),))
    places = [number for number, name in enumerate(spec) if name == MODEL]
    assert places == ([] if axis is None else [axis])


def test_what_is_small_is_copied():
    layout = Layout(2, 2, devices=1, at_once=None, model_devices=2)
    large, small = jnp.zeros((4096, 8)), jnp.zeros(6)
    assert [tuple(spec) for spec in layout.frozen_specs((large, small))] == [
        (MODEL,),
        (),
    ]


@pytest.mark.parametrize("count", [3, 4, 0, -1])
def test_devices_that_cannot_share_are_refused(count):
    told = rf"model_devices={count}: .* divide the 2 device\(s\)\. Possible: 1, 2\."
    with pytest.raises(InvalidInputError, match=told):
        SimulatorRuntime(job_of(clients=2, model_devices=count))
    with pytest.raises(InvalidInputError, match=told):
        text_experiment(count).build()


def test_without_anything_frozen_there_is_nothing_to_share():
    with pytest.raises(InvalidInputError, match="model_devices=2: nothing .* frozen"):
        Problem(loss, loss, model_devices=2)
    with pytest.raises(InvalidInputError, match="model_devices=2: nothing .* frozen"):
        Experiment("quadratic", clients=2, model_devices=2).build()


def test_a_runtime_of_one_device_is_refused():
    with pytest.raises(InvalidInputError, match="reference has the whole model on one"):
        replace(text_experiment(2), runtime="reference").check()


def test_a_model_that_is_shared_is_not_made_on_one_of_its_devices(monkeypatch):
    seen, made = [], reweighting.base_of

    def watched(*arguments):
        seen.append(jax.config.jax_default_device)  # type: ignore[attr-defined]
        return made(*arguments)

    monkeypatch.setattr(reweighting, "base_of", watched)
    for count in (1, 2):
        text_experiment(count).build_task()
    assert seen == [None, jax.local_devices(backend="cpu")[0]]


@pytest.mark.slow
def test_a_plan_of_memory_is_that_of_one_of_the_devices():
    options = [f"--set={name}={value}" for name, value in SMALL.items()]
    command = ["plan", "reweighting", "--memory", "--clients", "2", *options]
    command += ["--set=blocks=1", "--algorithm", "fedavg", "--model-devices", "2"]
    told = CliRunner().invoke(app, [*command, "--json"])
    found = json.loads(told.stdout)
    # Of query and output, key and value, and the three of 48 outputs or inputs; then
    # A of two adapters. So few norms are no small part of it, and divided as well.
    weights = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 48 * 16
    whole = 258 * 16 + weights + 2 * (16 + 48) + 2 * 16 + 16
    assert found["frozen"] == 4 * whole / 2
    assert found["model_devices"] == 2
    assert "one of 2 that share the model" in memory_lines(found)[0]


def test_a_plan_by_a_theorem_has_no_devices():
    command = ["plan", "quadratic", "--target", "0.1", "--model-devices", "2"]
    refused = CliRunner().invoke(app, command)
    assert "--model-devices is for a plan with --memory" in refused.output
