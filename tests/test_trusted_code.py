"""Folders of others: no command runs code that a folder names and nobody typed."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel import _registry, algorithms, tasks
from fedbilevel.cli.app import _COMMANDS, app
from fedbilevel.cli.dashboard import _listing, page_of
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import ATTENDANCE
from tests.reports import made_up, save_comparison, save_run

# Every command that is given a folder or a file of another command, with its words; {}
# is where it lies. The pages of the dashboard are tried below.
OPENING = {
    "resume": "resume {}",
    "replay": "replay {}",
    "report": "report {} --out {}.html",
    "predict": "predict {} rows.csv",
    "export": "export {} --to npz --out {}.npz",
    "run": "run quadratic --clients 2 --rounds 9 --out {}",
    "run plan": "run quadratic --clients 2 --plan {}/experiment.json",
    "tune": "tune quadratic --clients 2 --out {}",
    "run tune": "run quadratic --clients 2 --tune --out {}",
    "compare": "compare quadratic --algorithms fedbio --resume --out {}",
    "federate": "federate quadratic --plan {}/experiment.json",
    "serve": "serve quadratic --clients 2 --insecure --out {}",
    "serve preparation": "serve regularization --clients 2 --insecure --out new "
    "--preparation {}/experiment.json",
    "node": "node regularization --clients 2 --client 0 --superlink 127.0.0.1:1 "
    "--insecure --state {} --data {} --preparation {}/experiment.json",
    "prepare": "prepare {}/experiment.json --out {}.out",
    "plan": "plan quadratic --clients 2 --target 0.05 --out {}/plan.json",
    "speedup": "speedup quadratic --clients 2 --iterations 4,8 --out {}",
    "complexity": "complexity quadratic --clients 2 --out {}",
}
ASKS = ("resume", "replay")  # what runs the folder's own experiment


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """Return the folder of a run that names code, and what is there once it ran."""
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "was-run"
    code = f"open({str(trace)!r}, 'w').close()\ndef make(clients=2):\n    return {{}}\n"
    Path("evil.py").write_text(code)
    Path("rows.csv").write_text("a,b\n1,2\n")
    return tmp_path, trace


def planted(place: Path, *, unfinished: bool = False, **names: str) -> Path:
    """Write a folder that is a run, a comparison, a search and a federation."""
    experiment = {**asdict(Experiment("quadratic", rounds=9)), **names}
    folder = place / "folder"
    if not unfinished:
        save_run(folder, made_up("one"))
        save_comparison(folder, {"one": 1}, seeds=1)
        np.savez(folder / ATTENDANCE, attendance=np.ones((1, 2)))
    for name in ("experiment", "search", "tuned", "plan"):
        place = folder / f"{name}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(experiment))
    settings = {"experiment": experiment, "seeds": 1}
    if not unfinished:
        (folder / "settings.json").write_text(json.dumps(settings))
    return folder


def told(command: str, folder: Path, *more: str, typed: str | None = None):
    words = [word.replace("{}", str(folder)) for word in command.split()]
    return CliRunner().invoke(app, [*words, *more], input=typed)


def test_every_command_that_opens_a_folder_is_tried():
    none = {"list", "recommend", "label-counts", "check-theory", "dashboard"}
    assert {words.split()[0] for words in OPENING.values()} | none == set(_COMMANDS)


@pytest.mark.parametrize("unfinished", [False, True], ids=["finished", "begun"])
@pytest.mark.parametrize("kind", ["task", "algorithm"])
@pytest.mark.parametrize("command", OPENING)
def test_no_command_runs_code_that_a_folder_names(evil, command, kind, unfinished):
    place, trace = evil
    folder = planted(place, unfinished=unfinished, **{kind: "evil.py:make"})
    done = told(OPENING[command], folder)
    assert not trace.exists()
    assert done.exception is None or isinstance(done.exception, SystemExit), done
    if command == "resume":
        said = done.output.replace("\n", "")
        assert done.exit_code == 2 and "evil.py" in said and "--trust-code" in said


def test_no_page_of_the_dashboard_runs_code_that_a_folder_names(evil):
    place, trace = evil
    folder = planted(place, task="evil.py:make", algorithm="evil.py:make")
    assert "folder" in _listing(place) and "evil.py" in page_of(folder)
    assert not trace.exists()


@pytest.mark.parametrize("command", ASKS)
def test_code_that_is_trusted_runs(evil, command):
    place, trace = evil
    folder = planted(place, task="evil.py:make")
    told(OPENING[command], folder, "--trust-code")
    assert trace.exists()


@pytest.mark.parametrize("command", ASKS)
@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_a_terminal_is_asked_and_nothing_else_is(evil, monkeypatch, command, answer):
    place, trace = evil
    folder = planted(place, task="evil.py:make")
    monkeypatch.setattr("fedbilevel.cli.checks._is_terminal", lambda: True)
    done = told(OPENING[command], folder, typed=f"{answer}\n")
    assert trace.exists() == (answer == "y")
    assert "Run it?" in done.output
    trace.unlink(missing_ok=True)
    _registry._loaded.clear()
    monkeypatch.undo()
    monkeypatch.chdir(place)
    done = told(OPENING[command], folder, typed="y\n")
    assert not trace.exists() and done.exit_code == 2


@pytest.mark.parametrize("command", ASKS)
def test_a_package_that_a_folder_names_is_not_loaded_unasked(
    evil, command, monkeypatch
):
    place, trace = evil
    info = place / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[fedbilevel.tasks]\npull = evil:make\n")
    monkeypatch.syspath_prepend(place)
    _registry._points.cache_clear()
    folder = planted(place, task="pull")
    done = told(OPENING[command], folder)
    assert done.exit_code == 2 and "'pull'" in done.output and not trace.exists()
    told(OPENING[command], folder, "--trust-code")
    assert trace.exists()
    sys.modules.pop("evil", None)
    _registry._points.cache_clear()


def test_a_file_that_nobody_agreed_to_is_not_run_however_it_is_found(evil):
    """Whoever looks a name up, and wherever a command got it from."""
    _, trace = evil

    def refuse(name: str, kind: str) -> None:
        raise InvalidInputError(f"{kind} {name}")

    for find, kind in ((tasks.find, "task"), (algorithms.find, "algorithm")):
        with _registry.asking(refuse), pytest.raises(InvalidInputError) as told:
            find("evil.py:make")
        assert str(told.value) == f"{kind} {Path('evil.py').resolve()}:make"
    assert not trace.exists()


def test_names_of_code_do_not_reach_the_terminal_as_they_are(evil):
    place, _ = evil
    folder = planted(place, task="\x1b]0;owned\x07evil.py:make")
    assert "\x1b" not in told("resume {}", folder).output
