"""What the README shows works as it stands, and the demo keeps its promise."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import typer.main

import fedbilevel
from fedbilevel import algorithms
from fedbilevel.algorithms import OneLoop, entry_of
from fedbilevel.cli.app import app
from fedbilevel.experiments.options import algorithm_from, options_of
from fedbilevel.result import Result
from fedbilevel.runtime import ReferenceRuntime, SimulatorRuntime, count, execute
from tests import cases
from tests.cases import DX, DY, quadratic_data, quadratic_job

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run_python(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def check_example(printed: str) -> None:
    """Look whether the README's program prints what the text below it says."""
    numbers = re.findall(r"-?[\d.]+(?:e-?\d+)?", printed)
    loss, strengths = float(numbers[0]), [float(one) for one in numbers[1:6]]
    # Ridge on noise of variance 1: the loss ends near it, from 2 at the start.
    assert 0.8 < loss < 1.6
    assert min(strengths) == strengths[0]


def test_the_readme_example_runs(tmp_path):
    assert len([line for line in EXAMPLE.splitlines() if line]) <= 15
    check_example(run_python("-c", EXAMPLE, folder=tmp_path))


@pytest.mark.slow
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
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert f"\n{command}: install" in makefile


def test_links_of_the_readme_lead_to_files_and_headings():
    links = re.findall(r"\]\(([^)]*)\)", README)
    assert len(links) > 30
    for link in links:
        file, _, anchor = link.partition("#")
        assert (ROOT / file).exists(), link
        titles = (
            re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.M) if anchor else []
        )
        places = [
            re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in titles
        ]
        assert not anchor or anchor in places, link


def test_the_commands_of_the_deployment_guide_can_be_typed():
    text = (ROOT / "docs" / "deployment.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:    |ExecStart=\S*)fedbilevel (\S+) (.*)$", text, re.M)
    commands = getattr(typer.main.get_command(app), "commands", {})
    found = {"serve": [], "node": [], "run": [], "federate": [], "prepare": []}
    found["replay"] = []
    for name, rest in lines:
        given = commands[name].make_context(name, shlex.split(rest)).params
        found[name].append((given.get("task"), given.get("clients")))
    assert all(found.values()) and len(found["serve"]) == len(found["node"]) == 2
    # Server and nodes must be started alike.
    assert len({*found["serve"], *found["node"]}) == 1


def loaded(path: Path, name: str) -> Any:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_methods_of_the_page_are_those_there_are():
    """`make methods` writes them; a new file in the folder is a new row."""
    methods = loaded(ROOT / "docs" / "methods.py", "methods")
    page = methods.PAGE.read_text()
    assert methods.with_table(page) == page
    assert all(f"| `{name}` |" in page for name in algorithms.names())
    assert f"{len(algorithms.names())} methods" in README


@pytest.mark.slow
def test_the_skeleton_of_an_algorithm_runs_as_it_stands(tmp_path):
    guide = (ROOT / "docs" / "add-an-algorithm.md").read_text()
    file, row = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    path = tmp_path / "local_bsg.py"
    path.write_text(file)
    module = loaded(path, "local_bsg")
    (name,) = module.__all__
    kind = getattr(module, name)
    assert kind.__mro__[1] is OneLoop and "Deviations:" in module.__doc__
    case = eval(row, {**vars(cases), name: kind})
    job = quadratic_job(case.algorithm, quadratic_data(3), participants=2)
    fast, slow = (execute(one(job), 2) for one in (SimulatorRuntime, ReferenceRuntime))
    for left, right in zip(
        jax.tree.leaves((fast.state, fast.columns)),
        jax.tree.leaves((slow.state, slow.columns)),
        strict=True,
    ):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-12)
    floats = count(quadratic_job(case.algorithm, quadratic_data(3)), 3)
    assert floats["per_client_and_round"]["floats_up"] == case.floats(DX, DY)
    # Its options come from its fields, with the values that tasks recommend.
    entry = entry_of(case.name, kind)
    assert {"lr_x", "upper_step", "q", "theta"} <= set(options_of(entry))
    advice = {"upper_step": "0.3", "lower_step": "0.2", "q": "4", "theta": "0.1"}
    built: Any = algorithm_from(entry, advice, clients=3, local_steps=5)
    assert (float(built.lr_x), built.hypergradient.q) == (0.3, 4)


@pytest.mark.slow
def test_own_objects_are_compared_tuned_stopped_and_resumed(tmp_path, capsys):
    path = ROOT / "examples" / "own_model.py"
    # Nothing private, and no option as text: what it takes are objects.
    assert not re.findall(r"\._|import _|fedbilevel\.[a-z]", path.read_text())
    found = loaded(path, "own_model").main(tmp_path)
    told = capsys.readouterr().out
    assert list(found.results) == ["LocalBSGVRM", "FedBiO", "no tuning"]
    assert all(len(results) == 5 for results in found.results.values())
    # The grid was tried, and the best of it was taken.
    trials = found.tuned["LocalBSGVRM"].trials
    best = min(trials, key=lambda trial: trial.value).algorithm
    taken = found.results["LocalBSGVRM"][0].config["parameters"]
    assert len(trials) == 4 and taken["rho1"] == float(best.rho1)
    ends = [one.ended for many in found.results.values() for one in many]
    assert any("15 measurements without a lower test_error" in end for end in ends)
    for results in found.results.values():
        for result in results:
            rounds = int(result.final["round"])
            assert rounds == 150 or f"after round {rounds}:" in result.ended
    assert "Interrupted. After round 10 of 40. Kept in" in told
    assert "ends where the other does: True" in told
    # What is saved is read without running anything again.
    saved = Result.load(tmp_path / "comparison" / "FedBiO" / "seed-2")
    assert saved.final == found.results["FedBiO"][2].final


def test_what_users_type_is_importable():
    names = (
        "Channel ClientData FedNest Keeping LocalBSGVRM Neumann Pair Problem Result "
    )
    names += "Sampling Stopping check_theory compare complexity dirichlet iid plan run "
    names += "shards speedup sweep tune"
    for name in names.split():
        assert hasattr(fedbilevel, name), name


def test_every_test_that_the_security_guide_names_is_there():
    guide = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", guide))
    files = set(re.findall(r"`(test_\w+\.py)`", guide))
    text = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    written = set(re.findall(r"def (test_\w+)\(", text))
    assert len(named) > 15 and not named - written
    assert all((ROOT / "tests" / name).exists() for name in files)
