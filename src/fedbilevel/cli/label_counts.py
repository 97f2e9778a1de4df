"""The command `label-counts`: which classes every client of a task has."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedbilevel.cli import checks
from fedbilevel.cli.arguments import EXPERIMENT, TABLE, AsJson, takes
from fedbilevel.cli.output import print_json, write_picture
from fedbilevel.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    import numpy as np

    from fedbilevel.experiments import Experiment
    from fedbilevel.tasks import Task

__all__ = ["label_counts"]


@takes(
    checks.new_file,
    experiment=EXPERIMENT.only("task", "clients", "data", *TABLE, "settings"),
)
def label_counts(
    experiment: "Experiment",
    out: Annotated[Path | None, typer.Option(help="file for the picture, PNG")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many rows of each class every client trains with and validates with."""
    from fedbilevel.report import draw_label_counts, label_counts_table

    built, known, unknown = experiment.build_task()
    for name in unknown:
        raise unknown_name("option", name, known)
    if not built.classes:
        raise InvalidInputError(
            f"the rows of task '{experiment.label}' have no classes to count. Choose "
            "one of regularization, cleaning, representation, loss-tuning."
        )
    levels = counts_by_level(built)
    if out is not None:
        write_picture(out, draw_label_counts(levels, built.classes, built.names))
    if as_json:
        print_json({"classes": built.classes, "names": built.names, **levels})
        return
    for name, counts in levels.items():
        title = f"Rows for {name}"
        table = label_counts_table(counts, built.classes, title, built.names)
        Console().print(table)
    if out is not None:
        Console().print(f"Saved in {out}")


def counts_by_level(task: "Task") -> dict[str, "np.ndarray"]:
    """Return the rows of each client and class, for training and for validation."""
    import numpy as np

    from fedbilevel.datasets import partition

    data = task.data
    levels = {
        "training": (data.lower["label"], data.lower_sizes),
        "validation": (data.upper["label"], data.upper_sizes),
    }
    counts = {}
    for name, (label, sizes) in levels.items():
        # Clients are stacked; what follows a client's own rows is padding.
        starts = np.arange(data.clients) * label.shape[1]
        parts = [
            np.arange(start, start + int(size))
            for start, size in zip(starts, sizes, strict=True)
        ]
        rows = np.asarray(label).ravel()
        counts[name] = partition.label_counts(rows, parts, len(task.classes))
    return counts
