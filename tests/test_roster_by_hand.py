"""Who is greeted by a server of a federation, taken, and waited for at its start."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation import Identity, Roster, Terms
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.server import roster as roster_module
from fedbilevel.federation.server.requests import _check
from fedbilevel.federation.wire import EVERYONE, SPARE, Header, pack, unpack

ASKED = Header("measure", "f", "s", "a", EVERYONE, 1, exchange=5)


def refusal(function, *given) -> str:
    try:
        function(*given)
    except RefusedError as error:
        return str(error)
    return ""


def asked(**changes: Any) -> Header:
    return Header(**{**vars(ASKED), **changes})


# Who is asked.


class Net:
    """Carries packets to nodes 10, 11, ...; `answer(node, header)` says what comes."""

    def __init__(self, count=3) -> None:
        self.here = {10 + k for k in range(count)}
        self.asked: list[tuple[int, str]] = []
        self.waits: list[Any] = []
        self.answer: Any = self.hello

    def nodes(self) -> set[int]:
        return set(self.here)

    def key(self, node: int) -> str:
        return f"key{node - 10}"

    def hello(self, node: int, header: Header, **more: Any) -> Any:
        info = {"facts": {"k": 1}, "holds": True, "concludes": False, **more}
        found = replace(header, client=node - 10, algorithm="a", info=info)
        return pack(found, [np.zeros(2)])

    def exchange(self, packets, seconds, enough, largest) -> dict:
        came = {}
        for node, packet in packets.items():
            header = unpack(packet, 1 << 30)[0]
            self.asked.append((node, header.kind))
            if header.kind != "notice":
                found = self.answer(node, header)
                came |= {} if found is None else {node: found}
        self.waits.append((seconds, enough, largest))
        return came


def roster_of(net: Any, clients=3, **more: Any) -> tuple[Roster, list[str]]:
    said: list[str] = []
    terms = Terms(deadline=5.0, patience=1.0, keys=more.pop("keys", ()))
    identity = Identity("f", "s", 1)
    return Roster(net, clients, identity, terms, said.append, **more), said


def test_nodes_are_greeted_once_and_forgotten_when_they_leave():
    net = Net()
    roster, said = roster_of(net)
    roster.refresh()
    roster.refresh()
    assert net.asked == [(10 + k, "hello") for k in range(3)]
    assert said == [f"client {k} is at node {10 + k}" for k in range(3)]
    net.here.discard(11)
    roster.refresh()
    assert roster.reachable([2, 1, 0, 7]) == [2, 0] and len(roster.members) == 3
    net.here.add(11)
    roster.again(2)
    roster.refresh()
    assert net.asked[3:] == [(11, "hello"), (12, "hello")]
    # A start is held once, and hellos are as long as a model, until it is known.
    assert roster.members[0].start is roster.members[2].start
    assert [largest for *_, largest in net.waits] == [1 << 32] * 2
    roster.agree("a")
    roster.again(2)
    roster.refresh()
    assert net.waits[-1][0::2] == (5.0, 16 + SPARE)


def test_no_one_waits_for_all_nodes_that_are_listed():
    net = Net(4)
    net.answer = lambda node, header: None if node > 11 else net.hello(node, header)
    roster, _ = roster_of(net, clients=3)
    every = {10, 11, 12, 13}
    assert roster._enough(every, {10, 11, 12}, 0.0)
    assert not roster._enough(every, {10, 11}, 99.0)
    roster.refresh()
    # 12 and 13 did not answer, and have a second from now on.
    assert roster._enough(every, {10, 11}, 1.01)
    assert not roster._enough(every, {10, 11}, 1.0)
    assert not roster._enough(every, {10, 12}, 99.0)


def refused_hello(more: Any, said_before=False, **settings: Any) -> str:
    net = Net(1)
    roster, said = roster_of(net, clients=1, **settings)
    if said_before:
        roster.refresh()
        roster.agree("a")
        roster.again(0)
        said.clear()
    net.answer = lambda node, header: more(net.hello(node, header))
    roster.refresh()
    return said[0].removeprefix("node 10 is not taken: ")


def changed(**changes: Any):
    def change(packet: bytes) -> bytes:
        header, _, body = unpack(packet, 1 << 20)
        leaf = np.frombuffer(body, "<f8")
        info = {**(header.info or {}), **changes.pop("info", {})}
        return pack(replace(header, info=info, **changes), [leaf])

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"number": 9}, "replayed: answers another hello"),
        ({"kind": "exchange"}, "federation: answers another server"),
        ({"federation": "g"}, "federation: answers another server"),
        ({"settings": "t"}, "settings: runs with other settings"),
        ({"client": 1}, "client: number 1 of 1"),
        ({"info": {"facts": []}}, "garbage: client 0 reports no facts"),
        ({"info": {"holds": 1}}, "garbage: client 0 reports no facts"),
        ({"info": {"concludes": None}}, "garbage: client 0 reports no facts"),
    ],
)
def test_a_hello_that_is_not_taken(change, told):
    assert refused_hello(changed(**change)) == told


def test_a_hello_of_one_with_another_key_or_after_the_start():
    same = changed()
    assert refused_hello(same, keys=("key0",)) == "client 0 is at node 10"
    assert refused_hello(same, keys=("key1",)) == (
        "key: says it is client 0, by its key not"
    )
    told = refused_hello(changed(algorithm="b"), said_before=True)
    assert told == "algorithm: built another algorithm than the server"
    assert refused_hello(same, said_before=True) == "client 0 is at node 10"
    # What it measures may change; what it knows of the task may not.
    measures = changed(info={"measures": True})
    assert refused_hello(measures, said_before=True) == "client 0 is at node 10"
    told = refused_hello(changed(info={"facts": {"k": 2}}), said_before=True)
    assert told.startswith("changed: client 0 says something else of its task")


def test_who_built_another_algorithm_is_not_in_the_run():
    net = Net(2)
    roster, said = roster_of(net, clients=2)
    roster.refresh()
    roster.members[1].algorithm = "b"
    roster.agree("a")
    assert list(roster.members) == [0]
    assert said[-1] == "client 1 is not taken: built another algorithm"
    with pytest.raises(FedbilevelError, match="all clients built another algorithm"):
        roster.agree("b")


def gathered(monkeypatch, count, clients, enough) -> tuple[list[str], list[float]]:
    slept: list[float] = []
    clock = SimpleNamespace(
        monotonic=lambda: 100.0 + sum(slept), sleep=lambda by: slept.append(by)
    )
    monkeypatch.setattr(roster_module, "time", clock)
    roster, said = roster_of(Net(count), clients=clients)
    roster.gather(0.5, enough)
    return [one for one in said if " is at " not in one], slept


def test_a_server_waits_for_all_and_goes_on_with_enough(monkeypatch):
    assert gathered(monkeypatch, 3, 3, 3) == ([], [])
    said, slept = gathered(monkeypatch, 1, 3, 1)
    assert said == ["waiting for clients 1, 2", "continuing without clients [1, 2]"]
    assert slept == [0.2] * 3
    assert gathered(monkeypatch, 1, 2, 1)[0][0] == "waiting for client 1"
    with pytest.raises(
        FedbilevelError, match=r"^clients \[2\] did not come within 0.5 "
    ):
        gathered(monkeypatch, 2, 3, 3)
    assert gathered(monkeypatch, 2, 3, 2)[0][1] == "continuing without clients [2]"


SENT = asked(kind="exchange", number=4, addressees="3", info={"a": 1})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"info": None}, ""),
        ({"client": 1}, "client: answers as client 1"),
        ({"number": 3}, "replayed: answers another packet than the one sent"),
        ({"exchange": 6}, "replayed: answers another packet than the one sent"),
        ({"kind": "refused", "info": {"reason": "limit"}}, "limit: the site has given"),
        ({"kind": "refused", "info": {}, "number": 0}, "None: a reason that is not"),
        ({"kind": "refused", "number": 3}, "replayed: answers another packet"),
        ({"kind": "refused", "addressees": "1"}, "replayed: answers another packet"),
    ],
)
def test_an_answer_is_to_what_was_sent(change, told):
    answer = replace(SENT, **{"client": 0, **change})
    assert refusal(_check, answer, 0, SENT).startswith(told)
    assert bool(refusal(_check, answer, 0, SENT)) is bool(told)
