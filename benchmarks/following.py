"""What it costs to follow the curvature, and to be guarded: ratios in one run.

    python benchmarks/following.py [TASK] [ROUNDS]

The same rounds of FedBiO with the same numbers three times: as they are, with the
safeguard, and with steps in units of the curvature, which is measured along the run.
Processor time, the median of 15 turns, each of all three.
"""

import statistics
import sys
import time

import jax

from fedbilevel.algorithms import steadied
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.experiments import Experiment
from fedbilevel.runtime import SimulatorRuntime, execute
from fedbilevel.units import OfCurvature

TURNS = 15


def seconds(runtime: SimulatorRuntime, rounds: int) -> float:
    """Return the processor time of a run whose program was compiled before."""
    before = time.process_time()
    outcome = execute(runtime, rounds, measure_every=rounds)
    jax.block_until_ready(outcome.state)
    return time.process_time() - before


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
        "following L1": runtime(followed, True),
    }
    for one in runs.values():
        seconds(one, rounds)
    taken = [
        {name: seconds(one, rounds) for name, one in runs.items()} for _ in range(TURNS)
    ]
    for name in runs:
        ratios = [turn[name] / turn["plain numbers"] for turn in taken]
        print(f"{name:>20}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    given = [*sys.argv[1:3], *("regularization", "200")[len(sys.argv) - 1 :]]
    main(given[0], int(given[1]))
