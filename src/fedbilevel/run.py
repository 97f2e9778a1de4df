"""One call from problem to result."""

import dataclasses
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.random as jr
import numpy as np

from fedbilevel import _tree
from fedbilevel._blocks import NOTHING
from fedbilevel._types import Lower, Metrics, Pair, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.errors import CheckpointError, unknown_name
from fedbilevel.problem import ClientData, Problem
from fedbilevel.result import Result, to_plain
from fedbilevel.runtime import (
    Job,
    Ledger,
    Outcome,
    ReferenceRuntime,
    SimulatorRuntime,
    execute,
    mesh,
    sweep,
)
from fedbilevel.runtime.driver import Checkpoints, Watch
from fedbilevel.runtime.privacy import privacy_spent

__all__ = [
    "DELTA",
    "named_leaves",
    "open_folder",
    "result_of",
    "run",
    "run_job",
    "run_seeds",
]

DELTA = 1e-5


def run(
    problem: Problem,
    data: ClientData,
    start: tuple[Upper, Lower],
    algorithm: AbstractAlgorithm,
    *,
    rounds: int,
    batch: int | None = 1,
    participants: int | None = None,
    seed: int = 0,
    metrics: Metrics | None = None,
    private: Pair = NOTHING,
    channel: Channel = PLAIN,
    delta: float = DELTA,
    measure_every: int = 1,
    runtime: str = "simulator",
    clients_at_once: int | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    checkpoint_rounds: int | None = None,
    checkpoint_seconds: float | None = 30.0,
    watch: Watch | None = None,
) -> Result:
    """Run an algorithm on a problem and return what happened.

    `start` is (x, y). `batch` rows are drawn per sample; None takes all rows. With a
    `folder` the run keeps checkpoints there, every `checkpoint_rounds` rounds or
    `checkpoint_seconds` seconds, and saves its result; `resume=True` continues one that
    was interrupted, with the same arguments. `metrics(x, y)` adds columns. `private`
    marks blocks of x and y that each client keeps, `Pair(False, True)` all of y; the
    result holds them stacked over clients. `channel` is what is done to replies on
    their way; with noise the result's counts hold the epsilon that goes with `delta`.
    `clients_at_once` bounds the simulator's memory. `watch(done, total, newest)` is
    called about twice a second.
    """
    job = Job.of(
        algorithm,
        problem,
        data,
        *start,
        metrics=metrics,
        seed=seed,
        participants=participants,
        batch=batch,
        private=private,
        channel=channel,
    )
    recorded = {} if channel.is_plain else {"channel": job.channel.describe()}
    keeper = None
    if folder is not None:
        place = Path(folder)
        mesh.on_first(lambda: open_folder(place, resume))
        keeper = Checkpoints(place, checkpoint_rounds, checkpoint_seconds)
    result = run_job(
        job,
        rounds,
        measure_every=measure_every,
        runtime=runtime,
        clients_at_once=clients_at_once,
        keeper=keeper,
        watch=watch,
        config={"seed": seed, **recorded},
        delta=delta,
    )
    if folder is not None:
        mesh.on_first(lambda: result.save(folder))
    return result


def run_job(
    job: Job,
    rounds: int,
    *,
    measure_every: int,
    runtime: str,
    clients_at_once: int | None = None,
    keeper: Checkpoints | None = None,
    watch: Watch | None = None,
    task: str = "custom",
    config: dict[str, Any],
    delta: float = DELTA,
) -> Result:
    """Run a job that was checked; `task` and `config` are recorded as given."""
    ledger = Ledger(job)
    spent = privacy_spent(job, ledger, rounds, delta)  # or why not, before it runs
    outcome = execute(
        _runtime(runtime, job, clients_at_once),
        rounds,
        measure_every=measure_every,
        checkpoints=keeper,
        watch=watch,
    )
    settings = {
        "rounds": rounds,
        "runtime": runtime,
        "measure_every": measure_every,
        **config,
    }
    return result_of(job, outcome, ledger, task, settings, spent)


def run_seeds(
    job: Job,
    rounds: int,
    seeds: Sequence[int],
    *,
    measure_every: int,
    task: str,
    config: dict[str, Any],
    delta: float = DELTA,
) -> list[Result]:
    """Run a job once per random seed, all in one compiled program.

    The seconds of a result are its share of what all of them took.
    """
    ledger, results = Ledger(job), []
    jobs = [dataclasses.replace(job, key=jr.key(seed)) for seed in seeds]
    spent = [privacy_spent(one, ledger, rounds, delta) for one in jobs]
    outcomes = sweep(job, rounds, seeds=seeds, measure_every=measure_every)
    shared = {
        "rounds": rounds,
        "runtime": SimulatorRuntime.name,
        "measure_every": measure_every,
        **config,
    }
    every = zip(seeds, jobs, outcomes, spent, strict=True)
    for seed, one, outcome, privacy in every:
        share = {name: took / len(seeds) for name, took in outcome.seconds.items()}
        outcome = dataclasses.replace(outcome, seconds=share)
        settings = {**shared, "seed": seed}
        results.append(result_of(one, outcome, ledger, task, settings, privacy))
    return results


def result_of(
    job: Job,
    outcome: Outcome,
    ledger: Ledger,
    task: str,
    settings: dict[str, Any],
    spent: dict[str, float],
) -> Result:
    """Put together what a run leaves behind; `settings` have its rounds."""
    algorithm, rounds = job.algorithm, settings["rounds"]
    costs = ledger.cumulative(job.key, rounds)
    measured = outcome.columns["round"] - 1
    point = algorithm.point(outcome.state.joined())
    config = {
        "clients": job.data.clients,
        "participants": job.participants,
        "batch": job.upper_batch,
        "precision": str(jax.tree.leaves(job.x)[0].dtype),
        **settings,
        "parameters": algorithm.parameters(),
    }
    return Result(
        task=task,
        algorithm=type(algorithm).__name__,
        config=to_plain(config),
        versions=versions(),
        columns={
            **outcome.columns,
            **{name: column[measured] for name, column in costs.items()},
        },
        point={**named_leaves("x", point.x), **named_leaves("y", point.y)},
        final={name: float(column[-1]) for name, column in outcome.columns.items()},
        counts={**ledger.summary(job.key, rounds), **spent},
        seconds=outcome.seconds,
    )


def open_folder(folder: Path, resume: bool) -> None:
    """Raise if a new run would meet files of another, or there is nothing to resume."""
    used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if used and not resume:
        raise CheckpointError(
            f"{folder} exists and is not empty. Choose another folder, remove it, or "
            f"continue the run in it with `fedbilevel resume {folder}`."
        )
    if resume and not folder.is_dir():
        raise CheckpointError(f"{folder} is not a run folder: it does not exist.")


def versions() -> dict[str, str]:
    """Return the versions of what computed a result, and on which device."""
    packages = ("fedbilevel", "jax", "jaxlib", "equinox", "numpy")
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "device": f"{device.platform}: {device.device_kind}, {jax.device_count()}",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def _runtime(
    name: str, job: Job, clients_at_once: int | None
) -> SimulatorRuntime | ReferenceRuntime:
    if name == SimulatorRuntime.name:
        return SimulatorRuntime(job, clients_at_once)
    if name == ReferenceRuntime.name:
        return ReferenceRuntime(job)
    raise unknown_name("runtime", name, [SimulatorRuntime.name, ReferenceRuntime.name])


def named_leaves(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves of a tree by name, on the host."""
    names = _tree.leaf_names(tree)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return {
        f"{prefix}.{name}" if name else prefix: leaf
        for name, leaf in zip(names, leaves, strict=True)
    }
