"""How good the model of a run is: its task's rows, as `evaluation` takes them."""

from functools import partial
from typing import Any

import numpy as np

from fedbilevel.datasets.preparation import TargetLabel
from fedbilevel.evaluation import (
    Judged,
    Rows,
    Site,
    is_linear_cheap,
    quality,
    reported,
)
from fedbilevel.models import Model
from fedbilevel.models.model import softmax
from fedbilevel.problem.stored_rows import is_stored
from fedbilevel.tasks import Task


def model_quality(task: Task, model: Model | None) -> dict[str, Any]:
    """Return how good a model is on the rows that no client has, as plain data.

    Nothing where there are no such rows, or no model that predicts by itself.
    """
    found = _asked(task, model)
    return {} if found is None else quality(*found)


def reported_quality(task: Task, model: Model | None) -> dict[str, float]:
    """Return what a site reports to its server of a model, judged by its own rows."""
    found = _asked(task, model)
    return {} if found is None else reported(found[0], found[1][0])


def _asked(task: Task, model: Model | None) -> tuple[Judged, list[Site]] | None:
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
        Site(name, _label(model, label), partial(_plain, parts, model, flat.shape[1]))
        for name, (parts, label) in zip(names, rows, strict=True)
    ]
    is_cheap = is_linear_cheap(flat.shape[1], classes) and "features" in task.data.lower
    asked = Judged(
        Rows(_label(model, tested.label), classes),
        softmax(scores) if classes else model.decided(scores),
        model.classes,
        flat if is_cheap else None,
        tested.site,
        _validation(task, classes),
    )
    return asked, sites


def site_rows(task: Task, client: int) -> tuple[Any, np.ndarray]:
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


def _validation(task: Task, classes: int) -> list[int]:
    """Return how many rows of each class validate, or how many in all."""
    data = task.data
    label, sizes = np.asarray(data.upper["label"]), np.asarray(data.upper_sizes)
    if label.ndim == 2 and classes:
        real = np.arange(label.shape[1]) < sizes[:, None]
        return np.bincount(label[real], minlength=classes).tolist()
    if label.ndim == 2 or task.origin is None:
        return [int(sizes.sum())]
    return [sum(site["validation"] for site in task.origin.summary["sites"])]
