"""Objects behind the names of an experiment, and the files of its result."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from fedbilevel import tasks
from fedbilevel._files import write_arrays, write_atomically
from fedbilevel._text import csv_text
from fedbilevel.algorithms import AbstractAlgorithm, Entry
from fedbilevel.errors import AtClientError
from fedbilevel.experiments.model_quality import model_quality
from fedbilevel.models import Model
from fedbilevel.result import Result, to_plain
from fedbilevel.runtime import Job, Watch
from fedbilevel.studies.heterogeneity import (
    warn_where_clients_differ,
    warn_where_weights_are_lost,
)
from fedbilevel.studies.setting import Setting
from fedbilevel.tasks._base import Listed


class Built(NamedTuple):
    """Objects behind the names of an experiment.

    `config` are the settings to record; the task's options are among them.
    """

    task: tasks.Task
    entry: Entry
    algorithm: AbstractAlgorithm
    setting: Setting
    rounds: int
    config: dict[str, Any]

    def job(self, seed: int = 0) -> Job:
        """Bind everything, and warn where the limit will be off."""
        with self.naming_sites():
            job = self.setting.job(self.algorithm, seed)
        warn_where_weights_are_lost(job, self.entry.name)
        if self.task.convex:
            warn_where_clients_differ(job, self.entry.name, self.task.names)
        return job

    @contextmanager
    def naming_sites(self) -> Iterator[None]:
        """Give the site its name in an error of what is wrong there."""
        try:
            yield
        except AtClientError as error:
            if self.task.names and not self.entry.pools:
                raise error.at(self.task.names[error.client]) from error.__cause__
            raise

    def save(self, result: Result, folder: Path) -> None:
        """Write a result, and what the task lists and makes of it."""
        result.save(folder)
        if not self.entry.pools:
            leave_files(self.task, result, folder)

    def named(self, result: Result) -> Result:
        """Return a result with the names, and with what the task concludes."""
        shown = result.point if self.task.shows_point else {}
        point = {name: leaf.tolist() for name, leaf in shown.items()}
        more = {}
        if self.task.conclusion is not None:
            more = self.task.conclusion(self.task, result.point)
        final = {**result.final, **point, **more}
        named = dataclasses.replace(result, algorithm=self.entry.name, final=final)
        model = model_of(self.task, named, self.config["task"])
        return dataclasses.replace(named, model=model)

    def judged(self, result: Result) -> Result:
        """Return a result that says how good its model is, where test rows exist."""
        found = model_quality(self.task, result.model)
        events = [*result.events, *found.get("warnings", ())]
        return dataclasses.replace(result, quality=found, events=events)


def leave_files(task: tasks.Task, result: Result, folder: Path) -> None:
    """Write what a task lists and makes of a result."""
    if task.listing is not None:
        for name, listed in task.listing(task, result.point).items():
            _write_listed(folder / name, listed)
    if task.files is not None:
        for name, content in task.files(task, result.point).items():
            write_atomically(folder / name, content)


def model_of(
    task: tasks.Task, result: Result, options: Mapping[str, Any]
) -> Model | None:
    """Return the model that a run leaves behind, where all clients share one."""
    if result.levels is None:
        return None
    about = {"task": result.task, "algorithm": result.algorithm}
    more = {"options": to_plain(dict(options)), "versions": result.versions}
    return model_of_levels(task, result.levels, {**about, **more})


def model_of_levels(
    task: tasks.Task, levels: tuple[Any, Any], about: Mapping[str, Any]
) -> Model | None:
    """Return the model of x and y, where the task says how it predicts."""
    if task.predictor is None:
        return None
    shared = [np.shape(leaf) for leaf in jax.tree.leaves(task.y)]
    found = [np.shape(leaf) for leaf in jax.tree.leaves(levels[1])]
    if shared != found and not task.predictor.advice:
        return None  # every client has kept a y of its own
    return Model(
        task.predictor.layers(*levels),
        task.preparation.label.classes if task.preparation else task.classes,
        # A model's receiver need not know how many rows each site has.
        task.preparation and dataclasses.replace(task.preparation, sites=()),
        task.predictor.pixels,
        dict(about),
        task.predictor.advice,
    )


def _write_listed(path: Path, listed: Listed) -> None:
    """Write a table as CSV, atomically, and its pictures before it, as npz."""
    if listed.pictures is not None:
        write_arrays(path.with_suffix(".npz"), {"pictures": listed.pictures})
    rows = [listed.header, *listed.rows]
    write_atomically(path, csv_text(rows, line_end="\r\n"))


def weighing(task: tasks.Task, weights: Sequence[float]) -> tasks.Task:
    """Return a task whose clients count by these weights, one for each.

    Metrics that are answers of the averaged problem have those of the new average.
    """
    data, known = task.data.weighing(weights), task.metrics
    if isinstance(known, tasks.Averaged):
        task = eqx.tree_at(lambda one: one.metrics, task, known.of_data(data))
    return eqx.tree_at(lambda one: one.data, task, data)


def headline_only(watch: Watch | None, headline: str) -> Watch | None:
    """Return a watch that is shown one metric alone."""
    if watch is None:
        return None

    def show(done: int, total: int, newest: dict[str, float]) -> None:
        watch(done, total, {n: v for n, v in newest.items() if n == headline})

    return show
