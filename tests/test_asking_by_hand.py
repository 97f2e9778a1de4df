"""Who is asked again, waited for or left out in an exchange, and what ends a run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.federation import Roster, Terms
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.server import exchanges as exchanges_module
from fedbilevel.federation.server.exchanges import Exchanges
from fedbilevel.federation.server.requests import Answers, Request, ask
from fedbilevel.federation.wire import Header, mask_of, pack
from tests.test_roster_by_hand import Net, asked, roster_of


class Sites(Net):
    """Nodes that answer exchanges with their number, or as `say` says."""

    def __init__(self, count=3) -> None:
        super().__init__(count)
        self.answer, self.requests = self.reply, []
        self.say: dict[int, Any] = {}

    def reply(self, node: int, header: Header) -> Any:
        if header.kind == "hello":
            return self.hello(node, header)
        self.requests.append((node, header))
        how = self.say.get(node - 10)
        said = how(header) if how else {}
        if said is None:
            return None
        found = replace(header, **{"client": node - 10, **said})
        return pack(found, [np.full(2, node - 10.0)])


def number_of(client, info, listed, body):
    return np.frombuffer(body, "<f8")[0]


def everybody(client, member):
    return REQUEST


REQUEST = Request(asked(kind="exchange"))


def refusing(reason):
    return lambda header: {"kind": "refused", "info": {"reason": reason}}


def world(count=3) -> tuple[Sites, Roster, list[str]]:
    net = Sites(count)
    roster, said = roster_of(net, clients=count)
    roster.refresh()
    said.clear()
    return net, roster, said


def test_one_packet_is_made_for_all_who_are_asked_the_same():
    net, roster, _ = world()
    other = Request(asked(kind="exchange", accepted=2))
    requests = {0: REQUEST, 1: other, 2: REQUEST}
    found = ask(roster, [0, 1, 2], lambda k, _: requests[k], number_of, 1 << 20)
    assert found.taken == {0: 0.0, 1: 1.0, 2: 2.0} and found.came == 3
    masks = {node: header.addressees for node, header in net.requests}
    assert masks == {10: mask_of([0, 2]), 11: mask_of([1]), 12: mask_of([0, 2])}
    assert {header.number for _, header in net.requests} == {2}  # after the hello
    down, up, more = found.traffic.tolist()
    # Nothing but headers goes down; 2 numbers of 8 bytes come up from each.
    assert up > 48 and more == down + up - 48


def test_a_new_process_is_asked_a_second_time():
    net, roster, said = world()
    for reason, greets in (("unknown", False), ("federation", True)):
        net.asked.clear()
        net.requests.clear()
        roster.members[1].known = frozenset({"x"})
        left = [refusing(reason)]
        net.say = {1: lambda header, left=left: left.pop()(header) if left else {}}
        found = ask(roster, [0, 1], everybody, number_of, 1 << 20)
        assert sorted(found.taken) == [0, 1] and not found.refused
        assert roster.members[1].known == frozenset() and found.came == 2
        assert [node for node, _ in net.requests] == [10, 11, 11]
        assert ((11, "hello") in net.asked) is greets
        # Its mask names it alone, under a new number.
        (_, first), (_, _), (_, last) = net.requests
        assert last.addressees == "2" and last.number > first.number
    net.say = {1: refusing("unknown"), 0: refusing("limit")}
    found = ask(roster, [0, 1], everybody, number_of, 1 << 20)
    reasons = {k: one.reason for k, one in found.refused.items()}
    assert reasons == {0: "limit", 1: "unknown"} and found.came == 0
    assert len([node for node, _ in net.requests if node == 10]) == 2


def test_an_answer_that_cannot_be_read_is_reported():
    _, roster, said = world(1)

    def fails(client, info, listed, body):
        raise KeyError("a name")

    found = ask(roster, [0], everybody, fails, 1 << 20)
    assert found.refused[0].reason == "internal" and found.came == 0
    assert said == ["client 0: internal: reading it raised KeyError, 'a name'"]


def test_who_was_late_is_waited_for_as_long_as_the_others_took_again():
    net, roster, said = world()
    net.say = {2: lambda header: None}
    ask(roster, [0, 1, 2], everybody, number_of, 7 << 20)
    assert said == ["client 2 is late"] and roster.members[2].late
    ask(roster, [0, 1, 2], everybody, number_of, 7 << 20)
    assert said == ["client 2 is late"]
    seconds, enough, largest = net.waits[-1]
    assert (seconds, largest) == (5.0, 7 << 20)
    assert not enough({10}, 50.0)  # the punctual are waited for
    assert not enough({10, 11}, 3.0)  # they took 3
    assert not enough({10, 11}, 7.0) and enough({10, 11}, 7.01)  # and 3 and 1 more
    net.say = {}
    ask(roster, [2], everybody, number_of, 1 << 20)
    assert said[1:] == ["client 2 is back in time"] and not roster.members[2].late
    roster.members[2].late = True
    ask(roster, [2], everybody, number_of, 1 << 20)
    assert not net.waits[-1][1]({12}, 99.0)  # where all were late they have their time


# Whether replies are enough, and when to stop asking.


def exchanges_of(minimum=2, check=lambda count: None, clients=4) -> tuple[Any, list]:
    said: list[str] = []
    made: Any = Exchanges.__new__(Exchanges)
    made._futile, made._stuck = 0, []
    made.job = SimpleNamespace(
        channel=SimpleNamespace(reduction=SimpleNamespace(check=check))
    )
    made.roster = SimpleNamespace(
        terms=Terms(minimum=minimum),
        report=said.append,
        weights=[1.0, 2.0, 4.0, 1.0][:clients],
        members={k: SimpleNamespace(weight=k + 1.0) for k in (0, 2)},
    )
    return made, said


def answers(taken=(), refused=()) -> Answers:
    why = RefusedError("limit", "no more")
    return Answers(dict.fromkeys(taken), dict.fromkeys(refused, why))


def test_as_many_replies_as_the_terms_say_or_as_were_asked():
    made, _ = exchanges_of(minimum=2)
    seen = [made.enough(answers(range(count)), [0, 1, 2]) for count in range(4)]
    assert seen == [False, False, True, True]
    # One that was asked alone is enough, and none is not.
    assert made.enough(answers([0]), [0]) and not made.enough(answers(), [])

    def check(count) -> None:
        if count < 3:
            raise InvalidInputError("it needs 3.")

    made, said = exchanges_of(minimum=1, check=check)
    assert [made.enough(answers(range(n)), [0, 1, 2]) for n in (2, 3)] == [False, True]
    assert said == ["2 replies are too few: it needs 3."]


def test_weights_are_those_of_the_server():
    made, _ = exchanges_of()
    assert made.weights([2, 1, 0]).tolist() == [3.0, 0.0, 1.0]
    assert float(made.share([1, 2])) == 6 / 8 and float(made.share([0])) == 1 / 8


@pytest.fixture
def slept(monkeypatch):
    found: list[float] = []
    monkeypatch.setattr(exchanges_module, "time", SimpleNamespace(sleep=found.append))
    return found


def test_three_times_nothing_but_refusals_end_the_run(slept):
    made, said = exchanges_of()
    made.pause(answers((), (0,)))
    made.pause(answers((), ()))  # nobody came, which is no refusal
    made.pause(answers((), (0,)))
    made.pause(answers((), (1,)))
    assert slept == [0.5] * 4 and said == ["only 0 replies, asking again"] * 4
    told = r"refused 3 times in a row. By client: {0: 'limit: no more'}"
    with pytest.raises(FedbilevelError, match=told):
        made.pause(answers((), (0,)))


def test_one_reply_forgives_refusals(slept):
    made, _ = exchanges_of()
    for _ in range(2):
        made.pause(answers((), (0,)))
    made.pause(answers((1,), (2,)))
    for _ in range(2):
        made.pause(answers((), (3,)))


def test_ten_times_the_same_client_ends_the_run(slept):
    made, _ = exchanges_of()
    for _ in range(9):
        made.pause(answers((0,), (1, 2)))
    made.settled()
    for number in range(9):
        made.pause(answers((0,), (1, 2) if number % 2 else (1, 3)))
    told = r"1 replies are too few, and clients \[1\] were refused 10 times in a row"
    with pytest.raises(FedbilevelError, match=told):
        made.pause(answers((0,), (1, 2)))


def test_thirty_times_clients_in_turn_end_the_run(slept):
    made, _ = exchanges_of()
    for number in range(29):
        made.pause(answers((0,), (1 + number % 2,)))
    told = r"clients \[1, 2\] were refused 30 times in a row"
    with pytest.raises(FedbilevelError, match=told):
        made.pause(answers((0,), (2,)))
    made.settled()
    made.pause(answers((0,)))
    for number in range(29):  # once there was none to blame
        made.pause(answers((0,), (1 + number % 2,)))


def test_who_is_left_out_is_written_down_in_order():
    made, said = exchanges_of()
    noted: list[dict] = []
    made.left_out = noted.append
    header = asked(round=7, name="phase")
    made.name_refused(header, answers((), (2, 0)))
    assert [one["client"] for one in noted] == [0, 2]
    assert noted[0] == {
        "round": 7,
        "exchange": 5,
        "phase": "phase",
        "client": 0,
        "reason": "limit",
        "detail": "no more",
    }
    assert said[0] == ("round 7, exchange 5: client 0 is left out (limit: no more)")
    made.name_refused(asked(), answers((), (1,)))
    assert noted[2]["phase"] == "measure"
