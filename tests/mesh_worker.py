"""One of several processes that compute together; started by `test_mesh`.

    python -m tests.mesh_worker COORDINATOR PROCESSES PROCESS FOLDER

Each has two devices, and writes what it got into the folder.
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import ClientData, Problem
from fedbilevel.cli.app import app
from fedbilevel.runtime import (
    Checkpoints,
    Job,
    Outcome,
    Sampling,
    SimulatorRuntime,
    driver,
    execute,
)

DEVICES, CLIENTS, ROUNDS = 2, 5, 4
COMMAND = "run two-client --algorithm fedavg --rounds 4 --precision float64 --json"
CHOSEN = {
    "all clients": ("local-bsgvrm", CLIENTS),
    "cohorts": ("fednest", 3),
    "private blocks": ("fedbioacc-local", CLIENTS),
}


def loss(x, y, batch):
    fit = jnp.mean((batch["a"] @ y - batch["t"]) ** 2)
    return fit + jnp.sum(x**2 + (x * y) ** 2)


def rows(client: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(client)
    a = 0.5 * draw.normal(size=(3 + client, 2))
    return {"a": a, "t": a @ draw.normal(size=2)}


def jobs() -> dict[str, Job]:
    """Return small runs; five clients do not fill four devices evenly."""
    from tests.cases import case_of, with_precision  # computes: not before joining

    data = [rows(client) for client in range(CLIENTS)]
    arguments = (Problem(loss, loss), ClientData.from_clients(data, data))
    start = (jnp.ones(2), jnp.ones(2))
    return {
        title: with_precision(
            Job.of(
                case_of(name).algorithm,
                *arguments,
                *start,
                sampling=Sampling(batch=1, participants=participants),
            ),
            "float32",
        )
        for title, (name, participants) in CHOSEN.items()
    }


def leaves_of(title: str, outcome: Outcome) -> dict[str, np.ndarray]:
    """Return all numbers of an outcome under names."""
    leaves = jax.tree.leaves((outcome.state, outcome.columns))
    return {f"{title}, {number}": leaf for number, leaf in enumerate(leaves)}


def stopped_and_resumed(job: Job, folder: Path) -> Outcome:
    """Stop a run by its last process alone, then continue it."""
    last = jax.process_index() == jax.process_count() - 1
    keep = Checkpoints(folder)

    def watch(done: int, total: int, newest: dict[str, float]) -> None:
        if last:
            raise KeyboardInterrupt

    try:
        execute(SimulatorRuntime(job), ROUNDS, checkpoints=keep, watch=watch)
    except KeyboardInterrupt as stop:
        assert str(stop).startswith(f"After round 1 of {ROUNDS}. Kept in")
        return execute(SimulatorRuntime(job), ROUNDS, checkpoints=keep)
    raise AssertionError("the run went on")


def main(coordinator: str, processes: str, process: str, folder: Path) -> None:
    """Run a command and all jobs."""
    os.cpu_count = lambda: DEVICES
    where = ["--coordinator", coordinator, "--processes", processes]
    where += ["--process", process, "--out", str(folder / "command")]
    assert not app([*COMMAND.split(), *where], standalone_mode=False)
    assert jax.device_count() == DEVICES * int(processes)
    if process != "0":
        driver._GLANCE = 0.0  # they would run shorter chunks than process 0
    every, found = jobs(), {}
    for title, job in every.items():
        found |= leaves_of(title, execute(SimulatorRuntime(job), ROUNDS))
    resumed = stopped_and_resumed(every["private blocks"], folder / "stopped")
    found |= leaves_of("resumed", resumed)
    np.savez(folder / f"process-{process}.npz", **found)


if __name__ == "__main__":
    coordinator, processes, process, folder = sys.argv[1:]
    main(coordinator, processes, process, Path(folder))
