"""A task on made-up rows: what is known of it where the rows of all sites are not.

It is given how columns were prepared, or how many tokens texts have. Its layers have
the shapes of those at the sites, and it recommends for the largest of them.
"""

from dataclasses import replace

import numpy as np

from fedbilevel._table_choices import FLAGS
from fedbilevel.datasets import Dataset, Preparation
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.experiment import Experiment
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
