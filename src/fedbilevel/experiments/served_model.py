"""The model that a run leaves behind: its task says how, its point has the numbers.

Where rows stay at sites, the server asks a task on made-up rows, which has layers of
the same shapes.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.agreement import meaning
from fedbilevel.experiments.built import leave_files, model_of
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.site_schema import SiteSchema
from fedbilevel.federation import settings_fingerprint
from fedbilevel.models import Model
from fedbilevel.result import Result, named_leaves, shaped
from fedbilevel.runtime import Job
from fedbilevel.tasks import Task


def check_blank(task: Task, sites: SiteSchema, job: Job) -> None:
    """Raise unless the sites have the columns and the layers of a blank task.

    `sites` is what they reported of theirs, and `job` what the server made of it.
    """
    if task.alike is not None:
        own, theirs = task.alike(task), sites.alike or {}
        for name in sorted(one for one in own if own[one] != theirs.get(one)):
            raise InvalidInputError(
                f"the {name} of the sites is not that of the server: their "
                f"fingerprints are {theirs.get(name)} and {own[name]}. Copy the same "
                "files to the server and to all sites."
            )
    else:
        _check_prepared(task, sites, job)


def _check_prepared(task: Task, sites: SiteSchema, job: Job) -> None:
    if sites.classes != settings_fingerprint(meaning(task, prepared=True)):
        own = sites.classes == settings_fingerprint(meaning(task, prepared=False))
        how = "each by its own rows" if own else "by another file, or for other classes"
        raise InvalidInputError(
            f"--preparation is not how the sites prepare their columns: they do it "
            f"{how}. Give the same file to the server and, with --preparation, to "
            "every node, or leave it out here, and no model is left."
        )
    if any(sites.private[1]):
        raise InvalidInputError(
            "every site keeps a y of its own, so that no model is left which all "
            "share. Leave --preparation out on the server."
        )
    theirs, ours = _shapes(job.x, job.y), _shapes(task.x, task.y)
    flags = [flag for level in sites.private for flag in level]
    private = {name for name, flag in zip(theirs, flags, strict=True) if flag}
    for name in sorted({*theirs, *ours} - private):
        if theirs.get(name) != ours.get(name):
            raise InvalidInputError(
                f"{name} has the shape {theirs.get(name)} at the sites, but "
                f"{ours.get(name)} by the preparation. Leave it out on the server."
            )


def _shapes(x: Any, y: Any) -> dict[str, tuple[int, ...]]:
    leaves = {**named_leaves("x", x), **named_leaves("y", y)}
    return {name: leaf.shape for name, leaf in leaves.items()}


def model_at(task: Task, result: Result, options: Mapping[str, Any]) -> Model | None:
    """Return the model at the point of a result that knows the names of leaves only.

    None where the task makes none, or where what it is made of stayed at the sites.
    """
    if task.predictor is None:
        return None
    needed = ("x", task.x) if task.predictor.advice else ("y", task.y)
    if not named_leaves(*needed).keys() <= result.point.keys():
        return None
    levels = tuple(
        shaped(level, tree, result.point, np.asarray)
        for level, tree in (("x", task.x), ("y", task.y))
    )
    return model_of(task, replace(result, levels=levels), options)


def leave_of_trial(
    experiment: Experiment, result: Result, folder: Path
) -> Model | None:
    """Leave what a simulation would of a federation whose rows are all here."""
    task, values, _ = replace(experiment, weights="task").build_task()
    if task.files is not None:
        leave_files(task, result, folder)
    return model_at(task, result, values)
