"""Is the architecture that was found better than others? The table of docs/results.md.

    python benchmarks/architecture.py runs/architecture.jsonl

For three splits of digits: the search, its choice trained from scratch, and every
network with one operation on each edge trained with the same budget. When all are done,
the file gets a line of JSON for each split. Accuracies are in %.
"""

import argparse
import itertools
import json
from pathlib import Path
from statistics import median
from typing import Any

from fedbilevel import configure, tasks
from fedbilevel.experiments import Experiment
from fedbilevel.tasks.architecture import EDGES, OPERATIONS, retrained_accuracy


def measured(split: int) -> dict[str, Any]:
    """Return the row of a split, by the headings of the page."""
    found = Experiment("architecture", options={"split": str(split)}).run().final
    task = tasks.find("architecture")(split=split)
    every = [
        100 * retrained_accuracy(task, choice)
        for choice in itertools.product(OPERATIONS, repeat=EDGES)
    ]
    ours = 100 * found["retrained_accuracy"]
    return {
        "split": split,
        "chosen": ", ".join(found["operations"]),
        "trained again": ours,
        "median of all": median(every),
        "best": max(every),
        "rank among 16": 1 + sum(other > ours for other in every),
    }


def main() -> None:
    """Measure all splits, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="gets a line of JSON for each split")
    file: Path = parser.parse_args().file
    configure()
    lines = [json.dumps(measured(split)) for split in range(3)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
