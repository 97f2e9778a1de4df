"""What is shown while a run loads, is checked, compiles and runs."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from fedbilevel.cli import main
from fedbilevel.cli.arguments import holding_ctrl_c
from fedbilevel.cli.progress import Watched, spark_line, watched
from fedbilevel.experiments import Experiment
from fedbilevel.runtime import compilation

RUN = Experiment("two-client", "fedavg", local_steps=1, rounds=1)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7.0, 0.0, float("nan"), 3.5], "█▁▅"),
        (list(range(100)), "▁▂▂▃▄▄▅▅▆▇▇█"),
    ],
)
def test_a_spark_line_has_the_shape_of_its_numbers(values, line):
    assert spark_line(values) == line


def fields(watch: Watched) -> dict[str, str]:
    return watch.bar.tasks[0].fields


def test_stages_have_words_of_their_own_and_rounds_a_curve():
    with watched("task", quiet=True) as watch:
        assert fields(watch)["metric"] == "loading"
        watch.stage("checking")
        watch.stage("compiling", "2 of 3 clients")
        assert fields(watch)["metric"] == "compiling"
        watch(0, 0, {})  # a server that waits for nodes has done nothing yet
        assert fields(watch)["metric"] == "compiling"
        watch(1, 9, {"loss": 2.0})
        watch(2, 9, {"loss": 1.0})
        shown = fields(watch)
        assert shown["metric"] == "loss 1" and shown["curve"] == "█▁"
        assert shown["rate"].endswith("/s") and shown["who"] == "2 of 3 clients"
        watch.begin("another")
        assert fields(watch)["metric"] == "compiling"
        assert fields(watch)["curve"] == ""


@pytest.mark.slow
def test_a_run_says_what_it_does_before_its_first_round(monkeypatch):
    monkeypatch.setattr(compilation, "_programs", OrderedDict())
    told: list[Any] = []

    def about(word: str, who: str = "") -> None:
        told.append((word, who))

    def watch(done: int, total: int, newest: dict[str, float]) -> None:
        told.append(done)

    RUN.run(watch=watch, about=about)
    assert told[:2] == [("checking", ""), ("checking", "2 clients")]
    assert told[-2:] == [("running", ""), 1]
    words = [word for word, _ in told[2:-2]]
    assert words == ["compiling", "running", "compiling"]  # the start, then the rounds


def test_what_is_said_stays_above_the_bar():
    text = io.StringIO()
    bar = Progress(console=Console(file=text, width=60))
    watch = Watched(bar, bar.add_task("task", metric="", curve="", rate="", who=""))
    watch.say("client [0] is at node 7, and this line is longer than the terminal is")
    expected = "client [0] is at node 7, and this line is longer than the terminal is"
    assert text.getvalue() == expected + "\n"


COMPILER = """
import hashlib, sys
from fedbilevel.cli import progress
with progress.watched("task", quiet=True) as watch:
    watch.stage(sys.argv[1])
    print("now", flush=True)
    # Like a compiler it is in C for a long time, where no handler of Python is called.
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))
    sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "steps", "status"),
    [("compiling", 2**31 - 1, 130), ("running", 2**24, 7)],
    ids=["a compiler is ended", "a round is not"],
)
def test_ctrl_c_does_not_wait_for_a_compiler(stage, steps, status):
    words = [sys.executable, "-c", COMPILER, stage, str(steps)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            process.send_signal(signal.SIGINT)
            # A compiler that nobody ends takes far longer.
            assert process.wait(timeout=300) == status
        finally:
            process.kill()


@pytest.fixture
def begins(monkeypatch):
    """Let a command begin, and leave how this process looks for garbage."""
    monkeypatch.setattr("fedbilevel.startup.own_process.begin", lambda: None)


def test_ctrl_c_while_commands_are_read_shows_no_traceback(monkeypatch, begins):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("fedbilevel.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_ctrl_c_waits_until_libraries_are_read():
    """Also where another thread may be given the signal, as libraries have some."""
    read, idle = False, threading.Event()
    other = threading.Thread(target=idle.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), holding_ctrl_c():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            read = True
    finally:
        idle.set()
        other.join()
    assert read
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_library_that_lacks_something_else_is_named(monkeypatch, begins):
    def fails():
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr("fedbilevel.cli.app.app", fails)
    with pytest.raises(ModuleNotFoundError, match="other"):
        main()


LATE = """
import atexit, hashlib, signal, sys, time
from fedbilevel.runtime import compilation, program

def late(asked, lowered):
    if asked.function is not program.advance:
        return finished(asked, lowered)
    # It compiles while the run still prepares; until that holds Ctrl-C, Python does.
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.01)
    print("now", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

finished, compilation._finished = compilation._finished, late
atexit.register(print, "the script's own end", file=sys.stderr)
"""


@pytest.mark.slow
def test_ctrl_c_in_a_script_does_not_wait_for_a_compiler():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    words = [sys.executable, "-c", LATE + script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "now\n"
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=300)
        finally:
            process.kill()
    # As of any script: by the signal, after its own handlers.
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt: It was compiling, and computed no round." in told
    assert "the script's own end" in told
