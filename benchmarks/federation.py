"""How long a round takes on real processes on this machine.

Persistent nodes and a SuperLink over loopback, without TLS; the model is 1 MB and the
work at the sites small. Once as `federate` starts the SuperLink, once as `serve` does,
with a database on disk.

    python benchmarks/federation.py [nodes] [megabytes]
"""

import sys
import tempfile
import time
from pathlib import Path

from fedbilevel.deployment import trial
from fedbilevel.deployment.processes import free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.experiments import Experiment
from fedbilevel.federation import Terms
from fedbilevel.result import Result

ROUNDS, WARM = 40, 5
FLOATS_PER_UNIT = 2 * (65 + 10)  # of local-bsgm on digits: x, y and their directions


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
    for remembers in (False, True):
        each, result = seconds_a_round(experiment, nodes, remembers)
        sent = result.counts["wire"]["bytes_down"] / ROUNDS / nodes
        sites = result.seconds["slowest_sites"]
        print(
            f"{nodes} nodes, {sent / 2**20:.2f} MiB each way, SuperLink "
            f"{'with' if remembers else 'without'} a database: {each:.3f} s a round "
            f"(sites, compilation included: {sites:.1f} s of the run)"
        )


def seconds_a_round(
    experiment: Experiment, nodes: int, remembers: bool
) -> tuple[float, Result]:
    """Run on real processes; the first rounds, which compile, do not count."""
    seen: dict[int, float] = {}

    def watch(done: int, total: int, newest: dict[str, float]) -> None:
        seen.setdefault(done, time.perf_counter())

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experiment.save(folder)
        keys = trial.make_keys(folder, nodes)
        link = SuperLink(f"127.0.0.1:{free_port()}", folder, None, remembers)
        crowd = [
            trial.persistent_node(experiment, k, folder, link) for k in range(nodes)
        ]
        result = serve_over_flower(
            experiment, folder, Terms(), link, keys=keys, watch=watch, crowd=crowd
        )
    first = min(done for done in seen if done >= WARM)
    last = max(done for done in seen if done < ROUNDS)
    return (seen[last] - seen[first]) / (last - first), result


if __name__ == "__main__":
    nodes, megabytes = (*sys.argv[1:], *("4", "1.0")[len(sys.argv) - 1 :])
    main(int(nodes), float(megabytes))
