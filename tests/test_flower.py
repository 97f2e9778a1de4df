"""Federations of real processes: everything dies once, and masks change no answer.

One run meets all faults in turn, since starting processes is most of what it costs. A
fault begins after a round, and the tests look at what the run left behind.
"""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbilevel._files import read_arrays
from fedbilevel.deployment import apps, serving
from fedbilevel.deployment.processes import Process, free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import counted_here, sized_here
from fedbilevel.experiments.federated import ATTENDANCE, replay
from fedbilevel.federation import Terms
from tests.federation import masked_patients

pytestmark = pytest.mark.slow
LONGEST = 500  # seconds for all faults together
EXPERIMENT = Experiment(
    "quadratic",
    "local-bsgvrm",
    clients=3,
    rounds=20,
    measure_every=6,
    local_steps=2,
    precision="float64",
    options={"noise": "0", "spread": "0.5", "q": "3"},
    safeguard=False,  # so that an exchange is a round
)


def processes() -> list[str]:
    """List what runs on this machine: numbers and command lines."""
    lines = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:  # ended while we looked
            continue
        lines.append(f"{place.parent.name} {words}")
    return lines


class Faults:
    """What goes wrong after which round; called while the run is watched."""

    def __init__(self, folder: Path, crowd: list[Process]) -> None:
        self.folder, self.crowd = folder, crowd
        self.end = time.monotonic() + LONGEST
        self.begun: dict[str, int] = {}
        self.stopped_until = 0.0
        self.plan = {
            0: self.superlink_killed_before_the_server_came,
            2: self.node_killed,
            6: self.server_killed,
            9: self.node_slow,
            12: self.state_from_another_round,
            15: self.superlink_killed,
            17: self.node_gone,
        }

    def __call__(self, done: int, total: int, newest: dict) -> None:
        assert time.monotonic() < self.end, "the run did not finish"
        if not self.has_begun():
            return  # the SuperLink is starting, and knows no run yet
        if self.stopped_until and time.monotonic() > self.stopped_until:
            self.stopped_until = 0.0
            self.signal(2, signal.SIGCONT)
        for after in sorted(self.plan):
            if done >= after:
                fault = self.plan.pop(after)
                self.begun[fault.__name__] = done
                fault()

    def has_begun(self) -> bool:
        """Say whether the server's process was started once."""
        mine = [line for line in processes() if str(self.folder) in line]
        return 0 not in self.plan or any("deployment.apps " in one for one in mine)

    def signal(self, client: int, number: int) -> None:
        running = self.crowd[client].running
        assert running is not None
        running.send_signal(number)
        if number == signal.SIGKILL:
            running.wait()

    def node_killed(self) -> None:
        self.old_state = self.state_file().read_bytes()
        self.signal(0, signal.SIGKILL)

    def state_file(self) -> Path:
        (file,) = (self.folder / "nodes" / "1").glob("*.npz")
        return file

    def server_killed(self) -> None:
        os.kill(int((self.folder / apps.PROCESS).read_text()), signal.SIGKILL)

    def node_slow(self) -> None:
        self.signal(2, signal.SIGSTOP)
        self.stopped_until = time.monotonic() + 9

    def state_from_another_round(self) -> None:
        self.signal(1, signal.SIGKILL)
        self.state_file().write_bytes(self.old_state)

    def superlink_killed(self) -> None:
        for line in processes():
            if "guarded_superlink" in line and str(self.folder) in line:
                os.kill(int(line.split()[0]), signal.SIGKILL)

    def superlink_killed_before_the_server_came(self) -> None:
        assert not (self.folder / apps.PROCESS).exists()
        self.superlink_killed()

    def node_gone(self) -> None:
        self.signal(0, signal.SIGKILL)
        self.crowd[0].revive = lambda: False


def stop_at_once(done: int, total: int, newest: dict) -> None:
    """Ask the run to stop when it has begun, as Ctrl-C does."""
    if done:
        raise KeyboardInterrupt


def federation(folder):
    """Stop a federation, serve it again, and let everything die in it."""
    EXPERIMENT.save(folder)
    strange = folder / "nodes" / "0" / "another.npz"
    strange.parent.mkdir(parents=True)
    strange.write_bytes(b"the state of another experiment")
    link = SuperLink(f"127.0.0.1:{free_port()}", folder, certificates=None)
    keys = serving.make_keys(folder, 3)
    crowd = [serving.persistent_node(EXPERIMENT, k, folder, link) for k in range(3)]
    terms = Terms(deadline=6.0, patience=100.0)
    served = apps.Served(EXPERIMENT, folder, terms, keys)
    with pytest.raises(KeyboardInterrupt, match="After round"):
        serve_over_flower(served, link, watch=stop_at_once, crowd=crowd)
    left = [line for line in processes() if str(folder) in line]
    faults = Faults(folder, crowd)
    result = serve_over_flower(served, link, watch=faults, crowd=crowd)
    return faults, result, left


def it_finishes_and_replays(folder, faults, result):
    assert not faults.plan
    assert result.columns["round"].tolist() == [6, 12, 18, 20]
    deployed, outcome, algorithm = replay(folder)
    point = algorithm.point(outcome.state.server)
    np.testing.assert_allclose(deployed.point["x"], point.x, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(deployed.point["y"], point.y, rtol=1e-10, atol=1e-10)


def the_record_says_who_took_part(folder, faults):
    came = read_arrays(folder / ATTENDANCE)["attendance"]
    assert came.shape == (20, 3)
    begun = faults.begun
    # A node that was killed is back, with its memory.
    killed = came[begun["node_killed"] : begun["server_killed"], 0]
    assert set(killed) <= {0, 1}
    # A server that was killed costs no round and nobody's memory.
    assert (came[begun["server_killed"] + 1 : begun["node_slow"], 1:] == 1).all()
    # A slow node misses its deadline, and is back in time later.
    slow = came[begun["node_slow"] :, 2]
    assert (slow == 0).any() and slow[-1] == 1
    # State of another round is not used: this client alone begins anew.
    after = begun["state_from_another_round"]
    assert (came[after:, 1] == 2).sum() == 1 and (came != 2)[:, [0, 2]].all()
    # Who never comes back is missed to the end, by nobody else.
    gone = begun["node_gone"]
    assert (came[gone + 2 :, 0] == 0).all() and (came[gone + 2 :, 1:] > 0).all()


def stopping_leaves_a_checkpoint_and_no_process(folder, result, left):
    assert not left
    assert json.loads((folder / "federation.json").read_text())["attempt"] >= 2
    assert not any(str(folder) in line for line in processes())
    # State of another experiment is neither used nor lost.
    strange = folder / "nodes" / "0" / "another.npz"
    assert strange.read_bytes() == b"the state of another experiment"
    assert result.config["runtime"] == "flower"


def test_a_federation_outlives_all_its_processes(tmp_path):
    faults, result, left = federation(tmp_path)
    stopping_leaves_a_checkpoint_and_no_process(tmp_path, result, left)
    the_record_says_who_took_part(tmp_path, faults)
    it_finishes_and_replays(tmp_path, faults, result)


def test_masked_sites_of_their_own_processes_find_the_simulated_answer(tmp_path):
    masked = masked_patients(tmp_path)
    asked, _ = counted_here(sized_here(masked))
    assert asked.clients == 3
    folder = tmp_path / "deployed"
    folder.mkdir()
    asked.save(folder)
    served = apps.Served(asked, folder, Terms(deadline=60.0, patience=100.0))
    deployed = serving.federate(served, nodes="persistent", watch=lambda *_: None)
    simulated = replace(masked, aggregate="mean").run()
    assert 0 < deployed.columns["round"][-1] <= 60
    assert list(deployed.point) == list(simulated.point)
    for name, expected in simulated.point.items():
        np.testing.assert_allclose(deployed.point[name], expected, rtol=0, atol=1e-6)
    assert "held-out rows of 3 sites" in deployed.quality["sentence"]
