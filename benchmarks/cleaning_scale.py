r"""Wrong labels among many rows: a weight for each, above a network.

    python benchmarks/cleaning_scale.py --rows 10000 --hidden 64 --out small.json
    python benchmarks/cleaning_scale.py --rows 100000 --hidden 1260 --batch 128 \
        --out large.json

Rows are made here: ten classes with normal noise around centers of their own, 784
numbers in each, half of the training labels replaced by wrong ones. It is the task
`cleaning` with FedBiO at 8 clients, until every row was drawn some ten times, which was
chosen by the AUC (see the README). Told is the chance that a row with a right label
weighs more than one with a wrong label (AUC), seconds with compiling and without, and
the peak of memory: of a GPU the device's, else the process'.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.datasets import from_arrays
from fedbilevel.experiments import Experiment
from fedbilevel.studies.single import run_job
from fedbilevel.tasks import cleaning

CLASSES, APART, TRAINED = 10, 4.0, 0.7
STEPS, MEASURED = 10, 4
UPPER_STEP = 30 / 64  # the task's own for a network and its batch, for each row


def main() -> None:
    """Generate rows, clean them, and print one line."""
    given = _arguments()
    started = time.perf_counter()
    task = cleaning.make(
        given.clients,
        data=_rows(given.rows, given.features),
        model="mlp",
        width=given.hidden,
        corrupted=0.5,
        trusted="true",
        train=TRAINED,
    )
    loaded = time.perf_counter()
    drawn = given.clients * STEPS * given.batch  # rows in a round
    experiment = Experiment(
        "cleaning",
        rounds=round(given.visits * given.rows / drawn),
        local_steps=STEPS,
        batch=given.batch,
        # A row's share of a mean, and so its slope, is one part in so many.
        options={"upper_step": str(UPPER_STEP * given.batch)},
    )
    built = experiment.bind(task, {})
    job = built.job(0)
    every = max(1, built.rounds // MEASURED)
    result = run_job(job, built.rounds, measure_every=every, config={})
    ended = time.perf_counter()
    found = {
        "rows": int(np.asarray(task.data.lower_sizes).sum()),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(task.y)),
        "auc": cleaning.weight_auc(task, result.point),
        "test_error": result.final["test_error"],
        "seconds": ended - loaded,
        "seconds_of_rows": loaded - started,
        "compile_seconds": result.seconds["compile"],
        "peak_mb": _peak() / 1e6,
        "device": jax.devices()[0].device_kind,
        "rounds": built.rounds,
        "batch": job.lower_batch,
    }
    print(json.dumps(found), flush=True)
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Wrong labels among many rows.")
    parser.add_argument("--rows", type=int, default=10000, help="training rows")
    parser.add_argument("--hidden", type=int, default=64, help="units of the network")
    parser.add_argument("--features", type=int, default=784)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="rows of a sample")
    parser.add_argument("--visits", type=float, default=10, help="draws of every row")
    parser.add_argument("--out", help="JSON file of the figures")
    return parser.parse_args()


def _rows(rows: int, features: int) -> Any:
    draw = np.random.default_rng(0)
    count = round(rows / TRAINED)
    label = draw.integers(0, CLASSES, count)
    centers = APART * draw.normal(size=(CLASSES, features)) / features**0.5
    noise = draw.standard_normal((count, features), np.float32)
    return from_arrays(noise + centers[label].astype(np.float32), label)


def _peak() -> float:
    told = jax.local_devices()[0].memory_stats()
    if told and "peak_bytes_in_use" in told:
        return told["peak_bytes_in_use"]
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
