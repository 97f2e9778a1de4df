"""Objects behind the names of an experiment, the files of its result, and its model.

How good the model is follows from the task's rows, as `evaluation` takes them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from fedbilevel import evaluation, tasks
from fedbilevel._files import write_arrays, write_atomically
from fedbilevel._text import csv_text
from fedbilevel.algorithms import AbstractAlgorithm, Entry
from fedbilevel.datasets.preparation import TargetLabel
from fedbilevel.errors import AtClientError
from fedbilevel.models import Model
from fedbilevel.models.model import softmax
from fedbilevel.problem.stored_rows import is_stored
from fedbilevel.result import Result, to_plain
from fedbilevel.runtime import Job, Watch
from fedbilevel.studies import heterogeneity
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
        heterogeneity.warn_where_weights_are_lost(job, self.entry.name)
        if self.task.convex:
            heterogeneity.warn_where_clients_differ(
                job, self.entry.name, self.task.names
            )
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


def model_quality(task: tasks.Task, model: Model | None) -> dict[str, Any]:
    """Return how good a model is on the rows that no client has, as plain data.

    Nothing where there are no such rows, or no model that predicts by itself.
    """
    found = _asked(task, model)
    return {} if found is None else evaluation.quality(*found)


def reported_quality(task: tasks.Task, model: Model | None) -> dict[str, float]:
    """Return what a site reports to its server of a model, judged by its own rows."""
    found = _asked(task, model)
    return {} if found is None else evaluation.reported(found[0], found[1][0])


def _asked(
    task: tasks.Task, model: Model | None
) -> tuple[evaluation.Judged, list[evaluation.Site]] | None:
    """Return what is judged, and the sites; None where no rows are kept apart."""
    tested = task.tested
    if tested is None or model is None or model.advice or not len(tested.label):
        return None
    features = model.features(tested.features)
    scores, flat = model.scores(features), features.reshape(len(features), -1)
    classes = len(model.classes)
    names = task.names or [f"client {k}" for k in range(task.data.clients)]
    rows = [site_rows(task, client) for client in range(task.data.clients)]
    sites = [
        evaluation.Site(
            name, _label(model, label), partial(_plain, parts, model, flat.shape[1])
        )
        for name, (parts, label) in zip(names, rows, strict=True)
    ]
    is_cheap = (
        evaluation.is_linear_cheap(flat.shape[1], classes)
        and "features" in task.data.lower
    )
    asked = evaluation.Judged(
        evaluation.Rows(_label(model, tested.label), classes),
        softmax(scores) if classes else model.decided(scores),
        model.classes,
        flat if is_cheap else None,
        tested.site,
        _validation(task, classes),
    )
    return asked, sites


def site_rows(task: tasks.Task, client: int) -> tuple[Any, np.ndarray]:
    """Return the features and labels that a client trains and validates with.

    Rows that do both are there once, and panels, which are no rows, not at all. The
    features are parts, of which `_plain` makes an array; none where rows have others.
    """
    data = task.data
    sizes = (np.asarray(one)[client] for one in (data.lower_sizes, data.upper_sizes))
    lower, upper = (
        (
            _on_host(level["features"])[client][:size] if "features" in level else (),
            _on_host(level["label"])[client][:size],
        )
        for level, size in zip((data.lower, data.upper), sizes, strict=True)
    )
    # Labels first: features may lie in a file.
    same = map(np.array_equal, lower[::-1], upper[::-1])
    if upper[1].shape[1:] or all(same):
        return (lower[0],), lower[1]
    return (lower[0], upper[0]), np.concatenate([lower[1], upper[1]])


def _on_host(rows: Any) -> Any:
    """Return rows of which JAX compiles no program to take some; files stay."""
    return rows if is_stored(rows) else np.asarray(rows)


def _plain(parts: tuple[Any, ...], model: Model, width: int) -> np.ndarray:
    """Return rows as layers of a model take them, without an appended constant."""
    rows = np.concatenate([np.asarray(part) for part in parts])
    if model.pixels is not None:
        rows = model.pixels.apply(rows)
    found = rows.reshape(len(rows), -1).astype(float)
    if found.shape[1] == width + 1:
        return found[:, :-1] * width**0.5
    return found


def _label(model: Model, label: np.ndarray) -> np.ndarray:
    """Return labels as codes of classes, or as numbers in their own units."""
    made = model.preparation and model.preparation.label
    return made.decode(label) if isinstance(made, TargetLabel) else label


def _validation(task: tasks.Task, classes: int) -> list[int]:
    """Return how many rows of each class validate, or how many in all."""
    data = task.data
    label, sizes = np.asarray(data.upper["label"]), np.asarray(data.upper_sizes)
    if label.ndim == 2 and classes:
        real = np.arange(label.shape[1]) < sizes[:, None]
        return np.bincount(label[real], minlength=classes).tolist()
    if label.ndim == 2 or task.origin is None:
        return [int(sizes.sum())]
    return [sum(site["validation"] for site in task.origin.summary["sites"])]


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
