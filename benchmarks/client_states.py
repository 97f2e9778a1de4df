"""What the states of clients take in memory and on a disk, and what a round costs.

Softmax regression with a strength per feature above, LocalBSGVRM, whose clients keep a
point each, float32; clients of 20 rows, of whom 1 % take part. Both kinds run in a
process of their own: told is what stays in memory after the rounds, the peak of the
process, and the seconds of a round, its processor time, all threads together.

    python -m benchmarks.client_states [--clients 400] [--width 500] [--rounds 20]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial

import jax
import numpy as np
from benchmarks.growth import NEVER, Size, cpu, make_data, make_job, peak_gib

from fedbilevel import configure
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.runtime import (
    DiskSimulatorRuntime,
    SimulatorRuntime,
    Stopping,
)
from fedbilevel.runtime.contract import Span
from fedbilevel.runtime.stopping import Rule, Track

KINDS = ("memory", "disk")


def resident_gib() -> float:
    """Return what of this process is in memory now."""
    with open("/proc/self/status") as lines:
        (kib,) = (line.split()[1] for line in lines if line.startswith("VmRSS"))
    return int(kib) / 2**20


def run(kind: str, size: Size, folder: str) -> None:
    """Run some rounds, and print what they took."""
    disk = partial(DiskSimulatorRuntime, folder=folder)
    job = make_job(size, make_data(size), LocalBSGVRM)
    make = disk if kind == "disk" else SimulatorRuntime
    before, last = resident_gib(), np.asarray([NEVER], np.int32)
    runtime = make(job)
    state, _ = runtime.start()

    def advance(start: int, rounds: int) -> None:
        nonlocal state
        rule, track = Rule.of(Stopping(), last[0]), Track.start()
        span = Span(start, start + rounds, NEVER, NEVER, last, rule, track, ends=False)
        state = runtime.advance(state, span).state
        jax.block_until_ready(jax.tree.leaves(state.server))

    advance(0, 1)
    began = time.perf_counter(), cpu()
    advance(1, size.rounds)
    wall, spent = time.perf_counter() - began[0], cpu() - began[1]
    digest = float(np.asarray(jax.tree.leaves(state.server)[-1]).sum())
    print(
        f"{kind}: {before:.2f} GiB resident before, {resident_gib():.2f} after, peak "
        f"{peak_gib():.2f}; a round {1e3 * wall / size.rounds:.0f} ms, "
        f"{1e3 * spent / size.rounds:.0f} CPU ms; a sum of the state {digest!r}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=400)
    parser.add_argument("--width", type=int, default=500, help="features, and classes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kind", choices=KINDS, help="one alone, in this process")
    given = parser.parse_args()
    size = Size(
        given.clients,
        max(1, given.clients // 100),
        local_steps=2,
        batch=8,
        features=given.width,
        rounds=given.rounds,
        classes=given.width,
    )
    if given.kind is None:
        kept = 4 * (size.classes + 1) * size.features * size.clients / 2**30
        print(f"{size.clients} clients keep {kept:.2f} GiB", flush=True)
        for kind in KINDS:
            subprocess.run([sys.executable, *sys.orig_argv[1:], "--kind", kind])
        return
    configure()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        run(given.kind, size, folder)


if __name__ == "__main__":
    main()
