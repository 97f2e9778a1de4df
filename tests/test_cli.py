"""The command line as its users meet it: in processes of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.main import get_group
from typer.testing import CliRunner

from fedbilevel import algorithms, tasks
from fedbilevel.cli.app import app
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import theory
from fedbilevel.experiments.options import options_of
from tests.cases import some_of

PROGRAM = str(Path(sys.executable).parent / "fedbilevel")
TWO_CLIENT = "run two-client --algorithm local-bsgvrm --local-steps 1".split()
LONG = "run quadratic --clients 4 --participants 3 --local-steps 2".split()
LONG += "--rounds 4000 --checkpoint-rounds 50 --seed 7 --json".split()
PATIENCE = 300  # seconds after which a process counts as hanging

# Reads a run folder where JAX cannot be had, and tells what it found.
READER = """
import json, sys
sys.modules["jax"] = None
import numpy as np
from pathlib import Path
folder = Path(sys.argv[1])
arrays = {name: dict(np.load(folder / f"{name}.npz", allow_pickle=False))
          for name in ("columns", "point", "checkpoint")}
print(json.dumps({
    "task": json.loads((folder / "result.json").read_text())["task"],
    "rounds": arrays["columns"]["round"].tolist(),
    "x": arrays["point"]["x"].tolist(),
    "kept": json.loads(arrays["checkpoint"]["about"].tobytes())["round"],
}))
"""


@pytest.fixture(scope="module")
def environment():
    return {
        **{k: v for k, v in os.environ.items() if k != "FEDBILEVEL_TRACEBACK"},
        "COLUMNS": "120",  # wide enough that no table breaks a word
    }


@pytest.fixture(scope="module")
def call(environment):
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [PROGRAM, *map(str, arguments)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )

    return run


@pytest.fixture(scope="module")
def two_client(call, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "two-client"
    sizes = ("--precision", "float64", "--rounds", 1500)
    done = call(*TWO_CLIENT, *sizes, "--json", "--out", folder)
    return SimpleNamespace(done=done, folder=folder)


@pytest.mark.slow
def test_json_is_one_object_with_the_answer(two_client):
    assert two_client.done.returncode == 0, two_client.done.stderr
    assert len(two_client.done.stdout.splitlines()) == 1
    found = json.loads(two_client.done.stdout)
    keys = {"task", "algorithm", "config", "final", "counts", "seconds", "ended"}
    keys |= {"events"}
    assert set(found) == keys
    assert found["ended"] == "after all 1500 rounds"
    assert found["task"] == "two-client"
    assert found["algorithm"] == "local-bsgvrm"
    # Where averaged local hypergradients end; the solution itself is (1, 1/2).
    assert found["final"]["x"] == pytest.approx([8 / 7], abs=1e-6)
    assert found["final"]["y"] == pytest.approx([4 / 7], abs=1e-6)
    # There, grad Phi = x/4 - (1 - x/2) / 2 = 1/14.
    assert found["final"]["grad_norm_sq"] == pytest.approx(1 / 196, abs=1e-6)
    assert found["counts"]["rounds"] == 1500


def test_a_run_folder_has_a_report_with_the_command_that_repeats_it(two_client):
    page = (two_client.folder / "report.html").read_text()
    command = "fedbilevel run two-client --algorithm local-bsgvrm --rounds 1500 "
    assert f"{command}--local-steps 1 --precision float64<" in page


def test_a_run_folder_is_read_without_jax(two_client):
    command = [sys.executable, "-c", READER, str(two_client.folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, shown = json.loads(done.stdout), json.loads(two_client.done.stdout)
    assert found["task"] == "two-client"
    # The first ones, then four while their number doubles, and the last.
    doubled = [2**k + part * 2 ** (k - 2) for k in range(3, 11) for part in range(4)]
    sparse = [one for one in doubled if one < 1500]
    assert found["rounds"] == [*range(1, 8), *sparse, 1500]
    assert found["x"] == shown["final"]["x"]
    assert found["kept"] == 1500


def test_a_second_run_into_a_folder_is_refused(call, two_client):
    before = (two_client.folder / "result.json").read_bytes()
    sizes = ("--precision", "float64", "--rounds", 1)
    done = call(*TWO_CLIENT, *sizes, "--json", "--out", two_client.folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "finished after 1500 rounds. Ask for more than 1500" in done.stderr
    assert "Traceback" not in done.stderr
    assert (two_client.folder / "result.json").read_bytes() == before


@pytest.mark.slow
def test_without_json_there_are_tables_and_a_progress_bar(call):
    done = call(*TWO_CLIENT, "--precision", "float64", "--rounds", 3)
    assert done.returncode == 0, done.stderr
    for word in ("local-bsgvrm", "grad_norm_sq", "upper_loss", "Hessian products"):
        assert word in done.stdout
    assert "two-client" in done.stderr
    assert "3/3" in done.stderr
    assert "3/3" not in done.stdout
    assert "Ended after all 3 rounds." in done.stdout


@pytest.mark.slow
def test_a_run_ends_at_its_target_and_says_so(call, two_client):
    sizes = ("--precision", "float64", "--rounds", 1500, "--target", 0.01)
    done = call(*TWO_CLIENT, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Every round was measured by the run without a target.
    curve = arrays_in(two_client.folder / "columns.npz")["grad_norm_sq"]
    first = 1 + int(np.argmax(curve <= 0.01))
    assert 1 < first < 1500
    assert found["ended"] == f"after round {first}: grad_norm_sq reached 0.01"
    assert found["counts"]["rounds"] == first
    assert found["final"]["grad_norm_sq"] == pytest.approx(curve[first - 1])


def stop_midway(environment: dict[str, str], folder: Path) -> tuple[int, str, str]:
    """Start a long run, send SIGTERM after its first checkpoint, let it end."""
    with subprocess.Popen(
        [PROGRAM, *LONG, "--out", str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while not (folder / "checkpoint.npz").exists():
                assert process.poll() is None, "it ended before its first checkpoint"
                assert time.monotonic() < deadline, "it hangs"
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    return process.returncode, out, err


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.slow
def test_killed_and_resumed_is_the_run_never_interrupted(call, environment, tmp_path):
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    straight = call(*LONG, "--out", whole)
    assert straight.returncode == 0, straight.stderr
    code, out, err = stop_midway(environment, halted)
    assert (code, out) == (130, "")
    about = json.loads(arrays_in(halted / "checkpoint.npz")["about"].tobytes())
    assert 0 < about["round"] < 4000  # half a minute comes first on a busy machine
    assert f"After round {about['round']} of 4000. Kept in {halted}" in err
    assert not (halted / "result.json").exists()
    resumed = call("resume", halted, "--json")
    assert resumed.returncode == 0, resumed.stderr
    for name in ("columns.npz", "point.npz"):
        one, other = arrays_in(whole / name), arrays_in(halted / name)
        assert list(one) == list(other)
        for key in one:
            assert one[key].dtype == other[key].dtype
            assert np.array_equal(one[key], other[key]), key
    first, second = json.loads(straight.stdout), json.loads(resumed.stdout)
    del first["seconds"], second["seconds"]
    assert first == second


@pytest.fixture(scope="module")
def refused(call, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "refused"
    sizes = ("--clients", 4, "--participants", 5)
    done = call("run", "quadratic", *sizes, "--json", "--out", folder)
    return SimpleNamespace(done=done, folder=folder)


@pytest.mark.slow
def test_more_participants_than_clients(refused):
    assert (refused.done.returncode, refused.done.stdout) == (2, "")
    told = "participants=5: choose between 1 and the 4 clients"
    assert told in refused.done.stderr
    assert "Traceback" not in refused.done.stderr


def test_a_refused_run_leaves_no_folder_in_the_way(refused):
    # Corrected, the same command must not be told that its folder is in use.
    assert not refused.folder.exists()


def test_an_unknown_task(call):
    done = call("run", "quadratics", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown task 'quadratics'. Did you mean 'quadratic'?" in done.stderr
    assert "Traceback" not in done.stderr


# What ends before anything is computed needs no process of its own.
def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "quadratic", "--set", "theta"), "--set theta: write KEY=VALUE"),
        (("run", "quadratic", "--set", "=1"), "--set =1: write KEY=VALUE"),
        (("run", "quadratic", "--rounds", "0"), "--rounds 0: must be at least 1"),
        (("resume", "no-such-folder"), "no-such-folder holds no experiment.json"),
        (("run", "quadratic", "--patience", "0"), "--patience 0: must be at least 1"),
        (("run", "quadratic", "--max-bytes", "0"), "--max-bytes 0: must be at least 1"),
        (("run", "quadratic", "--max-seconds", "0"), "--max-seconds 0: must be above"),
        (("compare", "quadratic", "--algorithms", "fedbio", "--resume"), "needs --out"),
        (("label-counts", "quadratic"), "task 'quadratic' have no classes to count"),
        (("label-counts", "cleaning", "--set", "theta=1"), "unknown option 'theta'"),
        (("list", "task"), "unknown list 'task'. Did you mean 'tasks'?"),
        (("list", "tasks", "cleanin"), "unknown task 'cleanin'. Did you mean"),
        (("list", "data", "digits"), "nothing more is known of 'digits'"),
        (("run", "quadratic", "--process", "0"), "belong together"),
    ],
)
def test_malformed_arguments(arguments, told):
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in done.stderr


def test_what_cannot_be_written_is_told_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    out = str(tmp_path / "file" / "counts.png")
    done = invoke("label-counts", "regularization", "--out", out)
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ") and out.rpartition("/")[0] in done.stderr


@pytest.mark.slow
def test_a_tracker_is_refused_before_anything_and_spares_the_cores(call, tmp_path):
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / "file" / "rounds.jsonl"
    done = call("run", "quadratic", "--rounds", "1", "--track", f"jsonl:{place}")
    assert done.returncode == 2
    # One sentence: no warning that JAX was asked before it was configured.
    told = "a file is where a folder is needed. Choose another place."
    assert done.stderr == f"Error: {tmp_path / 'file'}: {told}\n"


def test_label_counts_are_told_and_drawn(tmp_path):
    out = tmp_path / "counts.png"
    chosen = ("regularization", "--clients", "4", "--set", "partition=shards:2")
    done = invoke("label-counts", *chosen, "--json", "--out", str(out))
    counts = json.loads(done.stdout)
    both = np.asarray(counts["training"]) + counts["validation"]
    assert both.shape == (4, len(counts["classes"]))
    assert both.sum() == 1797 - int(0.2 * 1797)
    assert ((both > 0).sum(axis=1) <= 6).all()  # a shard has three classes at most
    assert out.read_bytes().startswith(b"\x89PNG")
    told = invoke("label-counts", *chosen).stdout
    assert "Rows for training" in told and "Rows for validation" in told


@pytest.mark.parametrize("command", sorted(get_group(app).commands))
def test_help_shows_an_example(command):
    done = invoke(command, "--help")
    assert done.exit_code == 0
    assert f"Example: fedbilevel {command} " in done.stdout


def test_list_names_all_tasks_and_algorithms():
    expected = {*tasks.names(), *algorithms.names()}
    assert {"two-client", "quadratic", "local-bsgm", "local-bsgvrm"} <= expected
    done = invoke("list")
    assert done.exit_code == 0
    # The first cell of every row, after the border if the list is drawn as a table.
    cells = {word for line in done.stdout.splitlines() for word in line.split()[:2]}
    assert expected <= cells
    assert "two-client" not in invoke("list", "algorithms").stdout


@pytest.mark.parametrize("name", some_of(algorithms.names(), 6))
def test_an_algorithm_is_listed_with_every_option(name):
    entry = algorithms.find(name)
    done = invoke("list", "algorithms", name)
    assert done.exit_code == 0
    told = " ".join(done.stdout.split())
    for text in (entry.summary, entry.answers, entry.reference, entry.provenance):
        assert text in told
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    first = [row[0].strip() for row in rows if row[0].strip()]
    assert first == list(options_of(entry))


def test_a_task_is_listed_with_every_option():
    done = invoke("list", "tasks", "regularization")
    assert done.exit_code == 0
    assert "Per-feature l2 strengths" in done.stdout
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert found["train"][:2] == ["number", "0.0"]
    assert found["train"][2].startswith("share of all rows")
    assert found["data"][:2] == ["text", "digits"]


def options_by_name(command: str) -> dict:
    return {one.name: one for one in get_group(app).commands[command].params}


def test_commands_that_share_an_argument_share_its_name_and_default():
    run, federate, serve, node = (
        options_by_name(name) for name in ("run", "federate", "serve", "node")
    )
    # What is not the same is so on purpose.
    differs = {"clients", "data", "out", "patience", "deadline", "tune"}
    for other in (federate, serve, node):
        shared = run.keys() & other.keys() - differs
        assert {"task", "algorithm", "seed", "settings", "clip", "aggregate"} <= shared
        for name in shared:
            assert run[name].opts == other[name].opts
            assert run[name].default == other[name].default
            assert run[name].help == other[name].help
    assert not run["clients"].required and federate["clients"].default is None
    assert serve["clients"].required and node["clients"].required
    assert "data" not in serve and "rounds" not in node
    # Everything that must be the same on a server and its nodes can be typed for both.
    only_server = {"rounds", "measure_every", "target", "stop_patience"}
    only_server |= {"max_bytes", "max_samples", "max_seconds", "track"}
    only_server |= {"trials", "sampler", "tuning_seeds", "force"}
    experiment = (run.keys() | {"stop_patience"}) & serve.keys() - {"out", "as_json"}
    assert experiment - node.keys() == only_server


def test_a_plan_is_for_eight_clients_unless_another_number_is_given(monkeypatch):
    asked = []

    def planned(experiment, clients, **given):
        asked.append(clients)
        raise InvalidInputError("that is enough.")

    monkeypatch.setattr(theory, "planned", planned)
    for words in ((), ("--clients", "3")):
        CliRunner().invoke(app, ["plan", "quadratic", "--target", "1", *words])
    assert asked == [8, 3]
