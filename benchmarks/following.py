"""What it costs to follow the curvature, and to be guarded: ratios in one run.

    python benchmarks/following.py [TASK] [ROUNDS]

The same rounds of FedBiO with the same numbers four times: as they are, with the
safeguard, with steps in units of the curvature, which is measured along the run, and
with both, which may give y and z momentum, too. The time of ROUNDS rounds is that of
twice as many less that of as many: what comes before the first round is left out.
Seconds of the clock, which take idle cores, and of the processor; the median of 11
turns, each of all four.
"""

import sys
import time

import jax
import numpy as np

from fedbilevel.algorithms import steadied
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.experiments import Experiment
from fedbilevel.runtime import SimulatorRuntime, execute
from fedbilevel.units import OfCurvature

TURNS = 11


def seconds(runtime: SimulatorRuntime, rounds: int) -> np.ndarray:
    """Return the time of a run, of the clock and of the processor, once compiled."""
    before = time.perf_counter(), time.process_time()
    outcome = execute(runtime, rounds, measure_every=rounds)
    jax.block_until_ready(outcome.state)
    return np.subtract((time.perf_counter(), time.process_time()), before)


def main(task: str, rounds: int) -> None:
    """Print the ratios to plain numbers without a safeguard."""
    experiment = Experiment(task, "fedbio", 8, local_steps=10, safeguard=False)
    setting = experiment.build().setting

    def runtime(algorithm: FedBiO, safeguard: bool) -> SimulatorRuntime:
        return SimulatorRuntime(setting.job(steadied(algorithm, safeguard)))

    plain = FedBiO(1e-3, 1e-3, 1e-3, local_steps=10)
    share = OfCurvature(1e-3)
    followed = FedBiO(1e-3, share, share, local_steps=10)
    runs = {
        "plain numbers": runtime(plain, False),
        "with a safeguard": runtime(plain, True),
        "following L1": runtime(followed, False),
        "both": runtime(followed, True),
    }
    for one in runs.values():
        seconds(one, rounds)
    taken = [
        {
            name: seconds(one, 2 * rounds) - seconds(one, rounds)
            for name, one in runs.items()
        }
        for _ in range(TURNS)
    ]
    for name in runs:
        ratios = [turn[name] / turn["plain numbers"] for turn in taken]
        clock, processor = np.median(ratios, axis=0)
        print(f"{name:>20}: {clock:.3f} of the clock, {processor:.3f} of the processor")


if __name__ == "__main__":
    given = [*sys.argv[1:3], *("regularization", "200")[len(sys.argv) - 1 :]]
    main(given[0], int(given[1]))
