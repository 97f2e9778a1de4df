"""A federation leaves no process behind, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedbilevel.deployment import apps
from fedbilevel.deployment.processes import free_port
from tests.test_own_tasks import TASK

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
)
MARK = "FEDBILEVEL_TEST_MARK"
PATIENCE = 300  # seconds after which a process counts as hanging
# An orderly end takes as long as the step that is computed; a kill takes a moment.
ORDERLY, AT_ONCE = 30.0, 5.0


def marked(mark: str) -> list[str]:
    """List the processes that inherited a mark: numbers and command lines."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append(f"{place.name} {words.decode(errors='replace')}")
        except OSError:  # ended while we looked, or another user's
            continue
    return found


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()


@contextmanager
def started(*command: str):
    """Start a command with a mark; end what is left of it, by number."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env={**os.environ, MARK: mark, "XLA_FLAGS": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process, mark
    finally:
        process.kill()
        process.wait()
        for line in marked(mark):
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue


STARTER = """
import sys, time
from pathlib import Path
from fedbilevel.deployment.processes import Process
stubborn = "import signal, time; signal.signal(15, print); signal.signal(2, print)"
stubborn += "; print('here', flush=True); time.sleep(600)"
Process("one", [sys.executable, "-c", stubborn], Path(sys.argv[1])).start()
time.sleep(600)
"""


def test_what_a_killed_process_started_ends_with_it(tmp_path):
    with started(sys.executable, "-c", STARTER, str(tmp_path)) as (process, mark):
        log = tmp_path / "one.log"
        assert wait_until(lambda: log.exists() and bool(log.read_text()), PATIENCE)
        assert len(marked(mark)) == 2
        process.kill()
        process.wait()
        assert wait_until(lambda: not marked(mark), AT_ONCE), marked(mark)


def test_a_command_that_is_not_there_is_told(tmp_path):
    from fedbilevel.deployment.processes import Process

    process = Process("none", ["no-such-command"], tmp_path).start()
    assert wait_until(lambda: not process.alive, PATIENCE)
    told = "no-such-command cannot be started: No such file or directory.\n"
    assert process.log.read_text() == told
    assert process.log.stat().st_mode & 0o777 == 0o600


WAITING = "serve quadratic --clients 2 --rounds 5 --insecure --address".split()
RUNNING = "federate quadratic --clients 2 --rounds 100000 --nodes".split()


def began(folder: Path, task: list[str]) -> bool:
    """Say whether the server waits for nodes, or whether rounds are made."""
    if task is RUNNING:
        return (folder / apps.PROGRESS).exists()
    log = folder / apps.LOG
    return log.exists() and "waiting for clients 0, 1" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "number", "nodes"),
    [
        pytest.param(WAITING, signal.SIGTERM, "", marks=pytest.mark.exhaustive),
        (WAITING, signal.SIGKILL, ""),
        (RUNNING, signal.SIGTERM, "persistent"),
        pytest.param(
            RUNNING, signal.SIGINT, "persistent", marks=pytest.mark.exhaustive
        ),
        (RUNNING, signal.SIGKILL, "persistent"),
        (RUNNING, signal.SIGKILL, "stock"),
    ],
    ids=str,
)
def test_a_federation_leaves_no_process_behind(tmp_path, task, number, nodes):
    folder = tmp_path / "run"
    words = [*task, nodes or f"127.0.0.1:{free_port()}", "--out", str(folder)]
    with started(sys.executable, "-m", "fedbilevel.cli", *words) as (process, mark):
        assert wait_until(lambda: began(folder, task), PATIENCE), "it did not begin"
        assert len(marked(mark)) >= 5 - 2 * (task is WAITING)
        process.send_signal(number)
        process.wait(PATIENCE)
        seconds = AT_ONCE if number == signal.SIGKILL else ORDERLY
        # Flower's own processes look for their parents, and end in order.
        seconds = max(seconds, ORDERLY) if nodes == "stock" else seconds
        assert wait_until(lambda: not marked(mark), seconds), marked(mark)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_federation_that_is_only_starting_leaves_none_either(tmp_path, number):
    folder = tmp_path / "run"
    words = [*RUNNING, "persistent", "--out", str(folder)]
    with started(sys.executable, "-m", "fedbilevel.cli", *words) as (process, mark):
        # The run is with the SuperLink, and its server about to start.
        app = folder / "app" / "pyproject.toml"
        assert wait_until(app.exists, PATIENCE), "it did not begin"
        process.send_signal(number)
        process.wait(PATIENCE)
        assert wait_until(lambda: not marked(mark), ORDERLY), marked(mark)


# Like a compiler it is in C for a long time, where no handler of Python is called.
STUCK = """
import hashlib, inspect, os, sys
from pathlib import Path
import jax

@jax.custom_jvp
def same(loss):
    return loss

@same.defjvp
def derivative(loss, change):
    callers = " ".join(one.filename for one in inspect.stack(0))
    if "node" in sys.argv and os.environ["STUCK"] in callers:
        (Path(__file__).parent / "stuck").touch()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    return loss[0], change[0]

loss = lower

def lower(*given):
    return same(loss(*given))
"""


@pytest.fixture(params=["site_work.py", "job.py"])
def stuck(tmp_path, monkeypatch, request):
    """Write a task whose nodes are stuck in a program: a check, or an exchange."""
    monkeypatch.setenv("STUCK", request.param)
    (tmp_path / "task.py").write_text(TASK + STUCK)
    (tmp_path / "beside.py").write_text("SHIFT = 2.0\n")
    return [f"{tmp_path / 'task.py'}:make", "--clients", "2"]


@pytest.mark.slow
def test_ctrl_c_waits_for_no_compiler_of_a_federation(tmp_path, stuck):
    words = ["federate", *stuck, "--rounds", "5", "--out", str(tmp_path / "run")]
    with started(sys.executable, "-m", "fedbilevel.cli", *words) as (process, mark):
        assert wait_until((tmp_path / "stuck").exists, PATIENCE), "it did not begin"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert wait_until(lambda: not marked(mark), ORDERLY), marked(mark)


@pytest.mark.slow
def test_ctrl_c_waits_for_no_compiler_of_a_node_nor_a_server_for_nodes(tmp_path, stuck):
    address = f"127.0.0.1:{free_port()}"
    program = (sys.executable, "-m", "fedbilevel.cli")
    task = [*stuck, "--insecure"]
    serve = [*task, "--rounds", "5", "--address", address, "--out", str(tmp_path / "s")]
    node = [*task, "--trial", "--superlink", address, "--state"]
    with (
        started(*program, "serve", *serve) as (server, mark),
        started(*program, "node", *node, str(tmp_path / "0"), "--client", "0") as one,
        started(*program, "node", *node, str(tmp_path / "1"), "--client", "1"),
    ):
        assert wait_until((tmp_path / "stuck").exists, PATIENCE), "it did not begin"
        assert wait_until((tmp_path / "s" / apps.LOG).exists, PATIENCE)
        one[0].send_signal(signal.SIGINT)
        server.send_signal(signal.SIGINT)
        assert one[0].wait(PATIENCE) == server.wait(PATIENCE) == 130
        assert wait_until(lambda: not marked(mark), ORDERLY), marked(mark)
