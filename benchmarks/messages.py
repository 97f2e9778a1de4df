"""How often a site, a server and a SuperLink hold a message, by the peak of each.

Averages a vector y by FedAvg over Flower, in real processes of this machine: in a round
y travels to the site, and what became of it travels back. The peaks of a process for
two lengths of y are that many lengths apart: what Python and JAX take by themselves is
the same in both, and drops out. Of a node that is all it does: `work` is a process that
makes the steps of a node, from a y that is there, without any message.

    python -m benchmarks.messages [--megabytes 50 200 400] [--clients 1]
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel import ClientData, Problem, Task, configure
from fedbilevel.deployment.apps import Served
from fedbilevel.deployment.serving import federate
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.runtime import keys
from fedbilevel.runtime.exchange import start_kept

ROUNDS = 3
MEGABYTE = 10**6
NAMES = {
    "node": "--client",
    "server": "deployment.apps",
    "SuperLink": "guarded_superlink",
}


def _loss(x, y, rows):
    return 0.5 * jnp.mean((y - rows["t"][0]) ** 2)


def make(clients: int = 1, *, megabytes: int = 50) -> Task:
    """Build the task: y has so many megabytes, and a row is one number."""
    rows = [{"t": np.ones((2, 1))} for _ in range(clients)]
    y = jnp.zeros(megabytes * MEGABYTE // 4, jnp.float32)
    steps = {"rounds": ROUNDS, "local_steps": 1, "batch": 2, "lower_step": 0.1}
    data = ClientData.from_clients(rows, rows)
    return Task(Problem(_loss, _loss), data, jnp.zeros(()), y, recommended=steps)


def experiment_of(megabytes: int, clients: int) -> Experiment:
    return Experiment(
        f"{Path(__file__).resolve()}:make",
        "fedavg",
        clients=clients,
        measure_every=ROUNDS,
        safeguard=False,
        options={"megabytes": str(megabytes)},
    )


def peaks_now(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield what each process of a federation has taken at most so far, in MB."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            told = (place / "status").read_text()
            ours = str(folder).encode() in (place / "environ").read_bytes()
        except OSError:  # ended while we looked
            continue
        if not ours:
            continue
        for name, mark in NAMES.items():
            if mark in words and "VmHWM" in told:
                kib = int(told.partition("VmHWM:")[2].split()[0])
                yield name, kib * 1024 / MEGABYTE


def own_peak() -> float:
    """Return what this process has taken at most so far, in MB."""
    told = Path("/proc/self/status").read_text()
    return int(told.partition("VmHWM:")[2].split()[0]) * 1024 / MEGABYTE


def work(megabytes: int) -> None:
    """Make the steps of a node without messages, and print the peak of this process."""
    configure("float32", cores=1)
    site = build_site(experiment_of(megabytes, 1), 0)
    ((where, message),) = site.work.sent.items()
    job = site.work.job
    kept = start_kept(job)
    for index in range(ROUNDS):
        sent = jax.tree.map(lambda one: np.ones(one.shape, one.dtype), message)
        turn = keys.client_turn(job.key, where, 0, jnp.asarray(index, jnp.int32))
        kept, reply, _ = site.work.exchange(where, sent, kept, turn)
        jax.block_until_ready(reply)
        del sent, reply
    print(own_peak())


def peak_of_work(megabytes: int) -> float:
    """Return the peak of a process of its own that does the work alone, in MB."""
    command = [sys.executable, *sys.orig_argv[1:3], "--work", str(megabytes)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(told.split()[-1])


def measured(megabytes: int, clients: int) -> dict[str, float]:
    """Return the peak of each kind of process in a federation, in MB."""
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def watch(*_) -> None:
            for kind, peak in peaks_now(folder):
                peaks[kind] = max(peaks.get(kind, 0.0), peak)

        federate(
            Served(experiment_of(megabytes, clients), folder, Terms(deadline=300.0)),
            nodes="persistent",
            watch=watch,
            say=lambda text: None,
        )
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 200, 400])
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        work(given.work)
        return
    found = {}
    for size in given.megabytes:
        found[size] = {"work": peak_of_work(size), **measured(size, given.clients)}
        told = ", ".join(f"{name} {peak:,.0f}" for name, peak in found[size].items())
        print(f"message of {size} MB, peaks in MB: {told}", flush=True)
    for low, high in itertools.pairwise(given.megabytes):
        lengths = {
            name: (found[high][name] - found[low][name]) / (high - low)
            for name in found[high]
        }
        told = ", ".join(f"{name} {count:.1f}" for name, count in lengths.items())
        print(f"{low} to {high} MB, lengths of a message: {told}", flush=True)


if __name__ == "__main__":
    main()
