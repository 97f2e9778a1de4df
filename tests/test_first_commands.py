"""What a reader of the README and of the tour types, in the order it is shown."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedbilevel import algorithms
from fedbilevel.cli.app import app
from fedbilevel.errors import HeterogeneityWarning
from fedbilevel.experiments import Experiment, experiment
from tests.test_doc_blocks import ROOT, given, python_of
from tests.test_docs import loaded

TEXTS = [(ROOT / name).read_text() for name in ("README.md", "docs/tour.md")]
SHOWN = re.findall(
    r"^ {4}((?:make|pip|python3|fedbilevel) .*)$", "\n".join(TEXTS), flags=re.M
)
SLOW = pytest.mark.slow
RUNS = [line for line in SHOWN if line.startswith("fedbilevel run ")]


class CheckedError(Exception):
    """A run would begin now: what would be warned of was."""


def stop(*_: Any, **__: Any) -> Any:
    raise CheckedError


def greeted(line: str, monkeypatch: pytest.MonkeyPatch) -> BaseException | None:
    """Return with what a command ends that runs something: warnings are errors here."""
    monkeypatch.setattr("fedbilevel.runtime.configure", lambda *_, **__: None)
    monkeypatch.setattr(experiment, "run_job", stop)
    words = shlex.split(line.removeprefix("fedbilevel "))
    return CliRunner().invoke(app, words).exception


def test_the_first_run_of_a_table_greets_without_a_warning(tmp_path, monkeypatch):
    """The other one is run whole from an installed wheel."""
    monkeypatch.chdir(tmp_path)
    exec(python_of("start.md")[0], {})  # writes the table
    assert "--data patients.csv" in RUNS[1]
    assert isinstance(greeted(RUNS[1], monkeypatch), CheckedError)


@SLOW
def test_a_first_run_that_would_warn_is_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "run two-client --algorithm local-bsgvrm"
    assert isinstance(greeted(line, monkeypatch), HeterogeneityWarning)


def test_the_demo_has_no_algorithm_that_could_warn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert SHOWN[1].startswith("make demo ")
    (line,) = re.findall(
        r"\ndemo: .*\n\t.* (\S+\.py)\n", (ROOT / "Makefile").read_text()
    )
    demo, tried = loaded(ROOT / line, "demo"), []

    def note(self: Experiment, *_: Any, **__: Any) -> None:
        tried.append(self.algorithm)

    monkeypatch.setattr(Experiment, "run", note)
    for name in ("configure", "result_table", "cost_table"):
        monkeypatch.setattr(demo, name, lambda *_: "")
    demo.main()
    capsys.readouterr()
    assert len(tried) == 2
    # None is the task's own, which may be any.
    assert not any(algorithms.find(name).kind.inverts_locally for name in tried)


def test_every_command_uses_what_an_earlier_one_made():
    made, used = set(), []
    for line in SHOWN:
        if not line.startswith("fedbilevel "):
            continue
        name, values = given(line.removeprefix("fedbilevel "))
        folder, plan = values.get("folder"), values.get("plan")
        needed = {str(one) for one in (folder, plan) if one is not None}
        assert needed <= made | {str(Path(one).parent) for one in made}, line
        used += [name] * len(needed)
        made |= {str(values["out"])} if values.get("out") else set()
    wanted = {"resume", "predict", "export", "replay", "report", "dashboard", "run"}
    assert set(used) == wanted
