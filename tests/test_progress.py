"""What is shown while a run loads, is checked, compiles and runs."""

import io
import re
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from rich.progress import Progress

from fedbilevel.cli.progress import Watched, spark_line, watched
from fedbilevel.experiments import Experiment
from fedbilevel.runtime import compilation, compile_times

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


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (None, ["compiling"]),
        ('{"equations": 1, "seconds": 2}', ["compiling", "compiling, at most about N"]),
        ('{"equations": 0, "seconds": 2}', ["compiling"]),
        ("[1, 2]", ["compiling"]),
        ("no times", ["compiling"]),
    ],
)
def test_a_run_says_what_it_does_before_its_first_round(
    kept, words, monkeypatch, tmp_path
):
    file = tmp_path / "cache" / "times.json"
    if kept is not None:
        file.parent.mkdir()
        file.write_text(kept)
    monkeypatch.setattr(compile_times, "_file", lambda: file)
    monkeypatch.setattr(compilation, "_programs", OrderedDict())
    told: list[Any] = []

    def about(word: str, who: str = "") -> None:
        told.append((word, who))

    def watch(done: int, total: int, newest: dict[str, float]) -> None:
        told.append(done)

    RUN.run(watch=watch, about=about)
    assert told[:2] == [("checking", ""), ("checking", "2 clients")]
    assert told[-2:] == [("running", ""), 1]
    said = [re.sub(r"\d+ s", "N", str(word)) for word, _ in told[2:-2]]
    assert said == [*words, "running", *words]  # the start, then the rounds
    if words[1:]:  # two seconds for every equation
        seconds = int(re.findall(r"\d+", told[6][0])[0])
        assert seconds % 2 == 0 and 200 < seconds < 20_000


def test_compile_times_follow_the_latest_programs(monkeypatch, tmp_path):
    file = tmp_path / "cache" / "times.json"
    monkeypatch.setattr(compile_times, "_file", lambda: file)
    assert compile_times.expected(100) is None
    compile_times.note(1000, 10.0)
    assert compile_times.expected(100) == pytest.approx(1.0)
    for _ in range(30):
        compile_times.note(500, 50.0)  # a machine that has other work now
    assert compile_times.expected(100) == pytest.approx(10.0, rel=1e-3)
    monkeypatch.setattr(compile_times, "_file", lambda: None)
    compile_times.note(500, 50.0)
    assert compile_times.expected(100) is None


def test_equations_are_counted_with_those_inside_of_loops():
    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) * 2, None), x, None, length=9)[0]

    traced = jax.jit(looped).trace(1.0)
    assert compile_times.equations(traced.jaxpr) == 3  # a loop, a sine, a product


def test_what_is_said_stays_above_the_bar():
    text = io.StringIO()
    bar = Progress(console=Console(file=text, width=60))
    watch = Watched(bar, bar.add_task("task", metric="", curve="", rate="", who=""))
    watch.say("client [0] is at node 7, and this line is longer than the terminal is")
    expected = "client [0] is at node 7, and this line is longer than the terminal is"
    assert text.getvalue() == expected + "\n"
