"""A long federation in which processes are killed at random; no round may be lost.

Every few seconds a node, the ServerApp or the SuperLink gets SIGKILL. In the end all
rounds are there, in order, and the simulator repeats the run from its record.

    python benchmarks/soak.py [rounds] [seconds between kills]
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from fedbilevel._files import read_arrays
from fedbilevel.deployment import apps, trial
from fedbilevel.deployment.processes import Process, free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import ATTENDANCE, replay
from fedbilevel.federation import Terms
from fedbilevel.runtime import configure
from fedbilevel.runtime.job import ABSENT

NODES = 4


class Killer:
    """Kills something now and then, and sees that no round is undone."""

    def __init__(self, folder: Path, crowd: list[Process], pause: float) -> None:
        self.folder, self.crowd, self.pause = folder, crowd, pause
        self.draw, self.next = random.Random(0), time.monotonic() + 3 * pause
        self.kills: Counter[str] = Counter()
        self.most = 0

    def __call__(self, done: int, total: int, newest: dict[str, float]) -> None:
        """Watch the run."""
        assert done >= self.most, f"round {self.most} was done, now it is {done}"
        self.most = done
        if done == 0 or time.monotonic() < self.next:
            return
        self.next = time.monotonic() + self.draw.uniform(0.5, 1.5) * self.pause
        what = self.draw.choice(["node"] * 6 + ["ServerApp"] * 2 + ["SuperLink"])
        victims = {"node": self._node, "ServerApp": self._server}
        number = victims.get(what, self._link)()
        if number is not None:
            os.kill(number, signal.SIGKILL)
            self.kills[what] += 1

    def _node(self) -> int | None:
        running = self.draw.choice(self.crowd).running
        return None if running is None or running.poll() is not None else running.pid

    def _server(self) -> int | None:
        path = self.folder / apps.PROCESS
        text = path.read_text() if path.exists() else ""
        alive = text.isdigit() and Path(f"/proc/{text}").exists()
        return int(text) if alive else None

    def _link(self) -> int | None:
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    words = (process / "cmdline").read_bytes().decode().split("\0")
                except OSError:
                    continue
                database = str(self.folder / "superlink.db")
                if database in words:
                    return int(process.name)
        return None


def main(rounds: int, pause: float) -> None:
    experiment = Experiment(
        "quadratic",
        "local-bsgvrm",
        clients=NODES,
        rounds=rounds,
        local_steps=2,
        measure_every=rounds,
        options={"noise": "0", "spread": "0.5", "q": "3"},
    )
    configure()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experiment.save(folder)
        link = SuperLink(f"127.0.0.1:{free_port()}", folder, certificates=None)
        keys = trial.make_keys(folder, NODES)
        crowd = [
            trial.persistent_node(experiment, k, folder, link) for k in range(NODES)
        ]
        killer, began = Killer(folder, crowd, pause), time.monotonic()
        terms = Terms(deadline=5.0, patience=120.0)
        serve_over_flower(
            experiment, folder, terms, link, keys=keys, watch=killer, crowd=crowd
        )
        took = time.monotonic() - began
        deployed, outcome, algorithm = replay(folder)
        record = read_arrays(folder / ATTENDANCE)["attendance"]
    point = algorithm.point(outcome.state.server)
    apart = float(np.abs(deployed.point["x"] - np.asarray(point.x)).max())
    print(f"{rounds} rounds in {took:.0f} s, killed: {dict(killer.kills)}")
    print(f"{np.mean(record != ABSENT):.0%} of all replies came in time")
    print(f"replayed {len(record)} exchanges, final x apart by {apart:.2g}")
    assert len(record) == rounds and apart < 1e-5  # one exchange a round


if __name__ == "__main__":
    rounds, pause = (*sys.argv[1:], *("200", "12")[len(sys.argv) - 1 :])
    main(int(rounds), float(pause))
