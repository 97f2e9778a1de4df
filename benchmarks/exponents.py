"""How the error of methods of one machine falls with T, against what is claimed.

    python benchmarks/exponents.py [FOLDER] [--iterations 4000,16000] [--seeds 16]
                                   [--methods sustain,soba] [--processes 16]

Task `quadratic` (T1) with one client. The letters of a method are chosen once, for T =
4000; at any other T each is multiplied by (T / 4000) to the power that its theorem
gives it, and by nothing else. What is measured is the mean over a run of the squared
gradient, and of the criterion that adds the error of y; an exponent is fitted to means
over seeds.

All seeds of a method and T are one program. Its curves are kept in FOLDER, and what is
there already is not run again, so that a run that was stopped goes on. A table ends it.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel._files import read_arrays, write_arrays

CALIBRATED = 4000  # the T that letters are chosen for
GROUPED = 10  # iterations between two measurements
LONGEST = (1000, 4000, 16000, 64000)
METRICS = ("grad_norm_sq", "criterion")


@dataclass(frozen=True)
class Method:
    """A method by its name, its letters at T = 4000, and their powers of T.

    `series` is Q of its hypergradient at T = 4000, if it has one, which grows with the
    logarithm of T: the squared bias of the series falls as the error should. Counts are
    rounded.
    """

    name: str
    claimed: float
    letters: Mapping[str, float]
    powers: Mapping[str, float]
    counts: Mapping[str, int] = field(default_factory=dict)
    series: int | None = None

    def scaled(self, iterations: int) -> dict[str, Any]:
        """Return letters and counts for a run of so many iterations."""
        ratio = iterations / CALIBRATED

        def at(name: str, value: float) -> float:
            return value * ratio ** self.powers.get(name, 0.0)

        numbers = {name: at(name, value) for name, value in self.letters.items()}
        counts = {n: max(1, round(at(n, value))) for n, value in self.counts.items()}
        return numbers | counts

    def factors(self, iterations: int) -> int:
        """Return Q for a run of so many iterations."""
        assert self.series is not None
        more = self.claimed * math.log(iterations / CALIBRATED) / math.log(SHRINKS)
        return max(1, round(self.series + more))


# With half as many the bias alone is a quarter of the error at T = 16000.
SERIES, THETA = 20, 0.4
SHRINKS = (1 - THETA * 0.5) ** 2  # the squared bias, by one factor; 0.5 is T1's mu
# STORM: the step falls as T^(-1/3), weights are the letters times its square, and the
# first batch grows as the inverse of the step.
STORM = {"eta": -1 / 3, "a": -1 / 3, "first_batch": 1 / 3}
PLAIN = {"lr_x": -1 / 2, "lr_y": -1 / 2, "lr_z": -1 / 2}
STEPS = {"lr_x": 0.014, "lr_y": 0.028, "lr_z": 0.028}
LEVELS = {"lr_x": 0.014, "lr_y": 0.028}
METHODS = {
    "sustain": Method(
        "sustain",
        -2 / 3,
        {"a": 0.02, "c_f": 8, "c_g": 8, "c_a": 1, "c_b": 2},
        STORM,
        {"first_batch": 64},
        SERIES,
    ),
    "mrbo": Method(
        "mrbo",
        -2 / 3,
        {"eta": 0.02, "c1": 2, "c2": 2, "gamma": 1, "lam": 2},
        STORM,
        {"first_batch": 64},
        SERIES,
    ),
    "soba": Method("soba", -1 / 2, STEPS, PLAIN),
    # The steps of the text that was read: slower for x, and a weaker claim.
    "soba-two-scales": Method(
        "soba", -2 / 5, STEPS, {"lr_x": -3 / 5, "lr_y": -2 / 5, "lr_z": -2 / 5}
    ),
    "alset": Method("alset", -1 / 2, LEVELS, PLAIN, {"inner_steps": 1}, SERIES),
    # Penalty methods: the bias is nu to their degree, so that its square falls as the
    # claim says, epsilon^-3.5 and epsilon^-2.5.
    "f2sa": Method(
        "f2sa",
        -2 / 7,
        {**LEVELS, "nu": 0.2},
        {"lr_x": -4 / 7, "lr_y": -4 / 7, "nu": -1 / 7},
        {"inner_steps": 1},
    ),
    "f2sa-2": Method(
        "f2sa-p",
        -2 / 5,
        {**LEVELS, "nu": 0.2},
        {"lr_x": -3 / 5, "lr_y": -3 / 5, "nu": -1 / 10},
        {"inner_steps": 1, "degree": 2},
    ),
}


def job_of(method: Method, iterations: int) -> Any:
    """Return the job; what computes is loaded by the process that needs it."""
    from fedbilevel import algorithms, tasks
    from fedbilevel.runtime import Job, Sampling

    entry: Any = algorithms.find(method.name)
    given = method.scaled(iterations)
    if method.series is not None:
        given["hypergradient"] = entry.rule(method.factors(iterations), THETA)
    algorithm = entry.make(**given, local_steps=GROUPED)
    task = tasks.find("quadratic")(1)
    start = (task.problem, task.data, task.x, task.y)
    return Job.of(algorithm, *start, metrics=task.metrics, sampling=Sampling(1))


def kept(folder: Path, name: str, iterations: int, seeds: int) -> Path:
    """Return where the curves of a method, of all seeds, are kept."""
    return folder / f"{name}-{iterations}-{seeds}.npz"


def described(method: Method, iterations: int) -> str:
    """Return what made some curves, so that others are not taken for them."""
    factors = None if method.series is None else method.factors(iterations)
    return json.dumps([method.name, method.scaled(iterations), factors])


def measure(name: str, iterations: int, seeds: int, folder: Path) -> str:
    """Run one method for so many iterations, unless its curves are there."""
    from fedbilevel.runtime import SweepRuntime, execute

    method, path = METHODS[name], kept(folder, name, iterations, seeds)
    made_by = described(method, iterations)
    if path.exists() and str(read_arrays(path)["made_by"]) == made_by:
        return f"{name}, T = {iterations}: kept from before"
    began = time.perf_counter()
    runtime = SweepRuntime(job_of(method, iterations), seeds=range(seeds))
    columns = execute(runtime, iterations // GROUPED).columns
    curves = {metric: np.asarray(columns[metric]).T for metric in METRICS}
    write_arrays(path, {"made_by": np.asarray(made_by), **curves})
    seconds = time.perf_counter() - began
    value = curves[METRICS[0]].mean()
    return f"{name}, T = {iterations}: {value:.4g}, {seconds:.0f} s"


def fitted(name: str, every: list[int], seeds: int, folder: Path) -> list[str]:
    """Return the rows of the table of one method."""
    from fedbilevel.studies.scaling import Measured, fit_exponent

    rows = []
    for metric in METRICS:
        measured = []
        for iterations in every:
            curves = read_arrays(kept(folder, name, iterations, seeds))[metric]
            means = curves.mean(axis=1, keepdims=True)
            measured.append(Measured.of(means, lambda curves: curves[:, 0]))
        fit = fit_exponent(every, measured)
        values = " | ".join(f"{one.value:.4g}" for one in measured)
        span = f"{fit.exponent:.3f} [{fit.low:.3f}, {fit.high:.3f}]"
        claimed = f"{METHODS[name].claimed:.3f}"
        rows.append(f"| {name} | {metric} | {values} | {span} | {claimed} |")
    return rows


def main() -> None:
    """Measure what is missing, and print the table."""
    read = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    read.add_argument("folder", type=Path, nargs="?", default=Path("runs/exponents"))
    read.add_argument("--iterations", default=",".join(map(str, LONGEST)))
    read.add_argument("--seeds", type=int, default=16)
    read.add_argument("--methods", default=",".join(METHODS))
    read.add_argument("--processes", type=int, default=os.cpu_count())
    given = read.parse_args()
    every, names = (
        [int(T) for T in given.iterations.split(",")],
        given.methods.split(","),
    )
    unknown = sorted(set(names) - METHODS.keys())
    if unknown or min(every) < GROUPED or len(every) < 2:
        read.error(
            f"methods are {', '.join(METHODS)}; at least two numbers of iterations, "
            f"{GROUPED} or more, make an exponent."
        )
    given.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    # The longest first; a process each, as XLA runs these small programs on one core.
    pairs = [(name, T) for T in sorted(every, reverse=True) for name in names]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, mp_context=context) as pool:
        waiting = [
            pool.submit(measure, name, T, given.seeds, given.folder)
            for name, T in pairs
        ]
        for done in as_completed(waiting):
            print(done.result(), flush=True)
    print("\n| method | mean of |", " | ".join(f"T = {T}" for T in every), end="")
    print(" | exponent in T | claimed |\n" + "|---" * (4 + len(every)) + "|")
    for name in names:
        print("\n".join(fitted(name, every, given.seeds, given.folder)))
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
