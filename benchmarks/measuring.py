"""The part of a run that is measuring, as often as a run measures by itself.

    python -m benchmarks.measuring                # each task with its own settings

A round and a measurement are told apart by the processor seconds of runs that measure
in every round, and at the end alone. After the tasks follow those of `growth.py` with
10,000 clients, and with a million parameters. It prints a table in Markdown.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.growth import LARGE, MANY, Size, make_data, make_job

from fedbilevel.experiments import Experiment
from fedbilevel.runtime import Job, Ledger, SimulatorRuntime, execute
from fedbilevel.runtime.driver import NEVER
from fedbilevel.runtime.stopping import is_measured, spacing
from fedbilevel.studies.single import measured_every

TURNS = 4
NAMES = ("quadratic", "regularization", "cleaning", "representation", "few-shot")


class Timed(NamedTuple):
    """A job, its rounds, and how many of them are timed."""

    job: Job
    rounds: int
    timed: int = 32


def of_task(name: str) -> Timed:
    """Return a task's own job."""
    built = Experiment(name).build()
    return Timed(built.job(), built.rounds)


def of_size(size: Size, timed: int) -> Timed:
    """Return 200 rounds with many clients, or many parameters."""
    return Timed(make_job(size, make_data(size)), 200, timed)


CASES: dict[str, Callable[[], Timed]] = {
    **{name: lambda name=name: of_task(name) for name in NAMES},
    "10,000 clients, 1 % a round": lambda: of_size(MANY, 32),
    "1,000 clients, a million parameters, 1 %": lambda: of_size(LARGE, 4),
}


def line(name: str, job: Job, rounds: int, timed: int) -> str:
    """Return the line of one job."""
    runtime = SimulatorRuntime(job)

    def seconds(every: int) -> float:
        began = time.process_time()
        execute(runtime, timed, measure_every=every)
        return time.process_time() - began

    pairs = [(seconds(timed), seconds(1)) for _ in range(1 + TURNS)]
    later = zip(*pairs[1:], strict=True)  # the first ones compile
    once, always = map(statistics.median, later)
    measurement = (always - once) / (timed - 1)
    every = spacing(measured_every(Ledger(job), None, NEVER))
    of_round = (once - measurement) / timed
    times = range(1, rounds + 1)
    count = sum(bool(is_measured(t, every)) or t == rounds for t in times)
    share = count * measurement / (count * measurement + rounds * of_round)
    cells = (f"{1e3 * one:.3g}" for one in (of_round, measurement))
    return f"| {name} | {count} of {rounds} | {' | '.join(cells)} | {share:.0%} |"


def main() -> None:
    print("| task | measured | ms a round | ms a measurement | share |")
    print("|---|---|---|---|---|")
    for name, made in CASES.items():
        print(line(name, *made()), flush=True)


if __name__ == "__main__":
    main()
