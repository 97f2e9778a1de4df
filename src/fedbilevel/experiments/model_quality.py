"""How good the model of a run is: its task's rows, as `evaluation` takes them."""

from functools import partial
from typing import Any

import numpy as np

from fedbilevel.datasets.preparation import TargetLabel
from fedbilevel.evaluation import Judged, Rows, Site, is_linear_cheap, quality
from fedbilevel.models import Model
from fedbilevel.models.model import softmax
from fedbilevel.tasks import Task


def model_quality(task: Task, model: Model | None) -> dict[str, Any]:
    """Return how good a model is on the rows that no client has, as plain data.

    Nothing where there are no such rows, or no model that predicts by itself.
    """
    tested = task.tested
    if tested is None or model is None or model.advice or not len(tested.label):
        return {}
    features, pixels = tested.features, model.pixels
    scores = model.scores(features if pixels is None else pixels.apply(features))
    classes, width = len(model.classes), int(np.prod(features.shape[1:]))
    names = task.names or [f"client {k}" for k in range(task.data.clients)]
    rows = [site_rows(task, client) for client in range(task.data.clients)]
    sites = [
        Site(name, _label(model, label), partial(_plain, features, width))
        for name, (features, label) in zip(names, rows, strict=True)
    ]
    asked = Judged(
        Rows(_label(model, tested.label), classes),
        softmax(scores) if classes else model.decided(scores),
        model.classes,
        features.reshape(-1, width) if is_linear_cheap(width, classes) else None,
        tested.site,
        _validation(task, classes),
    )
    return quality(asked, sites)


def site_rows(task: Task, client: int) -> tuple[Any, np.ndarray]:
    """Return the features and labels that a client trains and validates with.

    Rows that do both are there once, and panels, which are no rows, not at all. The
    features are parts, of which `_plain` makes an array.
    """
    data = task.data
    sizes = int(data.lower_sizes[client]), int(data.upper_sizes[client])
    lower, upper = (
        (level["features"][client][:size], np.asarray(level["label"][client])[:size])
        for level, size in zip((data.lower, data.upper), sizes, strict=True)
    )
    if upper[1].shape[1:] or _are_same(lower, upper):
        return (lower[0],), lower[1]
    return (lower[0], upper[0]), np.concatenate([lower[1], upper[1]])


def _are_same(one: tuple[Any, np.ndarray], other: tuple[Any, np.ndarray]) -> bool:
    return np.array_equal(one[1], other[1]) and np.array_equal(one[0], other[0])


def _plain(parts: tuple[Any, ...], width: int) -> np.ndarray:
    """Return rows as prepared, without the constant that some tasks append."""
    flat = [np.asarray(part, float).reshape(len(part), -1) for part in parts]
    found = np.concatenate(flat)
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
