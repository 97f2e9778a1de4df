"""The model that a federation leaves behind: its task says how it is made.

Where rows stay at sites, the server asks the task on made-up rows. It is given how
columns were prepared, or how many tokens texts have; so its layers have the shapes of
those at the sites, and it recommends for the largest of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._table_choices import FLAGS
from fedbilevel.datasets import Dataset, Preparation
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.agreement import SiteSchema, meaning, require_alike
from fedbilevel.experiments.built import leave_files, model_of
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.federation import settings_fingerprint
from fedbilevel.models import Model
from fedbilevel.result import Result, named_leaves, shaped
from fedbilevel.runtime import Job
from fedbilevel.studies.single import named_point
from fedbilevel.tasks import Task
from fedbilevel.tasks._texts import NOBODYS

# Options of rows and their places: none changes a layer.
_OF_ROWS = (*FLAGS, "partition", "rows", "split", "train")
_FEWEST, _MOST, _OF_EACH_CLASS = 64, 10_000, 20  # made-up rows


def alone_of(experiment: Experiment) -> Experiment:
    """Return the experiment of one site, which knows how many there are."""
    alone = replace(experiment, clients=1)
    if "sites" not in experiment.task_options:
        return alone
    more = {"sites": str(experiment.sites)}
    return replace(alone, options={**experiment.options, **more})


def blank_of_texts(experiment: Experiment) -> Task | None:
    """Return the task on made-up texts, where it is known how many the sites have."""
    if "tokens" not in experiment.task_options or not experiment.options.get("tokens"):
        return None
    alone = alone_of(replace(experiment, weights="task"))
    texts = {**alone.options, "data": NOBODYS}
    return replace(alone, options=texts).build_task()[0]


def blank_task(experiment: Experiment, preparation: Preparation) -> Task:
    """Return the task of an experiment on made-up rows with the prepared columns."""
    if "preparation" not in experiment.task_options:
        raise _no_model(experiment)
    held = {n: v for n, v in experiment.options.items() if n not in _OF_ROWS}
    held |= {"group": "group"}  # for a task that compares groups of rows
    alone = replace(experiment, clients=1, weights="task", options=held)
    task, _, _ = alone.build_task(_made_up(preparation))
    if task.predictor is None:
        raise _no_model(experiment)
    return task


def _no_model(experiment: Experiment) -> InvalidInputError:
    return InvalidInputError(
        f"the task '{experiment.label}' makes no model of prepared columns. Leave "
        "--preparation out: the folder of the server then holds the point alone."
    )


def _made_up(preparation: Preparation) -> Dataset:
    """Return rows of zeros with all classes, half of them in a group of their own."""
    classes = preparation.label.classes
    # Recommended values may depend on how many rows the largest site has.
    largest = min(max(preparation.sites, default=0), _MOST)
    count = max(_FEWEST, _OF_EACH_CLASS * len(classes), largest)
    label = np.zeros(count)
    if classes:
        label = np.arange(count, dtype=np.int32) % len(classes)
    return Dataset(
        "the preparation",
        np.zeros((count, len(preparation.feature_names))),
        label,
        classes,
        {"group": np.arange(count) // max(len(classes), 1) % 2},
        preparation=preparation,
    )


def check_blank(task: Task, sites: SiteSchema, job: Job) -> None:
    """Raise unless the sites have the columns and the layers of a blank task.

    `sites` is what they reported of theirs, and `job` what the server made of it.
    """
    if task.alike is not None:
        own, theirs = task.alike(task), sites.alike or {}
        known = {name: theirs[name] for name in own if name in theirs}
        everyone = "the server and to all sites"
        require_alike(("the sites", known), ("the server", own), everyone)
        return
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
    theirs, ours = (
        {name: leaf.shape for name, leaf in named_point(one.x, one.y).items()}
        for one in (job, task)
    )
    flags = [flag for level in sites.private for flag in level]
    private = {name for name, flag in zip(theirs, flags, strict=True) if flag}
    for name in sorted({*theirs, *ours} - private):
        if theirs.get(name) != ours.get(name):
            raise InvalidInputError(
                f"{name} has the shape {theirs.get(name)} at the sites, but "
                f"{ours.get(name)} by the preparation. Leave it out on the server."
            )


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
