"""Loops that keep a federation going, with processes, a SuperLink and a clock in play.

Nothing is started.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedbilevel.deployment import apps, serving
from fedbilevel.errors import FedbilevelError, InvalidInputError


class Clock:
    """A clock that goes on while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, []
        self.then: Any = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.then()


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(serving, "time", found)
    return found


class Played:
    """A process that only notes what is done with it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self.alive, self.failed = True, False
        self.did: list[str] = []

    def start(self):
        self.did.append("start")
        self.alive = True
        return self

    def kill(self) -> None:
        self.did.append("kill")
        self.alive = False

    def revive(self) -> bool:
        self.did.append("revive")
        return False


class Link:
    """A SuperLink that numbers runs from 7 on."""

    address = "here:9"

    def __init__(self, folder: Path) -> None:
        self.folder, self.did, self.run = folder, [], 6
        self.made: list[Played] = []

    def submit(self, settings) -> int:
        self.run += 1
        self.did.append(("submit", settings))
        return self.run

    def stop(self, run: int) -> None:
        self.did.append(("stop", run))

    def server(self, run: int) -> Played:
        self.did.append(("server", run))
        self.made.append(Played("serverapp", self.folder))
        return self.made[-1]


def serving_of(folder: Path) -> tuple[Any, Any]:
    link: Any = Link(folder)
    revived: list[int] = []
    made = serving._Serving(
        folder, link, {"a": 1}, [], lambda: revived.append(link.run)
    )
    return made, link


# The server's process.


def test_a_server_is_started_for_a_run_and_replaced_in_another(tmp_path, clock):
    made, link = serving_of(tmp_path)
    made.begin()
    assert link.did == [("submit", {"a": 1}), ("server", 7)]
    assert (made.run, made.since, made.servers) == (7, 100.0, link.made)
    assert link.made[0].did == ["start"]
    (tmp_path / apps.PROCESS).touch()
    clock.now = 130.0
    made.begin()
    # The lost run is ended first, and the server of it.
    assert link.did[2:] == [("stop", 7), ("submit", {"a": 1}), ("server", 8)]
    assert link.made[0].did == ["start", "kill"] and link.made[1].did == ["start"]
    assert made.servers == [link.made[1]] and (made.run, made.since) == (8, 130.0)
    assert not (tmp_path / apps.PROCESS).exists()


def test_before_a_run_is_asked_for_the_superlink_is_looked_at(tmp_path, clock):
    seen: list[Any] = []
    link: Any = Link(tmp_path)
    made = serving._Serving(tmp_path, link, {}, [], lambda: seen.append(list(link.did)))
    made.begin()
    assert seen == [[]]


@pytest.mark.parametrize(
    ("alive", "failed", "came", "after", "lost"),
    [
        (True, False, True, 999.0, False),
        (True, False, False, 179.9, False),
        (True, False, False, 180.0, "did not begin within 180 seconds"),
        (False, False, False, 0.0, True),
        (False, False, True, 999.0, True),  # it was ended, and is started again
        (False, True, True, 0.0, "the server ended with an error"),
    ],
)
def test_when_a_server_is_lost(alive, failed, came, after, lost, tmp_path, clock):
    made, link = serving_of(tmp_path)
    made.begin()
    link.made[0].alive, link.made[0].failed = alive, failed
    link.made[0].log.write_text("its end")
    (tmp_path / "superlink.log").write_text("the link's end")
    if came:
        (tmp_path / apps.PROCESS).touch()
    clock.now += after
    if not isinstance(lost, str):
        assert made.is_lost() is lost
        return
    told = f"{lost}. Its last words: its end The SuperLink's: the link's end"
    with pytest.raises(FedbilevelError, match=told):
        made.is_lost()


def test_what_a_server_says_of_its_end_is_raised(tmp_path, clock):
    made, _ = serving_of(tmp_path)
    made.begin()
    (tmp_path / apps.ERROR).write_text("its own sentence")
    with pytest.raises(FedbilevelError, match="^its own sentence$"):
        made.is_lost()


def test_a_farewell_is_waited_for_and_not_for_ever(tmp_path, clock):
    made, link = serving_of(tmp_path)
    made.begin()
    made.wait()
    assert 115.0 <= clock.now < 115.1 and set(clock.slept) == {0.05}
    link.made[0].alive, clock.slept = False, []
    made.wait()
    assert clock.slept == []


# The look at what is there.


class Seen:
    """What a look shows, says and tells a watch."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.about: list[tuple[str, str]] = []
        self.watched: list[tuple[int, int, dict]] = []
        self.crowd: Any = [Played("node-0", folder), Played("node-1", folder)]
        self.look = serving._Look(
            folder,
            lambda *now: self.watched.append(now),
            self.said.append,
            lambda *now: self.about.append(now),
            self.crowd,
        )


def test_a_look_keeps_nodes_alive_and_shows_the_progress(tmp_path, clock):
    seen = Seen(tmp_path)
    seen.look()
    assert [one.did for one in seen.crowd] == [["revive"], ["revive"]]
    assert seen.watched == [(0, 0, {})] and not seen.about
    path = tmp_path / apps.PROGRESS
    path.write_text('{"done": 3, "total": 9, "newest": {"loss": 1}}')
    seen.look()
    assert seen.watched[1:] == [(3, 9, {"loss": 1})]
    path.write_text('{"done": 4, "tot')  # half written: what was known holds
    seen.look()
    assert seen.watched[2:] == [(3, 9, {"loss": 1})] and not seen.said


def test_an_exchange_is_reported_after_ten_seconds_and_once(tmp_path, clock):
    seen = Seen(tmp_path)

    def at(exchange: int, moment: float) -> list[str]:
        held = {"exchange": exchange, "took_part": [0, 2], "asked": 3, "seconds": 1.234}
        text = json.dumps({"done": 4, "exchange": held})
        (tmp_path / apps.PROGRESS).write_text(text)
        clock.now, seen.said[:] = moment, []
        seen.look()
        return list(seen.said)

    told = "exchange {}, in round 5: 2 of 3 clients in 1.2 s"
    assert at(1, 110.0) == [] and at(1, 110.1) == [told.format(1)]
    assert at(2, 120.1) == [] and at(2, 120.2) == [told.format(2)]
    assert at(2, 140.0) == []  # no news
    assert at(3, 140.1) == [told.format(3)]
    assert seen.about == [("running", "2 of 3 clients")] * 6


def test_new_whole_lines_of_the_log_are_shown_once(tmp_path, clock):
    log = tmp_path / apps.LOG
    log.write_text("of an earlier server\n")
    seen = Seen(tmp_path)
    seen.look()
    assert seen.said == []
    with log.open("a") as file:
        file.write("one\ntwo\nthr")
    seen.look()
    assert seen.said == ["one", "two"]
    with log.open("a") as file:
        file.write("ee\n")
    seen.look()
    seen.look()
    assert seen.said == ["one", "two", "three"]


# The loop.


def looped(tmp_path, clock, monkeypatch, events) -> tuple[Any, Any, list]:
    """Run the loop; `events` happen at its sleeps, one after the other."""
    made, link = serving_of(tmp_path)
    superlink: Any = Played("superlink", tmp_path)
    waited, looks, left = [], [], list(events)

    def wait_for_port(*given: Any) -> None:
        waited.append((*given, list(superlink.did)))

    monkeypatch.setattr(serving, "wait_for_port", wait_for_port)
    monkeypatch.setattr(serving.Result, "load", lambda folder: ("loaded", folder))
    clock.then = lambda: left and left.pop(0)(link, superlink)
    look: Any = lambda: looks.append(1)  # noqa: E731
    assert serving._until_done(made, superlink, look) == ("loaded", tmp_path)
    assert len(looks) == len(events)
    return link, superlink, waited


def ends(link, superlink) -> None:
    """The run is done, and its server leaves."""
    (link.folder / "result.json").touch()
    link.made[-1].alive = False


def test_a_run_that_goes_well_is_started_once(tmp_path, clock, monkeypatch):
    quiet = lambda link, superlink: None  # noqa: E731
    link, superlink, waited = looped(tmp_path, clock, monkeypatch, [quiet, quiet, ends])
    assert [name for name, _ in link.did] == ["submit", "server"]
    assert not waited and not superlink.did and clock.slept == [0.2] * 3


def test_a_server_that_was_killed_is_replaced(tmp_path, clock, monkeypatch):
    def killed(link, superlink) -> None:
        link.made[-1].alive = False

    link, _, waited = looped(tmp_path, clock, monkeypatch, [killed, ends])
    names = [name for name, _ in link.did]
    assert names == ["submit", "server", "stop", "submit", "server"] and not waited


def test_a_superlink_that_ended_takes_the_server_with_it(tmp_path, clock, monkeypatch):
    def down(link, superlink) -> None:
        superlink.alive = False

    link, superlink, waited = looped(tmp_path, clock, monkeypatch, [down, ends])
    assert link.made[0].did == ["start", "kill"] and len(link.made) == 2
    # Started, and then waited for.
    assert waited == [("here:9", superlink, ["start"])]


def test_only_nodes_that_are_known_are_started(tmp_path):
    served: Any = SimpleNamespace(experiment="e", folder=tmp_path, tuning={"trials": 1})
    for nodes, told in (("odd", "nodes 'odd': choose"), ("stock", "Choose persistent")):
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(InvalidInputError, match=told),
        ):
            patch.setattr(serving, "counted_here", lambda one: (one, ""))
            serving.federate(served, nodes=nodes, watch=lambda *_: None)
