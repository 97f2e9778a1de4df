"""A long federation in which processes are killed at random; no round may be lost.

Every few seconds a node, the ServerApp or the SuperLink gets SIGKILL. In the end all
rounds are there, in order. Where that is defined the simulator repeats the run from its
record; noise is drawn from bits that nobody has, and there the ledgers are compared.

    python -m benchmarks.soak [plain|compressed|masked] [rounds] [seconds between kills]

`compressed` is over TLS with keys, replies quantized to 8 bits. `masked` is over TLS
with keys, with a secure mean under double masks, and noise: two federations one after
the other, of half of the rounds each and with different noise, at sites that keep their
state. Their ledgers have to say what both together reveal.
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
from typing import Any

import numpy as np
from tests.gateway import make_certificates

from fedbilevel._files import read_arrays
from fedbilevel.channels.accountant import epsilon_of_events
from fedbilevel.deployment import apps, serving
from fedbilevel.deployment.processes import Process, free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import KEPT, SuperLink
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import ATTENDANCE, RELEASES, replay
from fedbilevel.federation import Terms
from fedbilevel.federation.own_rows import Spent
from fedbilevel.result import Result
from fedbilevel.runtime import configure
from fedbilevel.runtime.job import ABSENT
from fedbilevel.runtime.privacy import epsilon_of

NODES, FEWEST = 4, 2  # sites, and those in the least sum that they take part in
MASKED = {"clip": 1.0, "aggregate": "secure", "force": True}
# What each federation of a kind has of its own.
CHANNELS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "compressed": [{"compress": "quantize:8"}],
    "masked": [{**MASKED, "noise": 4.0}, {**MASKED, "noise": 6.0}],
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
        told = [ledger.exchanges for ledger in ledgers(self.folder)]
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


def ledgers(folder: Path) -> list[Spent]:
    """Read what every site says that it told."""
    every = [[*(folder / f"nodes/{k}").glob("*.ledger.json")] for k in range(NODES)]
    return [Spent.read(one[0]) if one else Spent() for one in every]


def check_replay(folder: Path, rounds: int) -> None:
    """Compare with the simulator."""
    deployed, outcome, algorithm = replay(folder)
    point = algorithm.point(outcome.state.server)
    apart = float(np.abs(deployed.point["x"] - np.asarray(point.x)).max())
    print(f"replayed {rounds} exchanges, final x apart by {apart:.2g}")
    assert apart < 1e-5


def check_ledgers(
    noise: float, before: list[Spent], folder: Path, result: Result
) -> list[tuple[float, int]]:
    """Compare what the sites told with what was asked, and epsilon with a formula.

    Return the noise multiplier of each site's releases, and how many there were.
    """
    record = read_arrays(folder / ATTENDANCE)["attendance"]
    asked = json.loads((folder / RELEASES).read_text())
    total = sum(times for *_, times in asked)
    ((blocks, *_),) = {(blocks,) for blocks, *_ in asked}
    # A block of a sum with n of 4 shares of noise is a Gaussian release of sensitivity
    # 1 and deviation noise * sqrt(n / 4). A site takes part in sums of two.
    deviation = {n: noise * math.sqrt(n / NODES / blocks) for _, n, _ in asked}
    events, least = [], noise * math.sqrt(FEWEST / NODES / blocks)
    for client, (old, new) in enumerate(zip(before, ledgers(folder), strict=True)):
        took_part = int((record[:, client] != ABSENT).sum())
        told, more = new.exchanges - old.exchanges, new.releases - old.releases
        print(
            f"site {client}: {took_part} replies taken, {told} told, {total} asked for"
        )
        assert took_part <= told == more.total() <= total
        # What was told before stays as it was, and what is new has the noise of now.
        assert old.releases <= new.releases
        assert {one.noise for one in more} == {noise}
        events.append((least, told))
    said, delta = result.counts["epsilon"], result.counts["delta"]
    check_epsilon(said, [(deviation[n], t) for _, n, t in asked], delta)
    return events


def check_composition(folder: Path, told: list[list[tuple[float, int]]]) -> None:
    """Compare epsilon of every ledger with that of all federations together."""
    for client, ledger in enumerate(ledgers(folder)):
        (delta,) = {one.delta for one in ledger.releases}
        found = epsilon_of(ledger.releases, delta)
        events = [each[client] for each in told]
        together = epsilon_of_events(events, delta)
        print(f"site {client}: by its ledger {found:.6f}, composed {together:.6f}")
        assert math.isclose(found, together, rel_tol=1e-9)
        check_epsilon(found, events, delta)


def check_epsilon(said: float, events: list[tuple[float, int]], delta: float) -> None:
    """Compare an epsilon with a formula: squares of 1/deviation add up."""
    mu = math.sqrt(sum(times / one**2 for one, times in events))
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


def soak(experiment: Experiment, folder: Path, kind: str, pause: float) -> Result:
    """Run one federation, at sites that have their state beside its folder."""
    folder.mkdir()
    (folder.parent / "nodes").mkdir(exist_ok=True)
    (folder / "nodes").symlink_to(folder.parent / "nodes")
    experiment.save(folder)
    secure = None if kind == "plain" else make_certificates(folder / "tls")
    link = SuperLink(f"127.0.0.1:{free_port()}", folder, secure)
    keys = serving.make_keys(folder, NODES)
    crowd = [serving.persistent_node(experiment, k, folder, link) for k in range(NODES)]
    killer, began = Killer(folder, crowd, pause), time.monotonic()
    terms = Terms(deadline=DEADLINES[kind], patience=120.0)
    served = apps.Served(experiment, folder, terms, keys)
    result = serve_over_flower(served, link, watch=killer, crowd=crowd)
    took = time.monotonic() - began
    record = read_arrays(folder / ATTENDANCE)["attendance"]
    rounds = experiment.rounds
    print(f"{kind}: {rounds} rounds in {took:.0f} s, killed {dict(killer.kills)}")
    print(f"{np.mean(record != ABSENT):.0%} of all replies came in time")
    assert len(record) == rounds  # one exchange a round
    return result


def main(kind: str, rounds: int, pause: float) -> None:
    configure()
    told, rounds = [], rounds // len(CHANNELS[kind])
    with tempfile.TemporaryDirectory() as name:
        for channel in CHANNELS[kind]:
            experiment = Experiment(
                "quadratic",
                "local-bsgvrm",
                clients=NODES,
                rounds=rounds,
                local_steps=2,
                measure_every=rounds,
                options={"noise": "0", "spread": "0.5", "q": "3"},
                **channel,
            )
            folder, before = Path(name) / f"run{len(told)}", ledgers(Path(name))
            result = soak(experiment, folder, kind, pause)
            if kind == "masked":
                told.append(check_ledgers(channel["noise"], before, folder, result))
            else:
                check_replay(folder, rounds)
        if told:
            check_composition(Path(name), told)


if __name__ == "__main__":
    kind, rounds, pause = (*sys.argv[1:], *("plain", "200", "12")[len(sys.argv) - 1 :])
    main(kind, int(rounds), float(pause))
