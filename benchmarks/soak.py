"""A long federation in which processes are killed at random; no round may be lost.

Every few seconds a node, the ServerApp or the SuperLink gets SIGKILL. In the end all
rounds are there, in order. Where that is defined the simulator repeats the run from its
record; noise is drawn from bits that nobody has, and there the ledgers are compared.

    python -m benchmarks.soak [plain|compressed|masked] [rounds] [seconds between kills]

`compressed` is over TLS with keys, replies quantized to 8 bits. `masked` is over TLS
with keys, with a secure mean under double masks, and noise.
"""

import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tests.gateway import make_certificates

from fedbilevel._files import read_arrays
from fedbilevel.deployment import apps, serving
from fedbilevel.deployment.processes import Process, free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import KEPT, SuperLink
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import ATTENDANCE, RELEASES, replay
from fedbilevel.federation import Terms
from fedbilevel.result import Result
from fedbilevel.runtime import configure
from fedbilevel.runtime.job import ABSENT

NODES = 4
CLIP, NOISE = 1.0, 4.0
CHANNELS = {
    "plain": {},
    "compressed": {"compress": "quantize:8"},
    "masked": {"clip": CLIP, "noise": NOISE, "aggregate": "secure"},
}
DEADLINES = {"plain": 5.0, "compressed": 10.0, "masked": 20.0}


class Killer:
    """Kills something now and then, and sees that no round is undone."""

    def __init__(self, folder: Path, crowd: list[Process], pause: float) -> None:
        self.folder, self.crowd, self.pause = folder, crowd, pause
        self.draw, self.next = random.Random(0), time.monotonic() + 3 * pause
        self.kills: Counter[str] = Counter()
        self.most, self.told = 0, [0] * NODES

    def __call__(self, done: int, total: int, newest: dict[str, float]) -> None:
        """Watch the run."""
        assert done >= self.most, f"round {self.most} was done, now it is {done}"
        self.most = done
        told = [ledger["exchanges"] for ledger in ledgers(self.folder)]
        forgot = [one < before for one, before in zip(told, self.told, strict=True)]
        assert not any(forgot), f"ledgers said {self.told}, now they say {told}"
        self.told = told
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
                if str(self.folder / KEPT) in words:
                    return int(process.name)
        return None


def ledgers(folder: Path) -> list[dict]:
    """Read what every site says that it told."""
    empty = {"exchanges": 0, "releases": []}
    every = [[*(folder / f"nodes/{k}").glob("*.ledger.json")] for k in range(NODES)]
    return [json.loads(one[0].read_text()) if one else empty for one in every]


def check_replay(folder: Path, rounds: int) -> None:
    """Compare with the simulator."""
    deployed, outcome, algorithm = replay(folder)
    point = algorithm.point(outcome.state.server)
    apart = float(np.abs(deployed.point["x"] - np.asarray(point.x)).max())
    print(f"replayed {rounds} exchanges, final x apart by {apart:.2g}")
    assert apart < 1e-5


def check_ledgers(folder: Path, record: np.ndarray, result: Result) -> None:
    """Compare what the sites told with what was asked, and epsilon with a formula."""
    asked = Counter(
        {(b, n): t for b, n, t in json.loads((folder / RELEASES).read_text())}
    )
    total = sum(asked.values())
    for client, ledger in enumerate(ledgers(folder)):
        took_part = int((record[:, client] != ABSENT).sum())
        told, released = (
            ledger["exchanges"],
            sum(one["times"] for one in ledger["releases"]),
        )
        print(
            f"site {client}: {took_part} replies taken, {told} told, {total} asked for"
        )
        assert took_part <= told == released <= total
    # A block of a sum with n of 4 shares of noise is a Gaussian release of sensitivity
    # 1 and deviation noise * sqrt(n / 4); their squares of 1/deviation add up.
    mu = math.sqrt(sum(t * b * NODES / n for (b, n), t in asked.items()) / NOISE**2)
    said, delta = result.counts["epsilon"], result.counts["delta"]
    print(
        f"epsilon {said:.4f} told; by its mu, {mu:.4f}, delta is {spent(said, mu):.3g}"
    )
    assert math.isclose(spent(said, mu), delta, rel_tol=1e-3)


def spent(epsilon: float, mu: float) -> float:
    """Return delta of a Gaussian mechanism (Dong, Roth, Su 2022, corollary 2.13)."""
    above, below = (
        0.5 * math.erfc((epsilon / mu - sign * mu / 2) / 2**0.5) for sign in (1, -1)
    )
    return above - math.exp(epsilon) * below


def main(kind: str, rounds: int, pause: float) -> None:
    experiment = Experiment(
        "quadratic",
        "local-bsgvrm",
        clients=NODES,
        rounds=rounds,
        local_steps=2,
        measure_every=rounds,
        options={"noise": "0", "spread": "0.5", "q": "3"},
        **CHANNELS[kind],
    )
    configure()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        experiment.save(folder)
        secure = None if kind == "plain" else make_certificates(Path(name) / "tls")
        link = SuperLink(f"127.0.0.1:{free_port()}", folder, secure)
        keys = serving.make_keys(folder, NODES)
        crowd = [
            serving.persistent_node(experiment, k, folder, link) for k in range(NODES)
        ]
        killer, began = Killer(folder, crowd, pause), time.monotonic()
        terms = Terms(deadline=DEADLINES[kind], patience=120.0)
        served = apps.Served(experiment, folder, terms, keys)
        result = serve_over_flower(served, link, watch=killer, crowd=crowd)
        took = time.monotonic() - began
        record = read_arrays(folder / ATTENDANCE)["attendance"]
        print(f"{kind}: {rounds} rounds in {took:.0f} s, killed {dict(killer.kills)}")
        print(f"{np.mean(record != ABSENT):.0%} of all replies came in time")
        assert len(record) == rounds  # one exchange a round
        if kind == "masked":
            check_ledgers(folder, record, result)
        else:
            check_replay(folder, rounds)


if __name__ == "__main__":
    kind, rounds, pause = (*sys.argv[1:], *("plain", "200", "12")[len(sys.argv) - 1 :])
    main(kind, int(rounds), float(pause))
