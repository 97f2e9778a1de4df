"""The part of a run that is measuring, as often as a run measures by itself.

    python benchmarks/measuring.py                # each task with its own settings

A round and a measurement are told apart by the processor seconds of runs that measure
in every round, and at the end alone. It prints a table in Markdown.
"""

import statistics
import time

from fedbilevel.experiments import Experiment
from fedbilevel.runtime import SimulatorRuntime, execute
from fedbilevel.runtime.stopping import is_measured, spacing

ROUNDS, TURNS = 32, 4
NAMES = ("quadratic", "regularization", "cleaning", "representation", "few-shot")
CASES = {name: Experiment(name) for name in NAMES}


def line(name: str, experiment: Experiment) -> str:
    """Return the line of one task."""
    built = experiment.build()
    runtime, rounds = SimulatorRuntime(built.job()), built.rounds

    def seconds(every: int) -> float:
        began = time.process_time()
        execute(runtime, ROUNDS, measure_every=every)
        return time.process_time() - began

    pairs = [(seconds(ROUNDS), seconds(1)) for _ in range(1 + TURNS)]
    every = zip(*pairs[1:], strict=True)  # the first ones compile
    once, always = map(statistics.median, every)
    measurement = (always - once) / (ROUNDS - 1)
    of_round = (once - measurement) / ROUNDS
    times = range(1, rounds + 1)
    count = sum(bool(is_measured(t, spacing(None))) or t == rounds for t in times)
    share = count * measurement / (count * measurement + rounds * of_round)
    cells = (f"{1e3 * one:.3g}" for one in (of_round, measurement))
    return f"| {name} | {count} of {rounds} | {' | '.join(cells)} | {share:.0%} |"


def main() -> None:
    print("| task | measured | ms a round | ms a measurement | share |")
    print("|---|---|---|---|---|")
    for name, experiment in CASES.items():
        print(line(name, experiment), flush=True)


if __name__ == "__main__":
    main()
