"""Every method on the same problems, each tuned with as many trials: the field's table.

    python benchmarks/field.py FOLDER [--workers N] [--settings A,B] [--methods C,D]

A setting is a task with its sizes. Every method is tuned there over as many points of
its own steps and weights, in the units of the task, from two random seeds that are not
those of the results, and judged on rows that are held out; what it takes runs from
three seeds. All of a method's trials are one compiled program, and so are its seeds.
Each finished pair of setting and method is a file in FOLDER, and is not run again; a
method that fails leaves its reason. In the end a table in Markdown is printed, best
first, and FOLDER/field.json has it for `fedbilevel recommend`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel import algorithms
from fedbilevel._files import write_atomically
from fedbilevel.errors import FedbilevelError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.comparison import compare
from fedbilevel.experiments.tuning import Tuning
from fedbilevel.runtime import configure

SHARDS = {"partition": "shards:2"}
SETTINGS = {
    "quadratic": Experiment("quadratic", clients=8, rounds=400, local_steps=5),
    "two-client": Experiment("two-client", rounds=400, local_steps=5),
    "regularization": Experiment("regularization", clients=8, rounds=200),
    "representation": Experiment("representation", clients=8, rounds=100),
    "representation-shards": Experiment(
        "representation", clients=20, participants=5, rounds=150, options=SHARDS
    ),
}
TUNING = Tuning(trials=9, rungs=1, seeds=2, sampler="even")
SEEDS = 3
# Methods whose y is drawn towards the upper rows: where the upper loss is what is told,
# theirs is below what any x allows, and tells nothing.
DRAWN = {"bome": "upper_loss", "meha": "upper_loss"}
EARLY = 10  # one of so many rounds is where a run is looked at early


def measured(setting: str, method: str) -> dict[str, Any]:
    """Return what a method came to in a setting."""
    experiment = SETTINGS[setting]
    every = max((experiment.rounds or EARLY) // EARLY, 1)
    experiment = replace(experiment, algorithm=method, measure_every=every)
    found = compare(experiment, [method], SEEDS, tuning=TUNING)
    tried = [value for _, value, _ in found.trials.get(method, [])]
    diverged = float(np.mean(~np.isfinite(tried))) if tried else 0.0
    if method in found.found.diverged:
        return {"failed": str(found.found.diverged[method]), "diverged": diverged}
    results, metric = found.found.results[method], found.found.headline
    curves = np.asarray([one.columns[metric] for one in results])
    counts = results[0].counts
    drawn = DRAWN.get(method) == metric
    return {
        **({"note": "y is drawn towards the upper rows"} if drawn else {}),
        "metric": metric,
        "mean": float(curves[:, -1].mean()),
        "spread": float(curves[:, -1].std(ddof=1)),
        "early": float(curves[:, 0].mean()),
        "exchanges": counts["exchanges"],
        "megabytes": (counts["bytes_down"] + counts["bytes_up"]) / 1e6,
        "samples": sum(counts["samples"].values()),
        "calls": counts["calls"],
        "device": results[0].versions["device"],
        "seconds": float(np.mean([one.seconds["run"] for one in results])),
        "diverged": diverged,
    }


def kept(folder: Path, method: str, settings: Sequence[str]) -> None:
    """Measure a method, and write what came of it in each setting, or why nothing."""
    configure()
    for setting in settings:
        path = _path(folder, setting, method)
        if path.exists():
            continue
        try:
            found = measured(setting, method)
        except FedbilevelError as error:
            found = {"failed": str(error), "diverged": 1.0}
        text = json.dumps({"setting": setting, "method": method, **found}) + "\n"
        write_atomically(path, lambda file, text=text: file.write(text.encode()))


def started(folder: Path, method: str, settings: Sequence[str]) -> list[dict[str, Any]]:
    """Measure a method in a process of its own; return what is known of it."""
    paths = [_path(folder, setting, method) for setting in settings]
    if not all(path.exists() for path in paths):
        asked = ["--method", method, "--settings", ",".join(settings)]
        command = [sys.executable, __file__, str(folder), *asked]
        done = subprocess.run(command, capture_output=True, text=True)
        told = done.stderr.strip()[-300:] if done.returncode else "done"
        print(f"{method}: {told}", file=sys.stderr, flush=True)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def fitting(method: str, settings: Sequence[str]) -> list[str]:
    """Return the settings of a method: rows in one place know of no shards."""
    pools = algorithms.find(method).pools
    return [one for one in settings if not (pools and SETTINGS[one].participants)]


def _path(folder: Path, setting: str, method: str) -> Path:
    return folder / f"{setting}.{method}.json"


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table in Markdown, best first, what failed last."""
    lines = [
        "| method | {metric} | after a tenth | exchanges | megabytes | samples | "
        "seconds | diverged |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(rows, key=lambda row: row.get("mean", np.inf)):
        if "mean" not in one:
            lines.append(f"| {one['method']} | {one['failed'][:80]} | | | | | | |")
            continue
        note = f" ({one['note']})" if "note" in one else ""
        lines.append(
            f"| {one['method']}{note} | {one['mean']:.4g} +- {one['spread']:.1g} | "
            f"{one['early']:.4g} | {one['exchanges']:,} | {one['megabytes']:.3g} | "
            f"{one['samples']:,} | {one['seconds']:.2g} | {one['diverged']:.0%} |"
        )
    metric = next((one["metric"] for one in rows if "metric" in one), "")
    return "\n".join(lines).format(metric=metric)


def main() -> None:
    """Measure what is asked for, and print the table of each setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", help="one method, in this process")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--methods", default=",".join(algorithms.names()))
    asked = parser.parse_args()
    folder, settings = asked.folder, asked.settings.split(",")
    folder.mkdir(parents=True, exist_ok=True)
    if asked.method:
        kept(folder, asked.method, settings)
        return
    with ThreadPoolExecutor(max_workers=asked.workers) as pool:
        names = asked.methods.split(",")
        many = pool.map(
            lambda name: started(folder, name, fitting(name, settings)), names
        )
        found = [one for rows in many for one in rows]
    for setting in settings:
        print(f"\n{setting}\n")
        print(table([one for one in found if one["setting"] == setting]))
    text = json.dumps(found, indent=1) + "\n"
    write_atomically(folder / "field.json", lambda file: file.write(text.encode()))


if __name__ == "__main__":
    main()
