"""What a run costs as it grows: clients, participants, steps, factors, rows, features.

Softmax regression with a strength per feature above, LocalBSGM, float32, clients of 20
rows. Costs are seconds of processor time, all threads together, of rounds that are not
measured. First K = 10,000 small clients, of whom 1 % and 10 % take part; with `--large`
then K = 1,000 with a million parameters. Then each number grows alone, while the others
stay; every size is timed several times, in turns. A slope of 1 means: twice as much,
twice the time; 0: the same. Its interval, 95 %, is that of the regression.

    python benchmarks/growth.py [--large] [--quick] [--out runs/growth]
"""

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot as plt
from scipy import stats

from fedbilevel import configure
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData
from fedbilevel.runtime import Job, Ledger, Sampling, SimulatorRuntime, Stopping
from fedbilevel.runtime.contract import Span
from fedbilevel.runtime.stopping import Rule, Track
from fedbilevel.tasks import regularization

NEVER = 10**6


@dataclass(frozen=True)
class Size:
    """What grows; `rounds` are those of one timing."""

    clients: int = 1000
    participants: int = 64
    local_steps: int = 4
    factors: int = 4
    batch: int = 16
    features: int = 64
    rounds: int = 4
    rows: int = 20
    classes: int = 10


AXES = {
    "clients": (250, 1000, 4000, 16000),
    "participants": (16, 64, 256),
    "local_steps": (4, 16, 64),
    "factors": (4, 16, 64),
    "batch": (16, 64, 256),
    "features": (64, 256, 1024),
    "rounds": (4, 16, 64),
}
MANY = Size(clients=10_000, participants=100, local_steps=10, batch=8)
LARGE = Size(1_000, 10, 2, batch=8, features=1000, rounds=1, classes=1000)


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def make_data(size: Size) -> ClientData:
    """Return random rows: time does not depend on what they hold."""
    draw = np.random.default_rng(0)

    def level() -> list[dict[str, np.ndarray]]:
        shape = (size.rows, size.features)
        return [
            {
                "features": draw.standard_normal(shape, np.float32) / shape[1] ** 0.5,
                "label": draw.integers(0, size.classes, size.rows, np.int32),
            }
            for _ in range(size.clients)
        ]

    return ClientData.from_clients(level(), level())


def make_job(size: Size, data: ClientData, method: Any = LocalBSGM) -> Job:
    algorithm = method.effective(
        Neumann(size.factors, 0.1),
        upper_step=0.1,
        lower_step=0.1,
        upper_weight=0.1,
        lower_weight=0.1,
        local_steps=size.local_steps,
    )
    start = (jnp.full(size.features, -5.0), jnp.zeros((size.classes, size.features)))
    sampling = Sampling(size.batch, size.participants)
    problem = regularization.make().problem
    return Job.of(algorithm, problem, data, *start, sampling=sampling)


class Timed:
    """A run of some size that can be timed again and again."""

    def __init__(self, size: Size, data: ClientData) -> None:
        self.size = size
        job = make_job(size, data)
        Ledger(job).summary(job.key, size.rounds)
        self.runtime = SimulatorRuntime(job)
        self.state, _ = self.runtime.start()
        self.advance(1)

    def advance(self, rounds: int, every: int = NEVER) -> float:
        """Run some rounds; return their seconds of processor time."""
        last = np.asarray([NEVER], np.int32)
        rule, track = Rule.of(Stopping(), last[0]), Track.start()
        span = Span(1, 1 + rounds, NEVER, every, last, rule, track, ends=False)
        began = cpu()
        self.state = self.runtime.advance(self.state, span).state
        jax.block_until_ready(jax.tree.leaves(self.state))
        return cpu() - began


def shares(size: Size, repeats: int) -> None:
    """Print what a run costs of which 1 % and 10 % take part."""
    began = time.perf_counter(), cpu()
    data = make_data(size)
    made = time.perf_counter(), cpu()
    times = []
    for participants in (size.participants, 10 * size.participants):
        before = time.perf_counter(), cpu()
        run = Timed(replace(size, participants=participants), data)
        wall = made[0] - began[0] + time.perf_counter() - before[0]
        spent = made[1] - began[1] + cpu() - before[1]
        took = [run.advance(size.rounds) / size.rounds for _ in range(repeats)]
        measured = run.advance(1, every=1)
        times.append(float(np.median(took)))
        kept = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state.clients))
        print(
            f"{size.clients} clients of {(size.classes + 1) * size.features} "
            f"parameters, {participants} a round: set-up {spent:.1f} CPU s "
            f"({wall:.1f} s), a round {1e3 * times[-1]:.1f} ms, a measured one "
            f"{1e3 * measured:.1f} ms, {kept / 2**20:.1f} MiB kept on clients, "
            f"peak {peak_gib():.2f} GiB",
            flush=True,
        )
    print(f"10 % cost {times[1] / times[0]:.1f} times what 1 % cost")


def timings(axis: str, values: tuple[int, ...], repeats: int) -> np.ndarray:
    """Return the seconds of a timing at each value, repeated in turns."""
    sizes = [replace(Size(), **{axis: value}) for value in values]
    runs: list[Timed] = []
    for size in sizes:
        known = [one for one in runs if replace(one.size, rounds=size.rounds) == size]
        runs.append(known[0] if known else Timed(size, make_data(size)))
    table = [
        [run.advance(size.rounds) for run, size in zip(runs, sizes, strict=True)]
        for _ in range(repeats)
    ]
    return np.asarray(table)


def slope(values: tuple[int, ...], table: np.ndarray) -> tuple[float, float]:
    """Return the slope of the logarithms, and the half width of its interval."""
    logs = np.log(np.broadcast_to(np.asarray(values, float), table.shape)).ravel()
    fit = stats.linregress(logs, np.log(table).ravel())
    wide = float(stats.t.ppf(0.975, logs.size - 2))
    return float(fit.slope), wide * float(fit.stderr)  # pyright: ignore[reportAttributeAccessIssue]


def draw(found: dict[str, tuple], path: Path) -> None:
    """Draw the timings and the slopes."""
    # One scale for all: a panel of its own would make a slope of 0 look steep.
    wide = (2.2 * len(found), 2.9)
    figure, panels = plt.subplots(1, len(found), figsize=wide, sharey=True)
    for panel, (axis, (values, table, rate, half)) in zip(
        np.atleast_1d(panels), found.items(), strict=True
    ):
        panel.loglog(values, 1e3 * table.T, ".", color="tab:blue", alpha=0.5)
        panel.loglog(values, 1e3 * np.median(table, axis=0), color="tab:blue")
        panel.set_title(f"slope {rate:.2f} ± {half:.2f}", fontsize=9)
        panel.set_xlabel(axis.replace("_", " "))
        panel.set_xticks(values, [str(value) for value in values])
        panel.minorticks_off()
    np.atleast_1d(panels)[0].set_ylabel("CPU ms of a timing")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="a million parameters")
    parser.add_argument("--quick", action="store_true", help="two sizes, three times")
    parser.add_argument("--out", type=Path, default=Path("runs/growth"))
    given = parser.parse_args()
    configure()
    jax.config.update("jax_enable_compilation_cache", False)  # it is part of set-up
    repeats = 3 if given.quick else 9
    shares(MANY, repeats)
    if given.large:
        shares(LARGE, 3)
    found = {}
    pick: Callable = (lambda all: (all[0], all[-1])) if given.quick else tuple
    for axis, every in AXES.items():
        values = pick(every)
        table = timings(axis, values, repeats)
        found[axis] = (values, table, *slope(values, table))
        told = ", ".join(
            f"{value}: {1e3 * each:.1f}"
            for value, each in zip(values, np.median(table, axis=0), strict=True)
        )
        print(
            f"{axis} | {told} ms | slope {found[axis][2]:.2f} +- {found[axis][3]:.2f}",
            flush=True,
        )
    draw(found, given.out / "growth.png")
    print(f"drawn in {given.out / 'growth.png'}")


if __name__ == "__main__":
    main()
