"""Runs the zoo from the command line; see the package's docstring."""

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any

import benchmarks.zoo
from benchmarks.zoo.cases import CATALOG, PARTITIONS, SUMMARIES
from benchmarks.zoo.running import measured_together

from fedbilevel.result import to_plain

# A process is a core's: neither XLA nor BLAS starts threads beside it.
ONE_CORE = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "NPROC": "2",  # XLA's pool; a batch of dense solves needs a spare thread
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Partitions of equal sizes share their shapes, and so their compiled programs.
TOGETHER = (("iid", "label"), ("unequal",))
# What takes longest comes first, so that no core waits for it in the end.
LONGEST = ("sparse_columns", "many_weights", "fednest", "deep_features")


def lines(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was measured, as processes finish."""
    names = chosen.problem or list(CATALOG)
    names = sorted(names, key=lambda name: name not in LONGEST)
    wanted = chosen.partition or PARTITIONS
    jobs = [
        (name, own)
        for name in names
        for group in TOGETHER
        if (own := [one for one in group if one in wanted])
    ]
    more = {"seeds": chosen.seeds, "with_grid": not chosen.no_grid}
    more["rounds"] = chosen.rounds
    context = multiprocessing.get_context("spawn")
    os.environ.update(ONE_CORE)
    # A new process for every job: compiled programs would fill the memory.
    with ProcessPoolExecutor(
        chosen.jobs, mp_context=context, max_tasks_per_child=1
    ) as pool:
        tasks = [pool.submit(measured_together, *job, **more) for job in jobs]
        for task in as_completed(tasks):
            yield from task.result()


COLUMNS = (
    *("problem", "partition", "start", "final", "worst", "best", "grid", "ratio"),
    *("share", "events", "worse", "errors", "within"),
)


def table_row(line: dict[str, Any]) -> tuple[str, ...]:
    """Return the entries of a line of the table, in the order of `COLUMNS`."""
    runs = [run for run in line["runs"] if "error" not in run]
    verdict, grid = line["verdicts"], (line["grid"] or {}).get("best")
    finals = [run["final"] for run in runs]
    ratio = finals[0] / grid if finals and grid else None
    numbers = (
        mean(run["start"] for run in line["runs"]),
        mean(finals) if finals else None,
        max(finals) if finals else None,
        mean(run["best"] for run in runs) if runs else None,
        *(grid, ratio, verdict["descent_share"]),
    )
    shown = ("-" if number is None else f"{number:.4g}" for number in numbers)
    counts = (str(verdict[name]) for name in ("events", "worse", "errors"))
    within = {True: "yes", False: "NO", None: "-"}[verdict["within"]]
    return (line["problem"], line["partition"], *shown, *counts, within)


def printed(entries: Sequence[str]) -> str:
    """Return a line of the table, as wide as a terminal may be."""
    first, second, *others = entries
    return f"{first:18}{second:10}" + "".join(f"{one:>10}" for one in others)


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Count the verdicts, and repeat every error and message once."""
    judged = [line["verdicts"] for line in found]
    compared = [one["within"] for one in judged if one["within"] is not None]
    runs = [run for line in found for run in line["runs"]]
    told = [
        f"runs: {len(runs)}",
        f"ended worse than they began, without an error: "
        f"{sum(one['worse'] for one in judged)}",
        f"errors: {sum(one['errors'] for one in judged)}",
        f"within 10 % of the grid: {sum(compared)} of {len(compared)}",
    ]
    heard = {
        f"{line['problem']}, {line['partition']}: {text}"
        for line in found
        for run in line["runs"]
        for text in [*run["messages"], *([run["error"]] if "error" in run else [])]
    }
    return "\n".join([*told, *sorted(heard)])


def main() -> None:
    """Measure what was asked for, and print a table."""
    chosen = arguments()
    if chosen.list:
        for name, summary_of in SUMMARIES.items():
            print(f"{name:18} {summary_of}")
        return
    print(printed(COLUMNS), flush=True)
    found = []
    for line in lines(chosen):
        found.append(line)
        print(printed(table_row(line)), flush=True)
        if chosen.out:
            with chosen.out.open("a") as file:
                file.write(json.dumps(to_plain(line)) + "\n")
    print(summary(found))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo",
        description=(benchmarks.zoo.__doc__ or "").splitlines()[0],
    )
    add = parser.add_argument
    add("--list", action="store_true", help="list the problems and exit")
    add("--problem", nargs="+", choices=list(CATALOG), metavar="NAME")
    add("--partition", nargs="+", choices=PARTITIONS)
    add("--seeds", type=int, default=8, help="runs of the default recipe")
    add("--rounds", type=int, help="instead of each problem's own number")
    add("--jobs", type=int, default=os.cpu_count(), help="processes, one core each")
    add("--no-grid", action="store_true", help="run the default recipe alone")
    add("--out", type=Path, help="append a line of JSON for each problem and partition")
    return parser.parse_args()


if __name__ == "__main__":
    main()
