"""Tasks and algorithms of one's own: from a file, from a package, as objects."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel import LocalBSGM, _registry, algorithms, tasks
from fedbilevel.cli.app import app
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment, federated
from fedbilevel.experiments.agreement import SiteSchema, shared_settings, without_files
from fedbilevel.experiments.comparison import compare
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.run_folder import command_of
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.saved import read_saved
from fedbilevel.tasks import quadratic
from tests.federation import Loopback

TASK = '''"""How far y is pulled to x, on rows of one's own."""

import jax.numpy as jnp
import numpy as np

from beside import SHIFT
from fedbilevel import ClientData, Problem, Task


def upper(x, y, rows):
    return 0.5 * jnp.mean((y - rows["b"]) ** 2) + 0.5 * x**2


def lower(x, y, rows):
    return 0.5 * jnp.mean((y - x - rows["a"]) ** 2)


def make(clients: int = 2, *, shift: float = SHIFT, spread: int = 1, odd: bool = False):
    """Build it; rows are moved by `shift`."""
    above = [{"b": shift + np.arange(2.0)} for _ in range(clients)]
    below = [{"a": spread * np.arange(2.0) + k} for k in range(clients)]
    sizes = {"rounds": 3, "local_steps": 1, "batch": 2, "q": 1, "theta": 0.4}
    steps = {"upper_step": 0.1, "lower_step": 0.2}
    return Task(
        Problem(upper, lower),
        ClientData.from_clients(above, below),
        jnp.zeros(()),
        jnp.zeros(()),
        recommended={**sizes, **steps, "upper_weight": 0.5, "lower_weight": 0.5},
        algorithm="local-bsgm",
    )
'''
DOCUMENT = Path(__file__).parent.parent / "docs" / "add-an-algorithm.md"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return a folder, elsewhere, with a task and an algorithm in it."""
    folder = tmp_path_factory.mktemp("of one's own")
    (folder / "own_task.py").write_text(TASK)
    (folder / "beside.py").write_text("SHIFT = 2.0\n")
    text = DOCUMENT.read_text()
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    (folder / "own_method.py").write_text(code)
    return folder


def task_of(home: Path) -> str:
    return f"{home / 'own_task.py'}:make"


def method_of(home: Path) -> str:
    return f"{home / 'own_method.py'}:LocalBSG"


def command(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.slow
def test_the_command_runs_a_task_and_an_algorithm_of_files(home, tmp_path, monkeypatch):
    monkeypatch.chdir(home)  # the command is told relative paths
    out = tmp_path / "run"
    words = "run own_task.py:make --algorithm own_method.py:LocalBSG --clients 3"
    steps = "--set lr_x=0.1 --set lr_y=0.1 --set shift=3 --precision float64 --json"
    told = command(*f"{words} {steps} --out {out}".split())
    assert told.exit_code == 0, told.output
    summary = json.loads(told.stdout)
    assert (summary["task"], summary["algorithm"]) == ("own_task.py:make", "LocalBSG")
    assert summary["config"]["task"] == {"shift": 3.0, "spread": 1, "odd": False}
    monkeypatch.chdir(tmp_path)  # resumed from anywhere: the path was kept whole
    again = command("resume", out, "--trust-code", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["final"] == summary["final"]


@pytest.mark.slow
def test_a_task_of_a_file_is_computed_as_it_says(home):
    """Rows of a client alike, one step: h = x - H^-1 gxy fy, to two terms."""
    given = {"lr_x": "0.1", "lr_y": "0.2", "spread": "0", "shift": "3.5"}
    own = Experiment(task_of(home), method_of(home), options=given, rounds=1)
    task, _, _ = own.build_task()
    assert np.array_equal(task.data.lower["a"], [[0.0, 0.0], [1.0, 1.0]])
    assert np.array_equal(task.data.upper["b"], [[3.5, 4.5]] * 2)
    result = own.run()
    # At (0, 0) the slope of g is -a, of which the mean over clients is -0.5.
    assert float(result.y) == pytest.approx(0.2 * 0.5, rel=1e-6)


@pytest.mark.slow
def test_a_comparison_keeps_results_by_short_names(home, tmp_path):
    out = tmp_path / "out"
    words = ("compare", task_of(home), "--algorithms", method_of(home), "--seeds", "1")
    done = command(
        *words, "--set", "LocalBSG.lr_x=0.1", "--set", "lr_y=0.1", "--out", out
    )
    assert done.exit_code == 0, done.output
    folders = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert folders == ["LocalBSG"]
    assert sorted(path.name for path in home.iterdir() if path.suffix == ".py") == [
        *("beside.py", "own_method.py", "own_task.py")
    ]


def test_the_lists_show_them(home):
    shown = command("list", "tasks", task_of(home)).output
    assert "own_task.py:make: How far y is pulled" in shown and "spread" in shown
    shown = command("list", "algorithms", method_of(home)).output
    assert "LocalBSG: Plain local steps" in shown and "x moves by lr_x h" in shown


def test_objects_stand_for_their_names(home):
    make = tasks.find(task_of(home))
    assert Experiment(make).task == task_of(home)
    assert Experiment(quadratic.make, LocalBSGM) == Experiment(
        "quadratic", "local-bsgm"
    )
    kind = algorithms.find(method_of(home)).kind
    assert Experiment(make, kind).algorithm == method_of(home)
    with pytest.raises(InvalidInputError, match="at the top level of a file"):
        Experiment(lambda clients: None)


def test_the_task_of_the_guide_is_a_task(tmp_path):
    guide = (DOCUMENT.parent / "own-tasks.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    (tmp_path / "ridge.py").write_text(code)
    own = Experiment(f"{tmp_path / 'ridge.py'}:make", clients=3)
    built = own.build()
    assert built.rounds == 100 and built.task.data.clients == 3
    # Columns of variance 1: the lower level curves by 2 (1 + strength) about.
    built.algorithm.check(5.0, 0)


BROKEN = {
    "missing": (None, "make", r"there is no file .*missing\.py"),
    "empty": ("", "make", r"unknown task of .*empty\.py 'make'"),
    "near": (
        "def mak():\n    pass\n",
        "make",
        r"unknown task .*Did you mean 'mak'\?",
    ),
    "number": ("make = 3\n", "make", r"'number\.py:make' is no function"),
    "raising": (
        "import math\n\nmath.sqrt(-1)\n",
        "make",
        r"cannot be run: ValueError in line 3: ",
    ),
    "leaving": (
        "import sys\nsys.exit('bye')\n",
        "make",
        r"SystemExit in line 2: bye",
    ),
    "wrong": ("def make(:\n", "make", r"cannot be run: SyntaxError in line 1"),
    "other": (
        "def make(clients=2):\n    return {}\n",
        "make",
        r"'other\.py:make' returned dict, not a `fedbilevel\.Task`",
    ),
    "inside": (
        "def make(clients=2):\n    return {}['a']\n",
        "make",
        r"'inside\.py:make' cannot be made: KeyError in line 2: 'a'",
    ),
    "counted": (
        "def make(*, a=1):\n    pass\n",
        "make",
        r"'counted\.py:make' cannot be made: too many positional",
    ),
    "untyped": ("def make(clients=2, *, a):\n    pass\n", "make", r"option a of the"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_wrong_gives_one_sentence(name, tmp_path):
    text, attribute, told = BROKEN[name]
    path = tmp_path / f"{name}.py"
    if text is not None:
        path.write_text(text)
    done = command("run", f"{path}:{attribute}", "--clients", 2)
    assert done.exit_code == 2
    assert re.search(told, done.stderr), done.stderr
    assert "Traceback" not in done.output and done.stderr.count("\n") <= 2


def test_a_path_without_a_function_says_how_it_is_written(tmp_path):
    for name in ("task.py", "task.py:", "task.py:a b", "task.py:../x"):
        with pytest.raises(InvalidInputError, match=r"path/to/file\.py:name"):
            tasks.find(name)


def test_what_is_no_algorithm_is_refused(home):
    (home / "class.py").write_text("class Method:\n    pass\n")
    for name in ("own_task.py:upper", "class.py:Method"):
        with pytest.raises(InvalidInputError, match="neither a subclass"):
            algorithms.find(f"{home / name}")


def test_a_task_that_recommends_no_size_asks_for_it(home, tmp_path):
    path = tmp_path / "bare.py"
    cut = 'sizes = {"rounds": 3, "local_steps": 1, "batch": 2,'
    assert cut in TASK
    path.write_text(TASK.replace(cut, 'sizes = {"local_steps": 1, "batch": 2,'))
    with pytest.raises(InvalidInputError, match="recommends no rounds. Give --rounds"):
        Experiment(f"{path}:make").build()


@pytest.fixture
def package(home, tmp_path, monkeypatch):
    """Return an installed package with entry points, as importlib sees it."""
    shutil.copy(home / "own_task.py", tmp_path / "somebody_task.py")
    shutil.copy(home / "own_method.py", tmp_path / "somebody_method.py")
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: somebody\nVersion: 1\n"
    )
    (info / "entry_points.txt").write_text(
        "[fedbilevel.tasks]\npull = somebody_task:make\nbroken = nowhere:make\n"
        "[fedbilevel.algorithms]\nplain-steps = somebody_method:LocalBSG\n"
        "local-bsgm = somebody_method:LocalBSG\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    _registry._points.cache_clear()
    yield
    _registry._points.cache_clear()


def test_an_installed_package_adds_tasks_and_algorithms(package):
    assert tasks.installed() == ["broken", "pull"]
    assert algorithms.installed() == ["plain-steps"]  # what is ours stays ours
    assert algorithms.find("local-bsgm").kind is LocalBSGM
    task, _, _ = Experiment("pull", "plain-steps").build_task()
    assert task.recommended["rounds"] == "3"
    assert algorithms.find("plain-steps").name == "plain-steps"
    with pytest.raises(InvalidInputError, match=r"'broken' of somebody cannot be l"):
        tasks.find("broken")
    with pytest.raises(InvalidInputError, match="Did you mean 'pull'"):
        tasks.find("pulll")
    shown = command("list", "tasks").output
    assert "pull" in shown and "broken" in shown  # which does not hide the others


def test_both_sides_compare_the_code_and_not_where_it_lies(home, tmp_path):
    def settings(task: str, algorithm: str) -> dict:
        return shared_settings(Experiment(task, algorithm, clients=2))

    here = settings(task_of(home), method_of(home))
    copied = tmp_path / "elsewhere"
    shutil.copytree(home, copied)
    (copied / "own_task.py").rename(copied / "named_otherwise.py")
    there = f"{copied / 'named_otherwise.py'}:make"
    assert settings(there, method_of(copied)) == here
    assert str(home) not in json.dumps(here)
    changed = copied / "own_method.py"
    changed.write_text(changed.read_text().replace("lr_x h", "lr_x  h"))
    assert settings(there, method_of(copied)) != here
    assert shared_settings(Experiment("quadratic", clients=2))["task"] == "quadratic"


def evil(folder: Path) -> tuple[str, Path]:
    """Return the name of a file, and what would be there if it was run."""
    path, trace = folder / "evil.py", folder / "was-run"
    path.write_text(f"open({str(trace)!r}, 'w')\ndef make(clients=2):\n    pass\n")
    return f"{path}:make", trace


def test_a_site_runs_no_file_that_the_server_names(home, tmp_path):
    name, trace = evil(tmp_path)
    for kind in ("task", "algorithm"):
        sent = {"task": "quadratic", "algorithm": None, kind: name}
        with pytest.raises(InvalidInputError, match="only code that it has itself"):
            without_files(sent, {})
        own = without_files(sent, {kind: task_of(home)})
        assert own[kind] == task_of(home)
    assert not trace.exists()


def test_a_server_runs_no_file_that_a_site_names(home, tmp_path):
    name, trace = evil(tmp_path)
    site = build_site(Experiment(task_of(home), clients=2), 0, trial=True)
    facts, leaves = dict(site.facts), 2
    SiteSchema.check(facts, leaves)
    odd = f"own:LocalBSG:{'g' * 32}"
    for told in (name, f"{tmp_path}/evil.py:make ", odd, "own:a/b:" + "0" * 32):
        with pytest.raises(RefusedError, match="algorithm cannot be"):
            SiteSchema.check({**facts, "algorithm": told}, leaves)
    assert not trace.exists()


TERMS = Terms(deadline=60.0, patience=1.0)


@pytest.mark.slow
def test_a_federation_of_ones_own_task_and_algorithm(home, tmp_path):
    """Each party has a copy of the files at a place of its own."""
    places = [home, tmp_path / "site0", tmp_path / "site1"]
    for place in places[1:]:
        shutil.copytree(home, place)
    given = {"lr_x": "0.1", "lr_y": "0.1"}
    shared = {"clients": 2, "rounds": 2, "options": given}
    made = [Experiment(task_of(p), method_of(p), **shared) for p in places]
    sites = {k: build_site(made[1 + k], k, trial=True) for k in range(2)}
    result = serve(Loopback(sites), made[0], tmp_path / "out", TERMS)
    alone = made[0].run()
    assert np.allclose(result.point["y"], alone.point["y"], rtol=1e-6)
    assert (result.task, result.algorithm) == ("own_task.py:make", "LocalBSG")
    assert np.array_equal(result.y, result.point["y"])


def test_the_server_uses_its_own_copy_of_an_algorithm_or_none(home):
    given = Experiment(task_of(home), method_of(home), clients=2)
    told = algorithms.identity(method_of(home))
    assert federated.entry_of(given, told).name == "LocalBSG"
    for own in (None, "local-bsgm"):
        with pytest.raises(InvalidInputError, match="which the server has not, or not"):
            federated.entry_of(replace(given, algorithm=own), told)
    left_open = replace(given, algorithm=None)
    assert federated.entry_of(left_open, "fedbio").name == "fedbio"


@pytest.mark.slow
def test_federate_starts_real_nodes_for_a_file(home, tmp_path):
    words = ["federate", task_of(home), "--clients", "2", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "fedbilevel.cli", *words, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "result.json").read_text())
    assert summary["task"] == "own_task.py:make" and summary["counts"]["rounds"] == 2


@pytest.mark.slow
def test_a_comparison_with_a_method_of_a_file_is_repeated_by_its_file(home, tmp_path):
    plan = Experiment("quadratic", clients=2, rounds=1, local_steps=1)
    given = {"folder": tmp_path / "compared", "resume": False}
    steps = {"lr_x": "0.1", "lr_y": "0.1"}
    compare(replace(plan, options=steps), [method_of(home)], 1, **given)
    saved = read_saved(given["folder"])
    assert list(saved.results) == ["LocalBSG"]
    words = shlex.split(command_of(saved) or "")
    assert words[words.index("--algorithms") + 1] == method_of(home)
