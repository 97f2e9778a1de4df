"""Runs on four devices, of which two share a model; started by `test_model_devices`.

    JAX_NUM_CPU_DEVICES=4 python -m tests.model_devices_worker

It prints, for each way to take part, what is where, and how far the run is from that on
one device.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import ClientData, Problem
from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from fedbilevel.runtime.driver import Outcome

WIDTH, ROWS, ROUNDS = 64, 6, 2


def loss(x, y, rows, frozen):
    inner = jnp.tanh(rows["a"] @ frozen["inner"])
    made = inner @ (frozen["outer"] + y) + frozen["bias"]
    return jnp.mean(jnp.exp(x) * jnp.sum(jnp.tanh(made), -1) ** 2) + jnp.vdot(y, y)


def job_of(
    clients: int,
    model_devices: int,
    *,
    participants: int | None = None,
    seed: int = 0,
) -> Job:
    """Return a small job with a frozen network of two layers."""
    draw = np.random.default_rng(0)
    held = [{"a": draw.normal(size=(ROWS - k % 2, 8))} for k in range(clients)]
    frozen = {
        "inner": draw.normal(size=(8, WIDTH)),
        "outer": draw.normal(size=(WIDTH, 4)) / 8,
        "bias": draw.normal(size=4),
    }
    return Job.of(
        FedF2SA(0.01, 0.01, 0.1, local_steps=1),
        Problem(loss, loss, frozen=frozen, model_devices=model_devices),
        ClientData.from_clients(held, held),
        jnp.zeros(()),
        jnp.full((WIDTH, 4), 0.1),
        seed=seed,
        sampling=Sampling(3, participants),
    )


def on_one_device(job: Job) -> Outcome:
    """Run a job as if there were no other devices."""
    every, jax.device_count = jax.device_count, lambda: 1
    try:
        return execute(SimulatorRuntime(job), ROUNDS)
    finally:
        jax.device_count = every


def told_of(participants: int | None) -> dict[str, Any]:
    """Return where things are on the devices, and how far the run is off."""
    runtime = SimulatorRuntime(job_of(3, 2, participants=participants))
    _, placed = runtime._fixed
    found, start = execute(runtime, ROUNDS), runtime.blank()
    expected = on_one_device(job_of(3, 1, participants=participants))

    def distance(one: Any, other: Any) -> float:
        apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one, other)
        return max(jax.tree.leaves(apart))

    return {
        "devices": jax.device_count(),
        "mesh": dict(runtime.layout.mesh().shape),
        "parts": {
            name: sorted({shard.data.shape for shard in leaf.addressable_shards})
            for name, leaf in placed.problem.frozen.items()
        },
        "rows": placed.data.lower["a"].addressable_shards[0].data.shape[0],
        "moved": distance(expected.state.server, start.server),
        "apart": distance(
            (found.state, found.columns), (expected.state, expected.columns)
        ),
    }


if __name__ == "__main__":
    told = {"all clients": told_of(None), "cohorts": told_of(2)}
    print(json.dumps(told))
