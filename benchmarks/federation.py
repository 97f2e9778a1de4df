"""How long a round takes on real processes on this machine, and where the time goes.

Four persistent nodes and a SuperLink over loopback, without TLS; the model is 1 MB and
the work at the sites small. Beside it the same exchange of packets in one process,
without Flower: what packing, hashing and writing states cost.

    python benchmarks/federation.py [nodes] [megabytes]
"""

import sys
import tempfile
import time
from pathlib import Path

from fedbilevel.deployment import trial
from fedbilevel.experiment import Experiment
from fedbilevel.runtime.federation import Terms

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
    seen: dict[int, float] = {}

    def watch(done: int, total: int, newest: dict[str, float]) -> None:
        seen.setdefault(done, time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        experiment.save(place)
        result = trial.federate(
            experiment, place, Terms(), nodes="persistent", watch=watch
        )
    first = min(done for done in seen if done >= WARM)
    last = max(done for done in seen if done < ROUNDS)
    each = (seen[last] - seen[first]) / (last - first)
    sent = result.counts["wire"]["bytes_down"] / ROUNDS / nodes
    print(f"{nodes} nodes, {sent / 2**20:.2f} MiB down and as much up per exchange")
    print(f"seconds a round: {each:.3f}")
    print(f"all sites, compilation included: {result.seconds['slowest_sites']:.2f} s")


if __name__ == "__main__":
    nodes, megabytes = (*sys.argv[1:], *("4", "1.0")[len(sys.argv) - 1 :])
    main(int(nodes), float(megabytes))
