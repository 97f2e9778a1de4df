"""Several processes compute what one computes, or say what keeps them from it."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.errors import InvalidInputError, OtherProcessError
from fedbilevel.result import Result
from fedbilevel.runtime import (
    SimulatorRuntime,
    Stopping,
    driver,
    execute,
    join,
    mesh,
)
from fedbilevel.runtime.rendezvous import meet
from tests.mesh_worker import ROUNDS, jobs, leaves_of

pytestmark = [pytest.mark.slow, pytest.mark.two_devices]
ROOT = Path(__file__).parent.parent
PATIENCE = 300  # seconds after which a process counts as hanging
SHORT = 0.5  # seconds to wait for what does not come


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Let two processes compute together; return their folder and what they printed."""
    folder = tmp_path_factory.mktemp("mesh")
    command = [sys.executable, "-m", "tests.mesh_worker", f"127.0.0.1:{free_port()}"]
    started = [
        subprocess.Popen(
            [*command, "2", number, str(folder)],
            cwd=ROOT,
            env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    try:
        said = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [one.returncode for one in started] == [0, 0], [err for _, err in said]
    arrays = [dict(np.load(folder / f"process-{number}.npz")) for number in (0, 1)]
    printed = [output.splitlines() for output, _ in said]
    return SimpleNamespace(folder=folder, arrays=arrays, printed=printed)


def test_two_processes_compute_what_one_does(pair):
    for title, job in jobs().items():
        alone = leaves_of(title, execute(SimulatorRuntime(job), ROUNDS))
        for found in pair.arrays:
            for name, leaf in alone.items():
                assert found[name].shape == leaf.shape
                np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-5)


def test_one_process_stops_all_and_they_resume(pair):
    for found in pair.arrays:
        resumed = [name for name in found if name.startswith("resumed")]
        assert resumed
        for name in resumed:
            whole = found[name.replace("resumed", "private blocks")]
            np.testing.assert_array_equal(found[name], whole)


def test_process_0_alone_prints_and_saves(pair):
    shown = json.loads(pair.printed[0][0])
    assert not any(line.startswith("{") for line in pair.printed[1])
    saved = Result.load(pair.folder / "command")
    assert saved.summary() == shown
    assert saved.columns["round"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost", 2, 0), "write HOST:PORT"),
        ((":29400", 2, 0), "write HOST:PORT"),
        (("localhost:99999", 2, 0), "from 1 to 65535"),
        (("localhost:port", 2, 0), "write HOST:PORT"),
        (("localhost:29400", 2, 2), "process 2 of 2"),
        (("localhost:29400", 0, 0), "process 0 of 0"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        join(*arguments)


def test_joining_comes_before_computing(monkeypatch):
    monkeypatch.setattr(mesh, "meet", lambda *_: None)
    assert jax.device_count() > 0
    with pytest.raises(InvalidInputError, match="before anything is computed"):
        join("localhost:29400", 2, 1)


def test_one_process_needs_no_other():
    join("localhost:29400", 1, 0)
    assert mesh.is_first()
    assert mesh.decided_by_first(3, 4) == [3, 4]
    assert mesh.any_process(True) and not mesh.any_process(False)


def roll(*calls: tuple[int, int], patience: float = PATIENCE) -> list[str | None]:
    """Call the roll in threads, each (processes, process); return what they raised."""
    port = free_port()
    raised: list[str | None] = [None for _ in calls]

    def call(number: int) -> None:
        try:
            meet("127.0.0.1", port, *calls[number], patience)
        except InvalidInputError as error:
            raised[number] = str(error)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return raised


def test_all_present():
    assert roll((3, 0), (3, 1), (3, 2)) == [None, None, None]


def test_a_missing_process_is_named_to_all():
    for error in roll((3, 0), (3, 1), patience=SHORT):
        assert "did not come in time: 2" in str(error)


def test_two_processes_of_one_number():
    errors = roll((3, 0), (3, 1), (3, 1))
    assert all("process 1: two processes" in str(error) for error in errors)


def test_processes_that_count_differently():
    errors = roll((2, 0), (4, 1))
    assert all("counts 4 processes, process 0 counts 2" in str(e) for e in errors)


def test_a_coordinator_that_does_not_answer():
    (error,) = roll((2, 1), patience=SHORT)
    assert "does not answer" in str(error)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(InvalidInputError, match="refused"):
            meet("127.0.0.1", port, 2, 1, SHORT)
        with pytest.raises(InvalidInputError, match=f"cannot listen on port {port}"):
            meet("127.0.0.1", port, 2, 0, SHORT)
    with pytest.raises(InvalidInputError, match="no such host"):
        meet("no..host", port, 2, 1, SHORT)


@pytest.fixture
def among_three(monkeypatch):
    """Pretend to be process 0 of three; return where to put what the others say."""
    others = SimpleNamespace(say=lambda mine: [mine, mine])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(
        mesh, "_gather", lambda mine: np.stack([mine, *others.say(mine)])
    )
    return others


def fail():
    raise InvalidInputError("the disk is full.")


def test_what_fails_in_one_process_stops_all(among_three):
    assert mesh.on_all(lambda: 5) == 5
    with pytest.raises(InvalidInputError, match="disk is full"):
        mesh.on_first(fail)
    among_three.say = lambda mine: [mine, np.asarray(True)]
    with pytest.raises(OtherProcessError, match="process 2 failed"):
        mesh.on_first(lambda: None)


def test_processes_with_different_runs_are_told(among_three):
    mesh.require_same(lambda: "one", "run")
    among_three.say = lambda mine: [mine + 1, mine]
    with pytest.raises(InvalidInputError, match="process 1 has another run"):
        mesh.require_same(lambda: "one", "run")


def test_runs_that_would_end_apart_are_different_runs(monkeypatch):
    # Else one process would wait for another that has stopped.
    told = []
    monkeypatch.setattr(mesh, "require_same", lambda say, what: told.append(say()))
    runtime = SimulatorRuntime(next(iter(jobs().values())))
    plain, early, short = Stopping(), Stopping(target=0.1), Stopping(bytes=9)
    for rounds, stopping in ((4, plain), (5, plain), (4, early), (4, short)):
        driver._require_same_run(runtime, rounds, 1, stopping, None)
    assert len(set(told)) == len(told) == 4


def test_the_command_line_wants_all_three_options():
    arguments = "run two-client --coordinator localhost:29400 --processes 2".split()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "belong together" in done.stderr
