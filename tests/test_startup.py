"""Help, and whatever is refused at once, need neither JAX nor a picture library."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.main import get_group
from typer.testing import CliRunner

import fedbilevel
from fedbilevel import _registry, _types, algorithms, tasks
from fedbilevel.cli import checks, federation, main, node
from fedbilevel.cli.app import app
from fedbilevel.cli.progress import watched
from fedbilevel.cli.theory import PRESETS, THEOREMS
from fedbilevel.deployment import serving
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import experiment
from fedbilevel.experiments.options import options_of
from fedbilevel.experiments.theory import with_theorems
from fedbilevel.runtime import configure
from fedbilevel.studies import planning
from fedbilevel.tasks._base import options_of as task_options
from tests.cases import some_of

# Runs commands in turn, and tells which heavy modules each has loaded by its end.
PROBE = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from fedbilevel.cli.app import app
found = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as told:
        try:
            app(words)
        except SystemExit as end:
            code = end.code
    heavy = sorted({"jax", "numpy", "matplotlib", "flwr"} & set(sys.modules))
    found.append([code, heavy, told.getvalue()])
print(json.dumps(found))
"""
COMMANDS = sorted(get_group(app).commands)
HELP = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]


def probe(commands: list[list[str]]) -> list[tuple[int, list[str], str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(commands)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def looking_seldom(monkeypatch):
    """Begin a command; return how often Python looked for garbage before."""
    usual = gc.get_threshold()
    monkeypatch.setattr(sys, "argv", ["fedbilevel", "--version"])
    with pytest.raises(SystemExit):
        main()
    yield usual
    gc.set_threshold(*usual)


def test_a_command_that_starts_seldom_looks_for_garbage(looking_seldom):
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(20_000)]
    assert gc.get_stats()[0]["collections"] == before
    assert len(kept) == 20_000
    assert gc.get_threshold()[0] > looking_seldom[0]


def test_rounds_look_for_garbage_as_usual(looking_seldom):
    with watched("a task", quiet=True) as watch:
        watch(0, 9, {})
        assert gc.get_threshold() != looking_seldom
        watch(1, 9, {})
    assert gc.get_threshold() == looking_seldom


def test_a_site_looks_for_garbage_as_usual(looking_seldom, monkeypatch):
    """What messages leave in circles would take up memory for long."""
    seen = []

    def serving(*_, **__):
        seen.append(gc.get_threshold())

    monkeypatch.setattr("fedbilevel.federation.flower.node.serve_packets", serving)
    site = SimpleNamespace(client=0, folder="state", largest=1, report=print)
    site.handle, site.is_over = None, False
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    node._take_part(site, None)
    for one, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
        signal.signal(one, handler)
    assert seen == [looking_seldom]


def test_help_loads_nothing_heavy():
    found = probe(HELP)
    wrong = {" ".join(w): one for w, one in zip(HELP, found, strict=True) if one[1]}
    assert wrong == {}
    assert [one[0] for one in found] == [0] * len(HELP)


# Runs a command, and tells how many programs were compiled or loaded for it.
COUNT = """
import sys
import jax
names = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **about: names.append(event)
)
from fedbilevel.cli.app import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code
print(names.count("/jax/core/compile/backend_compile_duration"), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_run_compiles_few_programs():
    """Data, starts and shapes need none; 57 were compiled while each step had its own.

    Needed are the means of the closed form, the checks of the losses, the start and the
    rounds. The rest are single numbers and keys.
    """
    words = ["run", "two-client", "--rounds", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *words], capture_output=True, text=True
    )
    assert json.loads(done.stdout)["final"]["round"] == 1
    assert 4 <= int(done.stderr.splitlines()[-1]) <= 14


WRITING = (
    *(
        "run quadratic --out",
        "tune quadratic --out",
        "compare quadratic --algorithms fedbio --out",
    ),
    *("federate quadratic --out", "serve quadratic --clients 2 --insecure --out"),
    *("speedup quadratic --out", "complexity quadratic --out"),
    *("plan quadratic --target 1 --out", "label-counts cleaning --out"),
    *("predict run new.csv --out", "export run --to npz --out", "report run --out"),
    *("prepare rows.csv --sums", "prepare rows.csv --out"),
)


def no_place(place: str, told: str) -> dict[str, str]:
    """Return every command that writes, with a place where nothing can be."""
    return {f"{words} {place}": told for words in WRITING}


def test_every_command_that_writes_is_tried():
    """A new command, or a new option of one, belongs into the list above."""
    writing = {" ".join(words.split()[:1] + words.split()[-1:]) for words in WRITING}
    found = {
        f"{name} {option}"
        for name, command in get_group(app).commands.items()
        for one in command.params
        for option in one.opts
        if option in ("--out", "--sums")
    }
    assert writing == found


def test_what_is_refused_at_once_loads_nothing_heavy(tmp_path):
    (tmp_path / "file").write_text("in the way")
    used, below = str(tmp_path), str(tmp_path / "file" / "run")
    refused = {
        "run quadratics": "Did you mean 'quadratic'?",
        "run quadratic --algorithm fedbi": "unknown algorithm 'fedbi'",
        "run quadratic --runtime fast": "unknown runtime 'fast'",
        "run quadratic --precision float16": "choose float32 or float64",
        f"run regularization --data {used}/none.csv": "there is no file or folder",
        f"tune cleaning --data {below}": "there is no file or folder",
        f"compare fairness --algorithms fedbio --data {used}/no.csv": "Check the path.",
        f"run quadratic --out {used}": "exists and is not empty",
        f"run quadratic --out {below}": "a file is where a folder is needed",
        f"compare quadratic --algorithms fedbio --out {used}": "is not empty",
        "compare quadratic --algorithms fedbio,x": "unknown algorithm 'x'",
        "plan quadratic": "give --target, the value to reach, or --iterations",
        "plan quadratic --target 1 --preset x": "unknown preset 'x'",
        "plan quadratic --target 1 --algorithm scaffold": "with a theorem 'scaffold'",
        f"speedup quadratic --out {used}": "holds something else",
        f"label-counts cleaning --out {used}": "is a folder. Name a file",
        f"federate quadratic --out {used}": "exists and is not empty",
        "federate quadratic --nodes big": "unknown kind of nodes 'big'",
        f"serve quadratic --clients 2 --insecure --out {used}": "is not empty",
        f"replay {used}": "holds no finished federation",
        f"replay {below}": "holds no finished federation",
        f"dashboard {below}": "is not a folder",
        **no_place(below, "a file is where a folder is needed. Choose another place."),
    }
    if os.path.isdir("/proc/self"):
        refused |= no_place("/proc/run", "/proc takes no files or folders. Choose")
    found = probe([words.split() for words in refused])
    for (words, told), (code, heavy, text) in zip(refused.items(), found, strict=True):
        assert (code, heavy) == (2, []), words
        assert told in text and "Traceback" not in text, words
        assert text.startswith("Error: ") and text.count("\n") == 1, words


def test_what_is_checked_early_is_what_there_is():
    assert _registry.TASKS.known() == tasks.names()
    assert _registry.ALGORITHMS.known() == algorithms.names()
    assert set(checks.RUNTIMES) == set(experiment._RUNTIMES)
    assert sorted(THEOREMS) == sorted(with_theorems())
    assert PRESETS == planning.PRESETS
    with pytest.raises(InvalidInputError) as told:
        configure("float16")
    assert all(name in str(told.value) for name in checks.PRECISIONS)
    assert federation.KINDS == serving.KINDS


def test_an_unknown_option_is_told_before_data_are_loaded(tmp_path):
    # There is no such file; loading it would be what is told.
    words = ["run", "regularization", "--data", str(tmp_path / "none.csv")]
    done = CliRunner().invoke(app, [*words, "--set", "thetaa=1"])
    assert done.exit_code == 2
    assert "unknown option 'thetaa'. Did you mean 'theta', 'eta' or" in done.stderr


def test_the_version_is_told():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (
        0,
        f"fedbilevel {fedbilevel.__version__}\n",
    )


def test_every_public_name_is_there_and_no_other():
    listed = Path(fedbilevel.__file__).with_suffix(".pyi").read_text()
    names = re.findall(r" as (\w+)", listed)
    assert {"run", "compare", "LocalBSGVRM", "Problem", "algorithms"} <= set(names)
    assert set(dir(fedbilevel)) == {*names, "__version__"}
    for name in names:
        one = getattr(fedbilevel, name)
        place = one.__name__ if isinstance(one, ModuleType) else one.__module__
        assert place.startswith("fedbilevel.")
    assert getattr(fedbilevel, "tasks") is tasks  # noqa: B009
    # Names that an own method is written with.
    assert getattr(fedbilevel, "Triple") is _types.Triple  # noqa: B009
    assert not {"ast", "pkgutil"} & set(dir(fedbilevel))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(fedbilevel, "nothing")  # noqa: B009


OPTIONS = {
    **{("algorithms", n): options_of(algorithms.find(n)) for n in algorithms.names()},
    **{("tasks", n): task_options(tasks.find(n)) for n in tasks.names()},
}


# At 80 columns every algorithm is listed in test_cli.py.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), some_of(OPTIONS, 8))
def test_a_list_cuts_no_name(kind, name):
    done = CliRunner().invoke(app, ["list", kind, name], env=wide(40))
    assert "…" not in done.stdout
    # A name is whole, between what frames it: lines, colons, commas.
    words = set(re.findall(r"[^\s│:;,]+", done.stdout))
    assert set(OPTIONS[kind, name]) <= words


@pytest.mark.parametrize("width", [60, 80])
def test_no_list_cuts_anything(width):
    done = CliRunner().invoke(app, ["list"], env=wide(width))
    assert "…" not in done.stdout
    for name in algorithms.names():
        assert algorithms.find(name).reference.split()[-1] in done.stdout


def wide(width: int) -> dict[str, str]:
    return {"COLUMNS": str(width)}
