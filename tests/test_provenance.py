"""A folder belongs to the experiment that was begun in it; a finished run extends."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel._files import read_arrays
from fedbilevel._folders import TRIAL_KEYS, check_file, check_place, open_folder
from fedbilevel.cli.app import app
from fedbilevel.errors import CheckpointError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.run_folder import require_served_again

# A decaying schedule, a drawn cohort and a measurement that misses the last round: what
# an extension could get wrong.
RUN = "run quadratic --algorithm local-bsgvrm --clients 3 --participants 2 --seed 5"
RUN += " --local-steps 1 --set q=2"
RUN += " --precision float64 --measure-every 4 --set eta=decay:1:8 --json"


def invoke(*words: object):
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})


def contents(folder: Path) -> dict[str, bytes]:
    found = folder.rglob("*")
    return {str(one): one.read_bytes() for one in found if one.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    done = invoke(*RUN.split(), "--rounds", 6, "--out", folder)
    assert done.exit_code == 0, done.stderr
    return folder


def copied(folder: Path, place: Path) -> Path:
    place.mkdir()
    for one in folder.iterdir():
        (place / one.name).write_bytes(one.read_bytes())
    return place


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@pytest.mark.slow
def test_a_longer_run_extends_a_finished_one_bit_for_bit(finished, tmp_path):
    whole, longer = tmp_path / "whole", copied(finished, tmp_path / "longer")
    assert read_arrays(longer / "columns.npz")["round"].tolist() == [4, 6]
    straight = invoke(*RUN.split(), "--rounds", 15, "--out", whole)
    extended = invoke(*RUN.split(), "--rounds", 15, "--out", longer)
    assert (straight.exit_code, extended.exit_code) == (0, 0), extended.stderr
    for name in ("columns.npz", "point.npz"):
        assert same(read_arrays(whole / name), read_arrays(longer / name)), name
    # Round 6 was measured as the last one; a run of 15 rounds has no such row.
    assert read_arrays(longer / "columns.npz")["round"].tolist() == [4, 8, 12, 15]
    first, second = json.loads(straight.stdout), json.loads(extended.stdout)
    del first["seconds"], second["seconds"]
    assert first == second
    assert Experiment.load(longer).rounds == 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--rounds 9 --seed 6", "seed is 5 there and 6 here"),
        ("--rounds 9 --algorithm fedbio", "algorithm is local-bsgvrm there"),
        ("--rounds 9 --set q=3", "q is 2 there and 3 here"),
        ("--rounds 9 --set theta=0.1", "theta is left out there and 0.1 here"),
        ("--rounds 9 --participants 3", "participants is 2 there and 3 here"),
        ("--rounds 6", "finished after 6 rounds. Ask for more than 6 --rounds"),
        ("--rounds 2", "finished after 6 rounds. Ask for more than 6 --rounds"),
    ],
)
def test_another_experiment_is_refused_with_what_differs(finished, more, told):
    before = contents(finished)
    done = invoke(*RUN.split(), *more.split(), "--out", finished)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in done.stderr
    assert contents(finished) == before


TRIAL = "federate quadratic --clients 2".split()
SERVE = "serve quadratic --insecure --address 127.0.0.1:9 --clients"
INTO_A_RUN = {
    f"{SERVE} 3 --out {{0}}": "holds a finished run",
    "federate quadratic --clients 2 --out {0}": "exists and is not empty",
    "compare quadratic --algorithms fedbio --out {0}": "exists and is not empty",
    "compare quadratic --algorithms fedbio --out {0} --resume": "no comparison began",
    "speedup quadratic --out {0}": "holds something else",
    "complexity quadratic --out {0}": "holds something else",
    "plan quadratic --target 1 --out {0}/plan.json": "belongs to a run",
    "label-counts cleaning --out {0}/point.npz": "belongs to a run",
    "node quadratic --clients 2 --client 0 --superlink 127.0.0.1:9 --insecure --trial "
    "--state {0}": "belongs to a run",
    "prepare rows.csv --out {0}/new.json": "belongs to a run",
    "predict {0} rows.csv --out {0}/result.json": "exists. Choose another file",
    "export {0} --to npz --out {0}/point.npz": "exists. Choose another file",
    "report {0} --out {0}/result.json": "is there and is no report",
    "replay {0}": "only a finished federation can be replayed",
}


@pytest.mark.parametrize("words", list(INTO_A_RUN))
def test_no_command_writes_into_the_folder_of_a_run(finished, words):
    before = contents(finished)
    done = invoke(*words.format(finished).split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert INTO_A_RUN[words] in done.stderr
    assert "Error: " in done.stderr and "Traceback" not in done.stderr
    assert contents(finished) == before


def test_an_interrupted_run_is_to_be_resumed(finished, tmp_path):
    folder = copied(finished, tmp_path / "begun")
    (folder / "result.json").unlink()
    done = invoke(*RUN.split(), "--rounds", 9, "--out", folder)
    assert done.exit_code == 2
    assert f"Continue it with `fedbilevel resume {folder}`" in done.stderr


@pytest.mark.slow
def test_a_federation_goes_on_in_its_own_folder_alone(finished, tmp_path):
    experiment = Experiment("quadratic", clients=2, rounds=5)
    require_served_again(experiment, tmp_path / "new")
    own = tmp_path / "own"
    experiment.save(own)
    (own / "federation.json").write_text("{}")
    (own / "checkpoint.npz").write_bytes(b"")
    require_served_again(experiment, own)
    require_served_again(replace(experiment, rounds=9, target=1.0), own)
    with pytest.raises(CheckpointError, match="clients is 2 there and 3 here"):
        require_served_again(replace(experiment, clients=3), own)
    (own / "federation.json").unlink()
    with pytest.raises(CheckpointError, match="holds a simulation"):
        require_served_again(experiment, own)
    with pytest.raises(CheckpointError, match="holds a finished run"):
        require_served_again(Experiment.load(finished), finished)


def test_a_simulation_does_not_go_on_with_a_federation(finished, tmp_path):
    folder = copied(finished, tmp_path / "sites")
    (folder / "federation.json").write_text("{}")
    before = contents(folder)
    for words in (("resume", folder), (*RUN.split(), "--rounds", 9, "--out", folder)):
        done = invoke(*words)
        assert done.exit_code == 2 and "holds a federation" in done.stderr
    assert contents(folder) == before


def test_what_is_said_of_a_stopped_federation_is_true(finished, tmp_path):
    folder = copied(finished, tmp_path / "sites")
    (folder / "federation.json").write_text("{}")
    assert "holds a federation. It has finished." in invoke("resume", folder).stderr
    (folder / "result.json").unlink()
    served = invoke("resume", folder)
    assert "Continue it with the command that began it, `fedbilevel serve`" in (
        served.stderr
    )
    # Its nodes have ended, and the command takes new folders alone.
    (folder / TRIAL_KEYS).mkdir()
    for words in (("resume", folder), (*TRIAL, "--out", folder)):
        trial = invoke(*words)
        assert trial.exit_code == 2 and "cannot be continued. Start another" in (
            trial.stderr
        )


def test_a_place_is_tried_without_a_trace(tmp_path):
    check_place(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match="a file is where a folder is needed"):
            check_place(place)
    with pytest.raises(CheckpointError, match="a file is where a folder is needed"):
        open_folder(tmp_path / "file", resume=False)
    with pytest.raises(CheckpointError, match="is a folder. Name a file"):
        check_file(tmp_path)
