"""Builds a site from a named experiment and the rows it has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel.deployment.settings import clients_of, mark_of
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiment import Experiment
from fedbilevel.result import to_plain
from fedbilevel.run import named_leaves
from fedbilevel.runtime import Job
from fedbilevel.runtime.federation import (
    Marks,
    Site,
    algorithm_mark,
    settings_mark,
)
from fedbilevel.tasks import Task

__all__ = ["build_site"]


def build_site(
    experiment: Experiment,
    client: int,
    *,
    trial: bool = False,
    folder: Path | None = None,
    holds: bool = True,
) -> Site:
    """Return client number `client` of the experiment, with its rows.

    The option `data` is where this site's own rows lie, and no others are read. In a
    `trial` it is data of all clients, dealt as in a simulation, and this site takes its
    share. `folder` keeps what the client remembers between exchanges.
    """
    clients = clients_of(experiment)
    if not 0 <= client < clients:
        raise InvalidInputError(
            f"client {client}: the {clients} clients are numbered from 0."
        )
    task, values = _task(experiment, client, clients, trial)
    name = experiment.algorithm_for(task)
    algorithm = experiment.algorithm_named(name, task.recommended, clients)
    job = experiment.job_on(task, algorithm)
    # Alone here, this client is one of so many elsewhere.
    participants = experiment.participants or clients
    channel = experiment.channel().shared_by(participants)
    job = replace(job, participants=participants, channel=channel)
    return Site(
        job,
        client,
        Marks(mark_of(experiment), algorithm_mark(job, clients)),
        facts=_facts(task, job, name, values, experiment),
        folder=folder,
        holds=holds,
        conclude=_conclusion(task, job),
    )


def _task(
    experiment: Experiment, client: int, clients: int, trial: bool
) -> tuple[Task, dict[str, Any]]:
    """Build the task of one client: of its own rows, or of its share of all."""
    if not trial:
        task, values, _ = replace(experiment, clients=1).build_task()
        return task, values
    task, values, _ = experiment.build_task()
    if task.data.clients != clients:
        raise InvalidInputError(
            f"task '{experiment.task}' has {task.data.clients} clients, not {clients}."
        )
    share = jax.tree.map(lambda leaf: leaf[client : client + 1], task.data)
    return eqx.tree_at(lambda one: one.data, task, share), values


def _facts(
    task: Task, job: Job, name: str, values: dict[str, Any], experiment: Experiment
) -> dict[str, Any]:
    """Return what the server must know of the task, which has no rows of its own."""
    values = {option: value for option, value in values.items() if option != "data"}
    # What a task recommends may depend on the rows; what was chosen does not.
    chosen = {**experiment.options, **experiment.sizes(task.recommended)}
    used = {o: str(chosen.get(o, value)) for o, value in task.recommended.items()}
    metrics = jax.eval_shape(task.metrics, task.x, task.y)
    return to_plain(
        {
            "algorithm": name,
            "recommended": used,
            "headline": task.headline,
            "shows_point": task.shows_point,
            "task": values,
            "classes": settings_mark({"classes": task.classes}),
            "metrics": sorted(metrics),
            "x": _tree.leaf_names(job.x),
            "y": _tree.leaf_names(job.y),
            "private": [
                [bool(mark) for mark in jax.tree.leaves(marks)]
                for marks in (job.private.x, job.private.y)
            ],
        }
    )


def _conclusion(task: Task, job: Job):
    """Return how a finished run is told more of, where the rows are; or None."""
    if task.conclusion is None:
        return None
    conclude = task.conclusion

    def tell(state: PyTree) -> dict[str, Any]:
        point = job.algorithm.point(state)
        leaves = {**named_leaves("x", point.x), **named_leaves("y", point.y)}
        return to_plain(conclude(task, jax.tree.map(np.asarray, leaves)))

    return tell
