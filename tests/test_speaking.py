"""A federation says who is missing and why, what was refused, and when it is over."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedbilevel.cli.node import sparing
from fedbilevel.deployment.apps import _Progress
from fedbilevel.deployment.processes import Process, free_port, read_json
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.federation import Identity, Roster, Terms
from fedbilevel.federation.signatures import make_key_pair
from fedbilevel.federation.wire import EVERYONE, NOTICE, Header, pack
from fedbilevel.runtime import execute
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.federation import FEDERATION, SETTINGS, Loopback, server_of, site_of
from tests.tampering import opened

PATIENCE = 120  # seconds after which a process counts as hanging


@pytest.fixture(scope="module")
def job():
    return quadratic_job(case_of("local-bsgm").algorithm, quadratic_data(clients=3))


# What a server tells


def roster_of(net: Loopback, told: list[str], **terms) -> Roster:
    identity = Identity(FEDERATION, SETTINGS, 1)
    waits = Terms(deadline=5.0, patience=0.3, **terms)
    return Roster(net, 3, identity, waits, told.append)


def test_a_server_names_who_is_missing(job):
    told: list[str] = []
    net = Loopback({10: site_of(job, 0), 12: site_of(job, 2)})
    roster = roster_of(net, told)
    with pytest.raises(FedbilevelError, match=r"clients \[1\] did not come"):
        roster.gather(0.3, enough=3)
    assert "client 0 is at node 10" in told and "client 2 is at node 12" in told
    assert told.count("waiting for client 1") == 1


def test_a_server_says_why_one_is_missing_and_tells_that_node(job):
    told: list[str] = []
    net = Loopback({10 + k: site_of(job, k) for k in range(3)})
    roster = roster_of(net, told, keys=("key10", "another", "key12"))
    why = "key: says it is client 1, by its key not"
    with pytest.raises(FedbilevelError, match=f"Not taken: node 11, {why}"):
        roster.gather(0.3, enough=3)
    ((node, packet),) = net.notices
    assert node == 11
    # What the node's operator reads.
    site = net.sites[11]
    shown: list[str] = []
    site.report = shown.append
    assert site.handle(packet) == b"" and not site.is_over
    assert shown == [f"the server does not take this node: {why}"]


def test_a_node_that_refused_the_server_is_told_nothing(job):
    net = Loopback({10: site_of(job, 0)})
    roster = roster_of(net, told := [])
    roster.identity = Identity(FEDERATION, "other settings", 1)
    roster.refresh()
    assert any("node 10 is not taken: settings" in line for line in told)
    assert net.notices == []


def test_every_exchange_is_told_with_who_took_part(job):
    def without_client_2(node, packet, net):
        lost = node == 12 and opened(packet)[0]["kind"] == "exchange"
        return None if lost else net.sites[node].handle(packet)

    sites = {10 + k: site_of(job, k) for k in range(3)}
    runtime = server_of(job, Loopback(sites, without_client_2))
    made: list[dict] = []
    runtime.made = made.append
    execute(runtime, 1)
    first = made[0]
    assert (first["exchange"], first["took_part"], first["asked"]) == (1, [0, 1], 3)
    assert first["seconds"] >= 0


# What a node heeds


def farewell(**fields) -> bytes:
    header = {"kind": NOTICE, "federation": FEDERATION, "settings": SETTINGS}
    header |= {"algorithm": "", "client": EVERYONE, "attempt": 1, "number": 99}
    return pack(Header(**{**header, "info": {"over": True}, **fields}))


@pytest.fixture
def heeding(job):
    """A site that said hello to a server, and what it says to its operator."""
    told: list[str] = []
    net = Loopback({10 + k: site_of(job, k, report=told.append) for k in range(3)})
    runtime = server_of(job, net)
    return net.sites[10], runtime.roster, net, told


def test_all_nodes_are_told_that_it_is_over(heeding):
    site, roster, net, told = heeding
    roster.farewell()
    assert sorted(node for node, _ in net.notices) == [10, 11, 12]
    assert site.handle(dict(net.notices)[10]) == b""
    assert site.is_over and told == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"federation": "another"}, "federation: it said no hello"),
        ({"number": 0}, "replayed: "),
        ({"attempt": 0}, "attempt: "),
    ],
)
def test_a_notice_of_others_or_of_old_ends_no_node(heeding, fields, reason):
    site, _, _, told = heeding
    site.handle(farewell(**fields))
    assert not site.is_over
    assert [line.startswith(f"notice refused: {reason}") for line in told] == [True]


def test_a_changed_notice_ends_no_node(heeding):
    site, _, _, told = heeding
    packet = bytearray(farewell())
    packet[-1] ^= 1
    site.handle(bytes(packet))
    assert not site.is_over and told[0].startswith("packet refused: damaged")
    site.handle(farewell(kind="other", info={"kind": NOTICE}))
    assert not site.is_over
    assert told[1] == "packet refused: garbage: kind 'other' is not known"


def test_a_notice_that_cannot_be_noted_ends_no_node(heeding, monkeypatch):
    site, _, _, told = heeding
    (held,) = site.checkpoints.values()
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(held, "save", lambda: (_ for _ in ()).throw(full))
    assert site.handle(farewell()) == b""
    assert not site.is_over and told[0].startswith("notice refused: internal")


def test_a_notice_comes_once(heeding):
    site, _, _, told = heeding
    packet = farewell(info={"over": False, "reason": "key", "detail": "wrong"})
    site.handle(packet)
    site.handle(packet)
    assert told[0] == "the server does not take this node: key: wrong"
    assert told[1].startswith("notice refused: replayed")


def test_what_a_node_refuses_is_said_once_a_minute():
    said, now = [], [0.0]
    report = sparing(said.append, lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 61.0, 62.0):
        report("packet refused: settings")
    report("packet refused: replayed")
    assert said == ["packet refused: settings"] * 2 + ["packet refused: replayed"]


# Nodes of a trial that end


def ended(process: Process) -> Process:
    assert process.running is not None
    process.running.wait(PATIENCE)
    return process


def script(folder: Path, text: str) -> Process:
    return ended(Process("node-0", [sys.executable, "-c", text], folder).start())


def test_a_mistake_of_the_user_ends_a_trial_with_the_sentence_of_the_node(tmp_path):
    told = "print('a line before'); print('Error: rows.csv has NaN in row 3.'); exit(2)"
    process = script(tmp_path, f"import sys; {told}")
    with pytest.raises(InvalidInputError) as error:
        process.revive()
    assert str(error.value) == "node-0 cannot take part: rows.csv has NaN in row 3."
    assert not process.alive


def test_a_mistake_that_a_node_wrote_down_ends_a_trial(tmp_path):
    error = tmp_path / "error.txt"
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = Process("node-1", command, tmp_path, error=error).start()
    try:
        assert not process.revive()
        error.write_text("there is no file rows.csv.")
        with pytest.raises(InvalidInputError, match="node-1 cannot .* no file rows"):
            process.revive()
    finally:
        process.kill()


def test_a_node_that_fails_every_time_is_not_started_for_ever(tmp_path):
    process = script(tmp_path, "print('it broke'); raise SystemExit(1)")
    starts = 1
    with pytest.raises(FedbilevelError, match="failed 4 times in a row(.|\n)*it broke"):
        while process.revive():
            starts += 1
            ended(process)
    assert starts == 4


def test_a_node_that_was_killed_is_started_again(tmp_path):
    process = script(tmp_path, "import os; os.kill(os.getpid(), 9)")
    for _ in range(8):
        assert process.revive()
        ended(process)


# Real processes


class Screen:
    """A command, and what it prints."""

    def __init__(self, *words: object) -> None:
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "fedbilevel.cli", *map(str, words)],
            env={**os.environ, "XLA_FLAGS": "", "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.text += line
                self._news.notify_all()

    def wait_for(self, pattern: str) -> str:
        def found():
            return re.search(pattern, self.text)

        with self._news:
            assert self._news.wait_for(found, PATIENCE), f"no {pattern}: {self.text}"
        return self.text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code


@pytest.fixture
def screens():
    """Start commands; they end with the test."""
    started: list[Screen] = []

    def start(*words: object) -> Screen:
        started.append(Screen(*words))
        return started[-1]

    yield start
    for screen in started:
        screen.close()


TABLE = "a,b,hospital,label\n" + "".join(
    f"{i % 7},{i % 5},{'AB'[i % 2]},{i % 3}\n" for i in range(60)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "more", "told"),
    [
        (None, "--clients 2", "there is no file or folder"),
        (TABLE.replace("3,4,", "nan,4,", 1), "--clients 2", "the number is missing"),
        (None, "--clients 2 --nodes stock", "there is no file or folder"),
        (
            TABLE,
            "--clients 3 --site hospital",
            "--clients 3: column 'hospital' of rows has 2 values, A, B, and each is",
        ),
    ],
    ids=["missing", "NaN", "missing, of Flower's nodes", "fewer sites than nodes"],
)
def test_a_data_error_ends_a_trial_at_once(tmp_path, screens, table, more, told):
    rows, out = tmp_path / "rows.csv", tmp_path / "run"
    if table is not None:
        rows.write_text(table)
    words = ("federate", "regularization", "--data", rows, "--out", out)
    screen = screens(*words, *more.split(), "--patience", 10 * PATIENCE)
    assert screen.end() == 2
    assert screen.text.count("Error: ") == 1
    # Before any node is started: rows are counted first.
    assert re.search(rf"Error: .*{told}", screen.text)
    assert "Traceback" not in screen.text
    # Corrected, the same command must not be told that its folder is in use.
    assert not out.exists()


@pytest.mark.slow
def test_a_served_federation_speaks_to_all(tmp_path, screens):
    for name in ("server", "0", "1", "wrong"):
        make_key_pair(tmp_path / name)
    address = f"127.0.0.1:{free_port()}"
    task = ("quadratic", "--clients", 2)
    public = [("--node-key", tmp_path / f"{k}.pub") for k in range(2)]
    server = screens(
        *("serve", *task, "--rounds", 3, "--insecure", "--address", address),
        *("--private-key", tmp_path / "server", *public[0], *public[1]),
        *("--out", tmp_path / "run"),
    )

    def node(client: int, key: str) -> Screen:
        return screens(
            *("node", *task, "--client", client, "--superlink", address, "--insecure"),
            *("--private-key", tmp_path / key, "--server-key", tmp_path / "server.pub"),
            *("--state", tmp_path / f"state-{key}", "--trial"),
        )

    first, wrong = node(0, "0"), node(1, "wrong")
    server.wait_for("client 0 is at node")
    server.wait_for("waiting for client 1")
    server.wait_for("node [0-9]+ is not taken: signature")
    wrong.wait_for("the server does not take this node: signature")
    second = node(1, "1")
    assert server.end() == 0, server.text
    assert "client 1 is at node" in server.text
    assert "Ended after all 3 rounds." in server.text
    for screen in (first, second):
        assert screen.end() == 0, screen.text
        assert "The federation is over." in screen.text
        # Once it was let in it lost nobody.
        assert "no server answers" not in screen.text.partition("\nnode ")[2]


def test_a_server_that_came_back_still_knows_the_round(tmp_path):
    path = tmp_path / "progress.json"
    _Progress(path).write(done=44, total=200)
    _Progress(path).write(exchange={"exchange": 45})
    assert read_json(path) == {"done": 44, "total": 200, "exchange": {"exchange": 45}}
