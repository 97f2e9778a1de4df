"""Settings on which the server and the sites of a federation must agree.

Both sides compare fingerprints of the settings and of the algorithm before anything is
computed.
"""

from collections.abc import Mapping
from typing import Any

from fedbilevel import algorithms, tasks
from fedbilevel._table_choices import FLAGS
from fedbilevel.algorithms import Entry
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.weights import agreed
from fedbilevel.tasks import Task
from fedbilevel.tasks._base import own_places


def local_options(task: str) -> tuple[str, ...]:
    """Return the options of a task that are each side's own business."""
    return (*FLAGS, *own_places(tasks.find(task)))


def shared_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that server and sites compare.

    Of a task or an algorithm in a file of one's own that is what stands in the file,
    wherever each side has it.
    """
    settings = experiment.shared()
    settings["task"] = tasks.identity(experiment.task)
    # Written as it was before rows were counted, so that such federations continue.
    weights = agreed(experiment)
    settings["weights"] = () if weights == "task" else weights
    if experiment.algorithm is not None:
        settings["algorithm"] = algorithms.identity(experiment.algorithm)
    own = local_options(experiment.task)
    options = {n: v for n, v in experiment.options.items() if n not in own}
    return {**settings, "options": options}


def without_files(
    settings: Mapping[str, Any], held: Mapping[str, str]
) -> dict[str, Any]:
    """Return settings that came from elsewhere, with no file named but by `held`.

    A site runs only code that its operator has named: in `held`, under task and
    algorithm.
    """
    own = dict(settings)
    for kind, is_file in (("task", tasks.is_file), ("algorithm", algorithms.is_file)):
        if kind in held:
            own[kind] = held[kind]
        elif is_file(str(own.get(kind))):
            raise InvalidInputError(
                f"the server runs the {kind} {tasks.label(str(own[kind]))} of a file. "
                "A site runs only code that it has itself: name your own copy of it, "
                f"{kind}=path/to/file.py:name, in the configuration of this node."
            )
    return own


def federated_entry(name: str) -> Entry:
    """Return an algorithm that can run where rows stay at the sites."""
    entry = algorithms.find(name)
    if entry.pools:
        raise InvalidInputError(
            f"'{name}' needs the rows of all clients in one place, so that it cannot "
            "run on sites. Simulate it, or choose another algorithm."
        )
    return entry


def meaning(task: Task, prepared: bool) -> dict[str, Any]:
    """Return what sites must agree on so that numbers of x and y mean the same.

    Each scales features by its own rows, unless all are `prepared` alike.
    """
    made = task.preparation if prepared else None
    known = {"classes": task.classes}
    return known if made is None else {**known, "preparation": made.to_json()}
