"""How long a round takes on real processes on this machine, and what protects it.

Persistent nodes and a SuperLink over loopback, without TLS; the model is 1 MB and the
work at the sites small. Once as `serve` starts the SuperLink, with its nodes in a file,
then as `federate` does, with each protection on top of the signatures that are always
there. And what a packet of that size costs to write and to read, with a
checksum and with a signature, and what a line in a site's ledger costs.

    python -m benchmarks.federation [nodes] [megabytes]
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
from tests.gateway import make_certificates

from fedbilevel.deployment import serving
from fedbilevel.deployment.apps import Served
from fedbilevel.deployment.processes import free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.experiments import Experiment
from fedbilevel.federation import SiteLimits, Terms
from fedbilevel.federation.ledger import SiteLedger
from fedbilevel.federation.signatures import KeyFiles, server_seal, site_seal
from fedbilevel.federation.wire import CHECKSUM, EVERYONE, Header, pack, unpack
from fedbilevel.result import Result

ROUNDS, WARM = 40, 5
FLOATS_PER_UNIT = 2 * (65 + 10)  # of local-bsgm on digits: x, y and their directions
WAYS = ("bytes_up", "bytes_down")
NOISY = {"clip": 1.0, "noise": 1.0, "force": True}
# The changes of the experiment, and whether TLS is on.
PROTECTIONS = {
    "signatures alone": ({}, False),
    "TLS": ({}, True),
    "clip and noise": (NOISY, False),
    "secure mean": ({"aggregate": "secure"}, False),
    "TLS, noise, secure mean": ({**NOISY, "aggregate": "secure"}, True),
}


def main(nodes: int, megabytes: float) -> None:
    width = max(1, round(megabytes * 2**20 / 4 / FLOATS_PER_UNIT))
    experiment = Experiment(
        "representation",
        "local-bsgm",
        clients=nodes,
        rounds=ROUNDS,
        local_steps=1,
        batch=8,
        measure_every=ROUNDS,
        options={"width": str(width), "q": "1", "upper_step": "1e-4"},
    )
    cost_of_seals(megabytes)
    cost_of_ledger(experiment)
    each, result = seconds_a_round(experiment, nodes, remembers=True)
    sent = result.counts["wire"]["bytes_down"] / ROUNDS / nodes
    print(f"{nodes} nodes, {sent / 2**20:.2f} MiB each way")
    print(f"SuperLink that keeps its nodes: {each:.3f} s a round; without:")
    print("protection | seconds a round | MiB up and down a node and round")
    for name, (changes, encrypted) in PROTECTIONS.items():
        each, result = seconds_a_round(
            replace(experiment, **changes), nodes, encrypted=encrypted
        )
        wire = result.counts["wire"]
        up, down = (wire[way] / ROUNDS / nodes / 2**20 for way in WAYS)
        print(f"{name} | {each:.3f} | {up:.2f}, {down:.2f}", flush=True)


def cost_of_ledger(experiment: Experiment) -> None:
    """Print the milliseconds of one more line on a site's disk."""
    job = experiment.build().setting.job(experiment.build().algorithm, 0)
    with tempfile.TemporaryDirectory() as name:
        ledger, replies = SiteLedger(job, SiteLimits(), Path(name)), count()
        cost = median_ms(lambda: ledger.exchange(4, 4, "f", [str(next(replies))]))
        print(f"an entry in a ledger: {cost:.2f} ms")


def cost_of_seals(megabytes: float) -> None:
    """Print the milliseconds that one packet takes on each side."""
    header = Header("exchange", "f", "s", "a", EVERYONE, 1, 1)
    leaf = np.random.default_rng(0).normal(size=round(megabytes * 2**20 / 8))
    with tempfile.TemporaryDirectory() as name:
        files = serving.make_keys(Path(name), 1)
        site = KeyFiles(Path(name) / "keys" / "0", (Path(name) / "keys/server.pub",))
        signs = (server_seal(files), site_seal(0, site))
    for what, (ours, theirs) in (("a checksum", (CHECKSUM,) * 2), ("keys", signs)):
        packet = pack(header, [leaf], seal=ours)
        write = median_ms(lambda: pack(header, [leaf], seal=ours))  # noqa: B023
        read = median_ms(lambda: unpack(packet, 1 << 30, theirs))  # noqa: B023
        print(
            f"a packet of {len(packet) / 2**20:.2f} MiB with {what}: {write:.2f} ms to "
            f"write, {read:.2f} ms to read"
        )


def median_ms(call: Callable[[], object], times: int = 51) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return 1e3 * sorted(took)[times // 2]


def seconds_a_round(
    experiment: Experiment, nodes: int, *, remembers=False, encrypted=False
) -> tuple[float, Result]:
    """Run on real processes; the first rounds, which compile, do not count."""
    seen: dict[int, float] = {}

    def watch(done: int, total: int, newest: dict[str, float]) -> None:
        seen.setdefault(done, time.perf_counter())

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        experiment.save(folder)
        keys = serving.make_keys(folder, nodes)
        certificates = make_certificates(Path(name) / "tls") if encrypted else None
        link = SuperLink(f"127.0.0.1:{free_port()}", folder, certificates, remembers)
        crowd = [
            serving.persistent_node(experiment, k, folder, link) for k in range(nodes)
        ]
        result = serve_over_flower(
            Served(experiment, folder, Terms(), keys),
            link,
            watch=watch,
            say=lambda text: None,
            crowd=crowd,
        )
    first = min(done for done in seen if done >= WARM)
    last = max(done for done in seen if done < ROUNDS)
    return (seen[last] - seen[first]) / (last - first), result


if __name__ == "__main__":
    nodes, megabytes = (*sys.argv[1:], *("4", "1.0")[len(sys.argv) - 1 :])
    main(int(nodes), float(megabytes))
