"""What clients keep may be on a disk: the same numbers, and less in memory."""

import errno
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.algorithms import every_phase
from fedbilevel.errors import CheckpointError, InvalidInputError, sentence_of
from fedbilevel.experiments import Experiment
from fedbilevel.runtime import (
    Checkpoints,
    DiskSimulatorRuntime,
    Job,
    SimulatorRuntime,
    client_files,
    execute,
    keys,
)
from fedbilevel.runtime.client_files import ClientFiles, RowFile
from fedbilevel.runtime.disk_simulator import _most_asked
from tests.cases import (
    asks_everyone,
    case_of,
    data_for,
    keeps_something,
    of_structures,
    quadratic_job,
)

pytestmark = pytest.mark.two_devices
CLIENTS, COHORT = 7, 2


def job_for(case, participants: int | None = COHORT) -> Job:
    data = data_for(case, CLIENTS)
    return quadratic_job(case.algorithm, data, participants=participants)


def assert_same(here, there):
    assert jax.tree.structure(here) == jax.tree.structure(there)
    for left, right in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@of_structures(
    lambda case: keeps_something(case) and not asks_everyone(case) and not case.chains
)
def test_states_on_a_disk_change_no_number(case, tmp_path):
    job = job_for(case)
    plain = execute(SimulatorRuntime(job), 4)
    stored = execute(DiskSimulatorRuntime(job, tmp_path / "states"), 4)
    assert_same(plain.state, stored.state)
    assert_same(plain.columns, stored.columns)
    # Whatever way a process ends, nothing is left.
    assert list((tmp_path / "states").iterdir()) == []


@pytest.mark.slow
def test_a_round_holds_those_that_are_asked_in_it(tmp_path, monkeypatch):
    case = case_of("local-bsgvrm")
    job, read, written = job_for(case), [], []
    plain_read, plain_write = ClientFiles.read, ClientFiles.write

    def reading(files, clients):
        read.append(list(clients))
        return plain_read(files, clients)

    def writing(files, clients, kept):
        written.append(sorted(clients))
        plain_write(files, clients, kept)

    monkeypatch.setattr(ClientFiles, "read", reading)
    monkeypatch.setattr(ClientFiles, "write", writing)
    execute(DiskSimulatorRuntime(job, tmp_path), 3)
    assert case.algorithm.setup() and len(every_phase(case.algorithm.phases())) == 1
    cohorts = [(keys.SETUP, 0, 0), *((keys.ROUNDS, 0, turn) for turn in range(3))]
    asked = [
        sorted(keys.draw_cohort(job.key, *one, CLIENTS, COHORT).tolist())
        for one in cohorts
    ]
    assert [sorted(one) for one in read] == written == asked


def test_nests_ask_more_clients_than_a_cohort_has():
    case = case_of("fednest")
    job = job_for(case)
    exchanges = len(every_phase(case.algorithm.phases()))
    assert exchanges > 1
    assert _most_asked(job, case.algorithm.phases()) >= min(CLIENTS, exchanges * COHORT)


@pytest.mark.slow
@pytest.mark.parametrize("first", [SimulatorRuntime, DiskSimulatorRuntime])
def test_either_goes_on_with_the_checkpoint_of_the_other(first, tmp_path):
    job = job_for(case_of("local-bsgvrm"))
    whole = execute(SimulatorRuntime(job), 4)
    keep = Checkpoints(tmp_path / "run", every_rounds=1)

    def made(kind: Any) -> Any:
        return kind(job, tmp_path) if kind is DiskSimulatorRuntime else kind(job)

    execute(made(first), 2, checkpoints=keep)
    execute(made(DiskSimulatorRuntime), 3, checkpoints=keep)
    resumed = execute(made(SimulatorRuntime), 4, checkpoints=keep)
    assert_same(whole.state, resumed.state)
    assert_same(whole.columns, resumed.columns)


def test_rows_come_back_as_they_were_written(tmp_path):
    """Zeros and others, of any type and shape, also of none."""
    first = {
        "half": jnp.asarray([[1.5, -2.0]], jnp.bfloat16),
        "count": jnp.asarray(3, jnp.int32),
        "zeros": jnp.zeros(4),
        "nothing": jnp.zeros((0, 2)),
    }
    files = ClientFiles(tmp_path, jax.tree.map(np.asarray, first), 5)
    for name, leaf in files.whole().items():
        assert leaf.dtype == first[name].dtype
        expected = np.broadcast_to(np.asarray(first[name]), (5, *first[name].shape))
        np.testing.assert_array_equal(leaf, expected)
    some = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf) + 1] * 3), first)
    files.write([4, 0], some)
    back = files.read(np.asarray([0, 4, 1]))
    assert np.asarray(back["count"]).tolist() == [4, 4, 3]
    assert back["half"].astype(float).tolist() == [
        [[2.5, -1]],
        [[2.5, -1]],
        [[1.5, -2]],
    ]
    assert files.whole()["zeros"].sum(axis=1).tolist() == [4, 0, 0, 0, 4]
    assert back["nothing"].shape == (3, 0, 2)


@pytest.fixture
def hasty():
    """Let threads take turns after every few instructions."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("hasty")
def test_rows_are_read_by_two_devices_at_the_same_time(tmp_path):
    """A file has one position: who seeks must read before another one seeks."""
    rows = np.arange(64.0)[:, None] * np.ones(8)
    file = RowFile(tmp_path, len(rows), rows[0])
    file.fill(rows)
    halves = [np.arange(32), np.arange(32, 64)] * 200
    with ThreadPoolExecutor(4) as pool:
        for asked, found in zip(
            halves, pool.map(file.__getitem__, halves), strict=True
        ):
            np.testing.assert_array_equal(found, rows[asked])


@pytest.mark.parametrize(
    ("name", "participants", "told"),
    [
        ("fedbio", COHORT, "keep nothing between exchanges"),
        ("local-bsgvrm", None, "take part in every exchange, so that the states"),
        ("fedcomgate", COHORT, "take part in '.*', so that the states of all"),
    ],
)
def test_states_on_a_disk_where_they_are_of_no_use_are_refused(
    name, participants, told, tmp_path
):
    job = job_for(case_of(name), participants)
    with pytest.raises(InvalidInputError, match=told):
        DiskSimulatorRuntime(job, tmp_path / "states")
    assert not (tmp_path / "states").exists()


def test_a_disk_that_is_too_small_is_told_before_the_first_round(tmp_path, monkeypatch):
    job = job_for(case_of("local-bsgvrm"))
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(client_files.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(InvalidInputError, match="bytes, and 10 are free on its disk"):
        DiskSimulatorRuntime(job, tmp_path).start()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_disk_that_fills_up_is_told_by_its_folder(tmp_path):
    file = RowFile(tmp_path, 3, np.zeros(2))
    file._file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=str(tmp_path)) as error:
        file.write([1], np.ones((1, 2)))
    file.close()
    assert error.value.errno == errno.ENOSPC
    assert "the disk is full" in sentence_of(error.value)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    job = job_for(case_of("local-bsgvrm"))
    with pytest.raises(OSError, match="file") as error:
        DiskSimulatorRuntime(job, tmp_path / "file" / "states").start()
    assert "a file is where a folder is needed" in sentence_of(error.value)


@pytest.mark.slow
def test_an_experiment_takes_the_folder_and_may_go_on_without(tmp_path):
    plain = Experiment(
        "quadratic", "local-bsgvrm", clients=5, participants=2, rounds=4, local_steps=1
    )
    states = str(tmp_path / "states")
    some = Experiment(**{**vars(plain), "rounds": 2, "client_states": states})
    some.run(tmp_path / "run")
    assert Experiment.load(tmp_path / "run").client_states == states
    more = plain.run(tmp_path / "run", resume=True)
    whole = plain.run()
    # Programs of a round and of many differ by a unit in the last place here.
    for name, leaf in whole.point.items():
        np.testing.assert_allclose(more.point[name], leaf, rtol=1e-14)
    np.testing.assert_allclose(
        more.columns["upper_loss"], whole.columns["upper_loss"], rtol=1e-14
    )
    with pytest.raises(InvalidInputError, match="Leave out --client-states"):
        Experiment("quadratic", runtime="reference", client_states=states).check()


def test_a_command_tells_a_wrong_folder_at_once(tmp_path):
    from fedbilevel.cli import checks

    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file is where a folder is needed"):
        checks.client_states({"client_states": str(tmp_path / "file" / "states")})
    checks.client_states({"client_states": None})
