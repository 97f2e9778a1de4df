"""How long `fedbilevel run TASK` takes to its first round: from nothing, and again.

    python benchmarks/starting.py [TASK ...]

Each command makes one round and measures it; "cold" has no compiled program on disk,
"warm" those of the command before. Modules are read as bytecode in both, as they are
where a package is installed. Seconds of the clock, and of the processor with all its
threads; take the former from an idle machine alone.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time

from fedbilevel import tasks


def main() -> None:
    """Print a line a task."""
    parser = argparse.ArgumentParser(description="Time the start of commands.")
    parser.add_argument("tasks", nargs="*")
    chosen = parser.parse_args().tasks or tasks.names()
    with tempfile.TemporaryDirectory() as folder:
        timed(
            one_round("two-client"), folder
        )  # writes the bytecode of all that is imported
    print("| task | cold, s | CPU s | warm, s | CPU s |\n|---|---|---|---|---|")
    for task in chosen:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (timed(one_round(task), folder) for _ in range(2))
        figures = " | ".join(f"{seconds:.1f}" for seconds in (*cold, *warm))
        print(f"| {task} | {figures} |", flush=True)


def one_round(task: str) -> list[str]:
    """Return the words that run one round of a task."""
    return ["run", task, "--rounds", "1", "--json"]


def timed(words: list[str], cache: str) -> tuple[float, float]:
    """Run a command; return seconds of the clock and of the processor."""
    before, began = _processor(), time.perf_counter()
    kept = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(
        [sys.executable, "-m", "fedbilevel.cli", *words],
        env={**kept, "XDG_CACHE_HOME": cache},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began, _processor() - before


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
