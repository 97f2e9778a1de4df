"""The command that shows what every client of a task holds."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from fedbilevel import partition, tasks
from fedbilevel._files import write_atomically
from fedbilevel.cli import _arguments as arguments
from fedbilevel.cli._arguments import read_settings, read_sizes
from fedbilevel.cli._errors import plain_errors
from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.experiment import Experiment
from fedbilevel.report import draw_holdings, holdings_table

__all__ = ["holdings"]


def holdings(
    task: arguments.Task,
    clients: arguments.Clients = None,
    data: arguments.Data = None,
    settings: arguments.Settings = None,
    out: Annotated[Path | None, typer.Option(help="file for the picture, PNG")] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Show how many rows of each class every client trains with and validates with."""
    with plain_errors():
        options = read_settings(settings or [], data)
        sizes = read_sizes(clients=clients)
        experiment = Experiment(task=task, **sizes, options=options)
        built, known, unknown = experiment.build_task()
        for name in unknown:
            raise unknown_name("option", name, known)
        if not built.classes:
            raise InvalidInputError(
                f"the rows of task '{task}' have no classes to count. Choose one of "
                "regularization, cleaning, representation, loss-tuning."
            )
        levels = count_by_level(built)
        if out is not None:
            picture = draw_holdings(levels, built.classes)
            write_atomically(out, lambda file: file.write(picture))
        if as_json:
            plain = {name: counts.tolist() for name, counts in levels.items()}
            print(json.dumps({"classes": built.classes, **plain}))
            return
        for name, counts in levels.items():
            Console().print(holdings_table(counts, built.classes, f"Rows for {name}"))
        if out is not None:
            Console().print(f"Saved in {out}")


def count_by_level(task: tasks.Task) -> dict[str, np.ndarray]:
    """Return the rows of each client and class, for training and for validation."""
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
        counts[name] = partition.holdings(rows, parts, len(task.classes))
    return counts
