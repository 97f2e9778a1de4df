"""Weights of sites in means: by their rows, alike, or as given.

The objective on a data set is the mean over all of its rows, so its sites count by
their rows. Where a task has no such rows, a closed form for one, the mean is that of
the paper, 1/K. Clip, noise and robust reductions count sites in what they promise.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fedbilevel import tasks
from fedbilevel._schema import WEIGHTS, Settings
from fedbilevel.channels import Mean
from fedbilevel.datasets import Preparation
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.experiments.built import weighing
from fedbilevel.experiments.channels import channel_of
from fedbilevel.tasks import Task
from fedbilevel.tasks._rows import untested

Weights = tuple[float, ...] | None  # None leaves those of the task's data
Chosen = TypeVar("Chosen", bound=Settings)
_MOST_LISTED = 10  # sites in a sentence


def read_weights(given: Any) -> tuple[float, ...] | str | None:
    """Return weights as a run has them; none, in folders of before, were the task's."""
    if isinstance(given, str) and given not in WEIGHTS:
        raise unknown_name("value of weights", given, WEIGHTS)
    if given is None or isinstance(given, str):
        return given
    return tuple(given) or "task"


def rows_of(task: Task) -> tuple[int, ...] | None:
    """Return how many rows each client has; None where clients do not count by rows."""
    if task.origin is None or not task.origin.by_rows:
        return None
    return tuple(
        site.get("rows", site["training"] + site["validation"])
        for site in task.origin.summary["sites"]
    )


def weighed(experiment: Settings, task: Task) -> Task:
    """Return a task whose clients count as an experiment says; its summary says how."""
    weights, words = decided(experiment, rows_of(task), task.data.clients)
    if weights is not None:
        task = weighing(task, weights)
    if task.origin is None or not words or task.data.clients == 1:
        return task
    known = task.origin.summary
    summary = {**known, "remarks": [*known["remarks"], words]}
    return replace(task, origin=replace(task.origin, summary=summary))


def decided(
    experiment: Settings, rows: Sequence[int] | None, clients: int
) -> tuple[Weights, str]:
    """Return what so many clients with so many rows count, and how to say it."""
    chosen, alike = experiment.weights, "sites count alike"
    if isinstance(chosen, tuple):
        whose = "by their rows: " if rows is not None and chosen == tuple(rows) else ""
        return chosen, f"sites count {whose}{listed(chosen)}"
    if chosen == "task" or (chosen is None and rows is None):
        return None, alike
    if chosen == "equal":
        return (1.0,) * clients, alike
    if rows is None:
        raise InvalidInputError(
            f"--weights rows: task '{tasks.label(experiment.task)}' has no rows of a "
            "data set that its clients could count by. Leave it out, or give a number "
            "for each client."
        )
    why = _counts_sites(experiment)
    if why and chosen is None:
        return None, f"{alike}: {why}"
    if why and channel_of(experiment).privacy is None:
        raise InvalidInputError(f"--weights rows: {why}. Leave one of them out.")
    if len(set(rows)) == 1:
        return None, f"sites count by their rows: {rows[0]} each"
    return tuple(map(float, rows)), f"sites count by their rows: {listed(rows)}"


def counted(experiment: Chosen, preparation: Preparation | None) -> tuple[Chosen, str]:
    """Return an experiment of sites with what they count, and how to say it.

    Their rows are those that the preparation has, on which all agreed beforehand, less
    those that each puts aside for testing: what a site says of itself while a run goes
    on counts for nothing.
    """
    clients, held = experiment.clients or 0, preparation.sites if preparation else ()
    rows = tuple(map(untested, held)) if len(held) == clients else None
    if rows is None and experiment.weights == "rows":
        raise InvalidInputError(
            f"--weights rows: no preparation says how many rows each of {clients} "
            "sites has. Give --preparation, made by `fedbilevel prepare` of the sums "
            "of all sites in their order, or give a number for each site."
        )
    weights, words = decided(experiment, rows, clients)
    if experiment.weights is None and rows is None and preparation:
        why = f"counts the rows of {len(held)}, not of {clients}"
        words += f": the preparation {why if held else 'counts no rows'}"
    return replace(experiment, weights=weights or agreed(experiment)), words


def agreed(experiment: Settings) -> tuple[float, ...] | str:
    """Return the weights of sites; without counted rows, those of the task."""
    chosen = experiment.weights
    return "task" if chosen in (None, "rows") else chosen


def _counts_sites(experiment: Settings) -> str:
    """Say why sites count alike in what messages go through; nothing if by weight."""
    channel = channel_of(experiment)
    if channel.privacy is not None:
        return "clip and noise protect sites of equal weight"
    if not isinstance(channel.reduction, Mean):
        return f"--aggregate {experiment.aggregate} withstands faulty sites by number"
    return ""


def listed(numbers: Sequence[float]) -> str:
    """Return what sites count, as text, and the range of many."""
    shown = ", ".join(f"{one:.12g}" for one in numbers[:_MOST_LISTED])
    if len(numbers) <= _MOST_LISTED:
        return shown
    least, most = min(numbers), max(numbers)
    return f"{shown}, ... ({len(numbers)} sites, {least:.12g} to {most:.12g})"
