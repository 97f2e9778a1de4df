"""What the README shows works as it stands, and the demo keeps its promise."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer.main

from fedbilevel.cli.app import app
from fedbilevel.result import Result

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run_python(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 20
    printed = run_python("-c", code, folder=tmp_path).split()
    # Ridge on noise of variance 1: the loss ends near it, from 2 at the start.
    assert 0.8 < float(printed[0]) < 1.6
    # 2 (dx + dy) floats of 4 bytes, 2 clients, 200 rounds.
    assert int(printed[-1]) == 2 * (5 + 5) * 4 * 2 * 200


def test_the_demo_tunes(tmp_path):
    printed = run_python(
        str(ROOT / "examples" / "tune_regularization.py"), folder=tmp_path
    )
    (folder,) = (tmp_path / "runs").iterdir()
    tuned = Result.load(folder / "fedbioacc")
    untuned = Result.load(folder / "no-tuning")
    assert folder.name in printed.replace("\n", "")
    assert tuned.final["upper_loss"] < 0.6 * untuned.final["upper_loss"]
    assert tuned.final["test_accuracy"] > untuned.final["test_accuracy"]


def test_the_readme_shows_the_two_commands():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test", "bench"):
        assert f"make {command}" in README
        assert f"\n{command}: install" in makefile


def test_the_commands_of_the_deployment_guide_can_be_typed():
    text = (ROOT / "docs" / "deployment.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:    |ExecStart=\S*)fedbilevel (\S+) (.*)$", text, re.M)
    commands = getattr(typer.main.get_command(app), "commands", {})
    found = {"serve": [], "node": [], "run": [], "federate": [], "replay": []}
    for name, rest in lines:
        given = commands[name].make_context(name, shlex.split(rest)).params
        found[name].append((given.get("task"), given.get("clients")))
    assert all(found.values()) and len(found["serve"]) == len(found["node"]) == 2
    # Server and nodes must be started alike.
    assert len({*found["serve"], *found["node"]}) == 1
