"""Runs a comparison and shows it: a ranking, results in a folder, curves."""

import json
from pathlib import Path

from rich.console import Console

from fedbilevel._files import write_atomically
from fedbilevel.compare import compare
from fedbilevel.experiment import Experiment
from fedbilevel.report import default_target, draw_curves, ranking, ranking_table
from fedbilevel.result import to_plain
from fedbilevel.run import open_folder
from fedbilevel.runtime import configure

__all__ = ["show_comparison"]


def show_comparison(
    experiment: Experiment,
    names: list[str],
    seeds: int,
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
        results, diverged = compare(
            experiment,
            names,
            seeds,
            watch=lambda name: status.update(f"{name}: {seeds} seeds"),
            folder=folder,
        )
    metric = next(iter(results.values()))[0].config["headline"]
    value = default_target(results, metric) if target is None else target
    standings = ranking(results, metric, value)
    summary = {
        "task": experiment.task,
        "metric": metric,
        "target": value,
        "ranking": [one.plain() for one in standings],
        "diverged": {name: str(error) for name, error in diverged.items()},
    }
    text = json.dumps(to_plain(summary), indent=2, allow_nan=False)
    if folder is not None:
        files = {
            "comparison.json": f"{text}\n".encode(),
            "curves.png": draw_curves(results, metric, value),
        }
        for name, content in files.items():
            write_atomically(folder / name, lambda file, c=content: file.write(c))
    if as_json:
        print(json.dumps(to_plain(summary), allow_nan=False))
        return
    Console().print(ranking_table(standings, metric, value))
    for name, error in diverged.items():
        Console().print(f"{name} diverged: {error}", markup=False)
    if folder is not None:
        Console().print(f"Saved in {folder}: results, comparison.json, curves.png")
