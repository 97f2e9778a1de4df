"""Runs a comparison and shows it: a ranking, results in a folder, curves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedbilevel._files import write_atomically
from fedbilevel.compare import Comparison, compare
from fedbilevel.experiment import Experiment
from fedbilevel.report import (
    Standing,
    default_target,
    draw_curves,
    ranking,
    ranking_table,
    trials_table,
)
from fedbilevel.result import to_plain
from fedbilevel.run import open_folder
from fedbilevel.runtime import configure

__all__ = ["show_comparison"]


def show_comparison(
    experiment: Experiment,
    names: list[str],
    seeds: int,
    grid: Mapping[str, list[str]],
    target: float | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Compare, print the ranking, and keep everything if there is a folder for it."""
    configure(experiment.precision)
    if folder is not None:
        open_folder(folder, resume=False)
    errors = Console(stderr=True)
    with errors.status("building the task") as status:
        found = compare(
            experiment,
            names,
            seeds,
            grid=grid,
            watch=lambda name: status.update(f"{name}: {seeds} seeds"),
            folder=folder,
        )
    metric = next(iter(found.results.values()))[0].config["headline"]
    value = default_target(found.results, metric) if target is None else target
    standings = ranking(found.results, metric, value)
    summary = to_plain(_summary(experiment.task, found, metric, value, standings))
    if folder is not None:
        files = {
            "comparison.json": f"{json.dumps(summary, indent=2)}\n".encode(),
            "curves.png": draw_curves(found.results, metric, value),
        }
        for name, content in files.items():
            write_atomically(folder / name, lambda file, c=content: file.write(c))
    if as_json:
        print(json.dumps(summary, allow_nan=False))
        return
    console = Console()
    if found.trials:
        console.print(trials_table(found.trials, metric))
    console.print(ranking_table(standings, metric, value))
    for name, error in found.diverged.items():
        console.print(f"{name} diverged: {error}", markup=False)
    if folder is not None:
        console.print(f"Saved in {folder}: results, comparison.json, curves.png")


def _summary(
    task: str,
    found: Comparison,
    metric: str,
    target: float,
    standings: Sequence[Standing],
) -> dict[str, Any]:
    return {
        "task": task,
        "metric": metric,
        "target": target,
        "ranking": [one.plain() for one in standings],
        "trials": found.trials,
        "diverged": {name: str(error) for name, error in found.diverged.items()},
    }
