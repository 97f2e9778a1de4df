"""Is the architecture that was found better than others? The line of docs/results.md.

    python benchmarks/architecture.py

For three splits of digits: the search, its choice trained from scratch, and every
network with one operation on each edge trained with the same budget.
"""

import itertools
from statistics import median

from fedbilevel import configure, tasks
from fedbilevel.experiments import Experiment
from fedbilevel.tasks._search_space import EDGES, OPERATIONS
from fedbilevel.tasks.architecture import retrained_accuracy


def main() -> None:
    configure()
    print("| split | chosen | trained again | median of all | best | rank |")
    print("|---|---|---|---|---|---|")
    for split in range(3):
        found = Experiment("architecture", options={"split": str(split)}).run().final
        task = tasks.find("architecture")(split=split)
        every = {
            choice: retrained_accuracy(task, choice)
            for choice in itertools.product(OPERATIONS, repeat=EDGES)
        }
        ours = found["retrained_accuracy"]
        rank = 1 + sum(other > ours for other in every.values())
        told = (median(every.values()), max(every.values()))
        numbers = " | ".join(f"{value:.4f}" for value in (ours, *told))
        print(f"| {split} | {', '.join(found['operations'])} | {numbers} | {rank} |")


if __name__ == "__main__":
    main()
