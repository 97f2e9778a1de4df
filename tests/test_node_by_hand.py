"""What `node` does once its site is built, and sentences that commands print."""

import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedbilevel.cli import federation, node, output
from fedbilevel.cli.app import app
from fedbilevel.runtime import progress
from fedbilevel.runtime.progress import COMPILING, RUNNING
from tests import test_wiring_sites
from tests.wiring import passed_on

# What a node does once it is built.


def site_of(**more: Any) -> Any:
    usual = {"client": 3, "folder": Path("kept"), "largest": 1234, "is_over": False}
    return SimpleNamespace(**usual | more, handle="handle", report="report")


@pytest.fixture
def played(monkeypatch):
    """Replace what a node is in: `seen` has what it asked for, in order."""
    seen: dict[str, Any] = {"steps": [], "said": [], "handlers": {}}

    def ending_soon(rests):
        seen["rests"] = rests
        return nullcontext()

    def handle(number, how):
        seen["handlers"][number] = how

    def say(self, text, **_):
        assert self.stderr
        seen["said"].append(text)

    monkeypatch.setattr(node, "ending_soon", ending_soon)
    monkeypatch.setattr(node.signal, "signal", handle)
    monkeypatch.setattr(
        node, "collect_as_usual", lambda: seen["steps"].append("collects")
    )
    monkeypatch.setattr(node.Console, "print", say)
    return seen


def test_a_node_serves_until_it_is_over_or_asked_to_stop(played, monkeypatch):
    site = site_of()
    stops, compiles = [], []

    def serve_packets(link, handle, *, largest, asked_to_stop, report):
        assert (link, handle, largest, report) == ("link", "handle", 1234, "report")
        assert played["steps"] == ["collects"]
        stops.append(asked_to_stop())
        site.is_over = True
        stops.append(asked_to_stop())
        site.is_over = False
        played["handlers"][signal.SIGTERM](signal.SIGTERM, None)
        stops.append(asked_to_stop())
        for stage in (COMPILING, RUNNING):
            progress.report(stage)
            compiles.append(played["rests"]())

    flower = "fedbilevel.federation.flower.node.serve_packets"
    monkeypatch.setattr(flower, serve_packets)
    node._take_part(site, "link")
    assert stops == [False, True, True] and compiles == [True, False]
    assert set(played["handlers"]) == {signal.SIGINT, signal.SIGTERM}
    first = "Client 3 is ready, its state is in kept"
    assert played["said"] == [first, "Ended as asked."]
    monkeypatch.setattr(flower, lambda *given, **more: setattr(site, "is_over", True))
    node._take_part(site, "link")
    assert played["said"][2:] == [first, "The federation is over."]


def test_a_node_that_is_asked_to_end_does_so_while_it_is_built(
    played, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    case, asked = test_wiring_sites.CASES["node"], []
    place = "fedbilevel.experiments.sites.build_site"
    built = {place: lambda given: asked.append(played["rests"]())}
    passed_on(case._replace(spied={**case.spied, **built}), "", monkeypatch)
    assert asked == [True]


# Sentences.


@pytest.mark.parametrize("words", ["", "--target 0.5 --iterations 9"])
def test_a_plan_has_one_aim(words):
    done = CliRunner().invoke(app, ["plan", "quadratic", *words.split()])
    assert done.exit_code == 2
    told = "give --target, the value to reach, or --iterations, and not both."
    assert told in " ".join(done.output.split())


def test_a_federation_is_not_resumed(tmp_path):
    (tmp_path / "federation.json").touch()

    def told() -> str:
        done = CliRunner().invoke(app, ["resume", str(tmp_path)])
        assert done.exit_code != 0
        return str(done.exception) + done.output

    again = "Continue it with the command that began it, `fedbilevel serve`."
    assert f"holds a federation. {again}" in " ".join(told().split())
    (tmp_path / "result.json").touch()
    assert "holds a federation. It has finished." in " ".join(told().split())


def test_a_server_without_a_preparation_says_that_there_will_be_no_model(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    case, said = test_wiring_sites.CASES["serve"], []
    line = case.line.replace("quadratic", "regularization")
    made = test_wiring_sites.CASES["serve --preparation"].line
    monkeypatch.setattr(federation, "_say", said.append)
    spied = {k: one for k, one in case.spied.items() if not k.endswith("._say")}
    case = case._replace(spied=spied)
    passed_on(case._replace(line=line), "", monkeypatch)
    assert said == [federation._NO_MODEL]
    for other in (f"{line} --json", made, case.line):
        passed_on(case._replace(line=other), "", monkeypatch)
    assert len(said) == 1


def test_words_of_others_are_printed_as_they_are(capsys, monkeypatch):
    long = "one [b]two[/b] " + "word " * 40
    federation._say(long)
    seen = capsys.readouterr()
    assert (seen.out, seen.err.strip()) == ("", long.strip())
    for name in ("result_table", "cost_table"):
        monkeypatch.setattr(f"fedbilevel.report.{name}", lambda given: "")
    found: Any = SimpleNamespace(
        quality={}, events=["an [b]event[/b]"], ended="at [b]9[/b]", algorithm="a"
    )
    output.show_result(found, None, as_json=False)
    lines = capsys.readouterr().out.split("\n")
    assert "Note: an [b]event[/b]." in lines and "Ended at [b]9[/b]." in lines
