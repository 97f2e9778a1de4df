"""What a node or a server can do with packets written by hand: be refused, by name."""

import dataclasses
import functools
import json
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from fedbilevel.errors import FedbilevelError
from fedbilevel.experiments.clients import read_channel
from fedbilevel.federation import Site, SiteLimits
from fedbilevel.federation.refusals import REASONS, RefusedError, read_json, shown
from fedbilevel.federation.server.guard import implausible
from fedbilevel.federation.server.requests import Request, ask
from fedbilevel.federation.wire import unpack
from fedbilevel.runtime import SimulatorRuntime, execute
from fedbilevel.runtime.exchange import Link
from fedbilevel.runtime.job import ABSENT
from tests.cases import case_of, quadratic_data, quadratic_job, some_of
from tests.federation import (
    FEDERATION,
    TERMS,
    Loopback,
    faithful,
    server_of,
    site_of,
)
from tests.tampering import (
    closed,
    kind_of,
    opened,
    renewed,
    with_header,
    with_info,
    with_leaves,
)

BSGM = case_of("local-bsgm").algorithm


def loopback(job, script=faithful) -> Loopback:
    return Loopback({10 + k: site_of(job, k) for k in range(job.clients)}, script)


def lying(node, kind, change):
    """Return a script by which one node changes its answers of one kind."""

    def script(one, packet, net):
        answer = net.sites[one].handle(packet)
        return change(answer) if (one, kind_of(packet)) == (node, kind) else answer

    return script


@functools.cache
def job_through(clients, **settings):
    channel, data = read_channel(**settings), quadratic_data(clients)
    return quadratic_job(BSGM, data, channel=channel)


def same_trees(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


# What a node declares


@pytest.fixture(scope="module")
def three():
    """A job of three clients, and where it ends when all are honest."""
    job = quadratic_job(BSGM, quadratic_data(3))
    return job, execute(server_of(job, loopback(job)), 2).state.server


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1e30, 1e-30, 1e39, float(2**1000)])
def test_a_node_does_not_choose_what_it_counts(three, weight):
    job, honest = three
    script = lying(12, "hello", lambda answer: with_info(answer, weight=weight))
    deployed = execute(server_of(job, loopback(job, script)), 2)
    same_trees(deployed.state.server, honest)


@pytest.mark.slow
def test_weights_of_the_operator_make_the_numbers_of_the_simulator():
    data = quadratic_data(3).weighing([1.0, 2.5, 0.5])
    job = quadratic_job(BSGM, data)
    simulated = execute(SimulatorRuntime(job), 2)
    deployed = execute(server_of(job, loopback(job)), 2)
    for one, other in zip(
        jax.tree.leaves(simulated.state.server),
        jax.tree.leaves(deployed.state.server),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "change",
    [
        lambda packet: with_info(packet, facts={"metrics": ["else"]}),
        lambda packet: with_info(packet, holds=False),
        lambda packet: with_info(packet, concludes=True),
        lambda packet: with_leaves(packet, lambda number, leaf: leaf + 1),
    ],
    ids=["facts", "holds", "concludes", "start"],
)
def test_what_a_site_says_of_itself_stays_as_it_was(three, change):
    job, _ = three
    net, told = loopback(job), []
    roster = server_of(job, net, report=told.append).roster
    before = roster.members[1]
    net.script = lying(11, "hello", change)
    roster.again(1)
    roster.refresh()
    assert roster.members[1] is before
    assert told[-1].startswith("node 11 is not taken: changed: client 1")
    # The same as before is welcome.
    net.script = faithful
    roster.again(1)
    roster.refresh()
    assert told[-1] == "client 1 is at node 11" and roster.members[1] is not before


def test_a_site_may_be_mended_before_the_run_starts(three):
    job, _ = three
    net = loopback(job, lying(11, "hello", lambda p: with_info(p, holds=False)))
    runtime = server_of(job, net)
    held = [member.info["holds"] for member in runtime.roster.members.values()]
    assert held == [True, False, True]


# A hello that cannot be


def deep(packet):
    head, body = opened(packet)
    nested = b"[" * 5000 + b"]" * 5000
    text = json.dumps({**head, "info": 0}).encode()
    return closed(packet, text.replace(b'"info": 0', b'"info": ' + nested), body)


def said(old, new):
    """Return how to write something into a header that no dictionary holds."""

    def change(packet):
        head, body = opened(packet)
        text = json.dumps({**head, "round": 0}).encode()
        assert text.count(old) == 1
        return closed(packet, text.replace(old, new), body)

    return change


HELLOS = {
    "70 axes": lambda p: with_header(p, leaves=[["<f8", [1] * 70, None]]),
    "2^78 numbers": lambda p: with_header(p, leaves=[["<f8", [2**39, 2**39], None]]),
    "empty and huge": lambda p: with_header(
        p, leaves=[["<f8", [0, 2**39, 2**39, 2**39], None]]
    ),
    "a size that is text": lambda p: with_header(p, leaves=[["<f8", ["3"], None]]),
    "a type that is a list": lambda p: with_header(p, leaves=[[["<f8"], [3], None]]),
    "a leaf that is a number": lambda p: with_header(p, leaves=[3]),
    "no leaves at all": lambda p: with_header(p, leaves={}),
    "facts that are a list": lambda p: with_info(p, facts=[1]),
    "a flag that is text": lambda p: with_info(p, holds="yes"),
    "client 2^31": lambda p: with_header(p, client=2**31),
    "10^400": said(b'"round": 0', b'"round": ' + b"9" * 400),
    "10^5000": said(b'"round": 0', b'"round": ' + b"9" * 5000),
    "1e999": said(b'"round": 0', b'"round": 1e999'),
    "NaN": said(b'"round": 0', b'"round": NaN'),
    "a name twice": said(b'"round": 0', b'"round": 0, "round": 0'),
    "half a character": lambda p: with_header(p, algorithm="\ud800"),
    "bytes of no text": said(b'"round": 0', b'"round": 0, "\xff": 0'),
    "nesting": deep,
    "a name of 5000 letters": lambda p: with_header(p, federation="a" * 5000),
    "control characters": lambda p: with_header(p, algorithm="\x1b[31m"),
}


@pytest.mark.parametrize("how", HELLOS)
def test_no_hello_ends_a_running_federation(three, how):
    job, _ = three
    net, told = loopback(job), []
    runtime = server_of(job, net, report=told.append)
    before = dict(runtime.roster.members)
    net.sites[13] = net.sites[12]
    net.script = lying(13, "hello", HELLOS[how])
    runtime.roster.refresh()
    assert runtime.roster.members == before
    assert [line for line in told if line.startswith("node 13 is not taken: ")]
    assert "internal" not in told[-1]


def test_a_large_hello_does_not_fill_the_memory(three):
    job, _ = three
    net, told = loopback(job), []
    large = np.zeros(1 << 22)  # 32 MiB
    listed = [["<f8", [large.size], None]]

    def change(packet):
        return closed(packet, {**opened(packet)[0], "leaves": listed}, large.tobytes())

    answer = change(net.sites[10].handle(net_hello(job)))
    roster = server_of(job, net, report=told.append).roster
    net.script = lambda node, packet, one: answer
    for agreed, most in ((False, 2.5), (True, 0.1)):
        if not agreed:
            roster._largest = 1 << 30  # as before anything was known
        else:
            roster.agree(roster.algorithm)
        roster.again(0)
        tracemalloc.start()
        roster.refresh()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most * large.nbytes
    assert "not taken: oversized" in told[-1]


def net_hello(job):
    """Return the hello of a server."""
    net = loopback(job)
    server_of(job, net)
    return next(packet for _, packet, _ in net.sent if kind_of(packet) == "hello")


def test_a_start_is_held_once_for_all_sites(three):
    members = server_of(three[0], loopback(three[0])).roster.members
    assert members[0].start is members[1].start is members[2].start


# Packets to a site


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A site under masks, and the packets of a run that it answered."""
    job, folder = job_through(3, aggregate="secure"), tmp_path_factory.mktemp("states")
    sites = {}
    for k in range(3):
        limits = SiteLimits(measure="scalars")
        sites[10 + k] = site_of(job, k, folder / str(k), limits=limits)
    net = Loopback(sites)

    def script(node, packet, one):
        gone = kind_of(packet) == "exchange" and node == 12 and len(one.sent) > 9
        return None if gone else one.sites[node].handle(packet)

    net.script = script
    execute(server_of(job, net), 2)
    last = {kind_of(p): p for node, p, _ in net.sent if node == 10}
    assert set(last) == {"hello", "exchange", "agree", "reveal", "measure"}
    return Asked(net.sites[10], folder / "0", last)


@dataclass(frozen=True)
class Asked:
    """A site, and requests of each kind, under a new number whenever they are read."""

    site: Site
    folder: Path
    packets: dict[str, bytes]

    def __getattr__(self, kind: str) -> bytes:
        return renewed(self.packets[kind])


def announced(masked, *clients):
    """Return an exchange that announces any clients, with keys that they could have."""
    key = opened(masked.exchange)[0]["info"]["keys"]["0"]
    keys = {str(client): key for client in clients}
    return with_info(masked.exchange, participants=list(clients), keys=keys)


MALFORMED = {
    "number 3.5": lambda m: with_info(m.exchange, number=3.5),
    "number -1": lambda m: with_info(m.exchange, number=-1),
    "participant 2^62": lambda m: announced(m, 0, 2**62),
    "participant 2^70": lambda m: announced(m, 0, 2**70),
    "a participant that is a list": lambda m: with_info(m.exchange, participants=[[0]]),
    "keys that are a list": lambda m: with_info(m.exchange, keys=[1]),
    "a repeat of text": lambda m: with_info(m.exchange, repeat="1"),
    "no announcement": lambda m: with_header(m.exchange, info=None),
    "nested survivors": lambda m: with_info(m.reveal, survivors=[[2]]),
    "survivor 2^62": lambda m: with_info(m.reveal, survivors=[2**62]),
    "a participant without a key": lambda m: with_info(
        m.reveal, keys={"0": opened(m.reveal)[0]["info"]["keys"]["0"]}
    ),
    "turn 2^40": lambda m: with_header(m.exchange, index=2**40),
    "turn 2^31": lambda m: with_header(m.exchange, index=2**31),
    "stage 7": lambda m: with_header(m.exchange, stage=7),
    "a phase of 5000 letters": lambda m: with_header(m.exchange, name="a" * 5000),
    "a federation of 5000 letters": lambda m: with_header(
        m.measure, federation="a" * 5000
    ),
    "a federation of 100 letters": lambda m: with_header(m.hello, federation="a" * 100),
    "a federation of wide letters": lambda m: with_header(
        m.hello, federation="\u5b57" * 60
    ),
    "keep nothing before 2^50": lambda m: with_header(m.exchange, kept=2**50),
    "the past": lambda m: with_header(m.exchange, accepted=2**50, kept=0),
    "exchange 0": lambda m: with_header(m.exchange, exchange=0),
    "a leaf of another shape": lambda m: with_header(
        m.exchange, leaves=[["<f8", [2, 2], None]]
    ),
    "a header that is a list": lambda m: closed(m.exchange, [], b""),
    "a header that is a number": lambda m: closed(m.exchange, 7, b""),
    "no header": lambda m: closed(m.exchange, b"", b""),
}


def state_of(masked):
    held = masked.site.checkpoints[FEDERATION]
    files = sorted(path.name for path in masked.folder.iterdir())
    return held.newest, sorted(held.kept), set(masked.site.checkpoints), files


@pytest.mark.parametrize("how", MALFORMED)
def test_a_site_refuses_what_no_server_says(masked, how):
    before = state_of(masked)
    answer = opened(masked.site.handle(MALFORMED[how](masked)))[0]
    assert answer["kind"] == "refused" and answer["info"]["reason"] != "internal"
    assert state_of(masked) == before
    # The next one is answered as if nothing had been.
    last = max(masked.site._secrets_of(FEDERATION).site.records)
    again = with_info(masked.exchange, number=last + 1)
    assert kind_of(masked.site.handle(again)) == "exchange"


def test_a_site_refuses_a_leaf_it_holds_in_the_place_of_another(three):
    job, _ = three
    net = loopback(job)
    execute(server_of(job, net), 2)
    asked = [p for node, p, _ in net.sent if (node, kind_of(p)) == (10, "exchange")]
    head, body = opened(asked[-1])
    names = {len(leaf): name for name, leaf in net.sites[10]._held.items() if leaf.ndim}
    places = [n for n, (_, shape, _) in enumerate(head["leaves"]) if len(shape) == 1]
    one, other = places[:2]
    sizes = [head["leaves"][n][1][0] for n in (one, other)]
    assert sizes[0] != sizes[1]
    for place, wrong in ((one, sizes[1]), (other, sizes[0])):
        head["leaves"][place][2] = names[wrong]
    answer = opened(net.sites[10].handle(renewed(closed(asked[-1], head, b""))))[0]
    assert (answer["kind"], answer["info"]["reason"]) == ("refused", "shape")


# What nobody foresaw


def test_an_error_at_a_site_is_a_refusal_and_reported(three):
    job, _ = three
    told = []

    def conclude(state):
        raise ZeroDivisionError("a secret")

    site = site_of(job, 0, conclude=conclude, report=told.append)
    net = Loopback({10: site, 11: site_of(job, 1), 12: site_of(job, 2)})
    runtime = server_of(job, net, left_out=lambda entry: told.append(entry))
    assert runtime.conclude(execute(runtime, 1).state, 1) == {}
    entry = told[-1]
    assert (entry["client"], entry["reason"]) == (0, "internal")
    # Not even the kind of the error leaves the site: it may depend on rows.
    assert entry["detail"] == REASONS["internal"]
    assert any("a secret" in str(line) for line in told[:-1])

    def interrupted(state):
        raise KeyboardInterrupt

    net.sites[10] = site_of(job, 0, conclude=interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.conclude(runtime.blank(), 1)


def test_an_error_while_a_server_reads_is_a_refusal_and_reported(three):
    job, _ = three
    net, told = loopback(job), []
    runtime = server_of(job, net, report=told.append)
    asked = runtime.exchanges.roster.header("measure", round=1, exchange=0)
    state = [np.asarray(leaf) for leaf in jax.tree.leaves(runtime.blank().server)]

    def read(client, header, listed, body):
        return 1 // client

    request = Request(asked, state)
    answers = ask(runtime.roster, [0, 1], lambda client, member: request, read, 1 << 20)
    assert answers.taken == {1: 1} and answers.refused[0].reason == "internal"
    assert "ZeroDivisionError" in told[-1]


# Replies that move the model where nobody wants it


def test_weights_whose_sum_is_not_finite_stop_the_run(three, monkeypatch):
    job, _ = three
    runtime = server_of(job, loopback(job))
    endless = np.full(3, np.inf)
    monkeypatch.setattr(type(runtime.exchanges), "weights", lambda self, who: endless)
    with np.errstate(all="ignore"), pytest.raises(FedbilevelError, match="the sum of"):
        execute(runtime, 2)


def test_a_model_that_is_not_finite_stops_the_run(three, monkeypatch):
    job, _ = three
    runtime = server_of(job, loopback(job))

    def absorb(self, server, reply, turn):
        return jax.tree.map(lambda leaf: leaf + np.inf, server)

    monkeypatch.setattr(Link, "absorb", absorb)
    with pytest.raises(FedbilevelError, match="round 1.*the model holds NaN"):
        execute(runtime, 2)


def ruined(scale, level):
    """Return a change of quantized blocks, which are a scale and levels."""

    def change(number, leaf):
        return scale if leaf.ndim == 0 else np.full(leaf.shape, level)

    return lambda packet: with_leaves(packet, change)


def outside(place):
    def change(number, leaf):
        return np.full(leaf.shape, place) if leaf.dtype.kind == "i" else leaf

    return lambda packet: with_leaves(packet, change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compress", "change", "reason"),
    some_of(
        [
            ("quantize:8", ruined(1.7e308, -128), "range"),
            ("quantize:8", ruined(1.7e308, 127), "not-finite"),
            ("quantize:8", ruined(-1.0, 3), "range"),
            ("quantize:4", ruined(1.0, 8), "range"),
            ("topk:0.7", outside(10**6), "range"),
            ("topk:0.7", outside(-1), "range"),
            ("topk:0.7", outside(0), "range"),
        ],
        2,
    ),
)
def test_a_code_that_nobody_could_have_sent_is_its_senders_fault(
    compress, change, reason
):
    job, named = job_through(4, compress=compress), []
    net = loopback(job, lying(12, "exchange", change))
    deployed = execute(server_of(job, net, left_out=named.append), 1)
    assert {(entry["client"], entry["reason"]) for entry in named} == {(2, reason)}
    assert (deployed.state.attendance == [[1, 1, ABSENT, 1]]).all()


@pytest.mark.slow
def test_of_two_replies_nobody_can_say_which_is_wrong(three):
    """One of two does not move at all: beside it the other seems to move endlessly."""
    job, told, named = quadratic_job(BSGM, quadratic_data(2)), [], []

    def script(node, packet, net):
        answer = net.sites[node].handle(packet)
        if (node, kind_of(packet)) != (11, "exchange"):
            return answer
        head, body = opened(answer)
        asked, back = opened(packet)
        # The server's own point, where both have the same leaves, else zeros.
        same = asked["leaves"] == head["leaves"]
        return closed(answer, head, back if same else bytes(len(body)))

    net = loopback(job, script)
    terms = dataclasses.replace(TERMS, tolerance=10.0)
    runtime = server_of(
        job, net, terms=terms, report=told.append, left_out=named.append
    )
    deployed = execute(runtime, 1)
    assert (deployed.state.attendance != ABSENT).all() and not named
    assert any("one of 2 replies is wrong" in line for line in told)


def test_a_measurement_that_is_not_finite_is_left_out(three):
    job, _ = three
    columns, named = [], []
    for bad in ((), (12,), (10, 11, 12)):

        def script(node, packet, net, bad=bad):
            answer = net.sites[node].handle(packet)
            if node in bad and kind_of(packet) == "measure":
                return with_leaves(answer, lambda number, leaf: leaf + np.nan)
            return answer

        named.clear()
        runtime = server_of(job, loopback(job, script), left_out=named.append)
        columns.append(execute(runtime, 1).columns["upper_loss"][-1])
        gone = [(entry["client"], entry["reason"]) for entry in named]
        assert gone == ([(2, "not-finite")] if len(bad) == 1 else [])
    assert np.isfinite(columns).tolist() == [True, True, False]


# What is shown


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("all is well [1, 2]", "all is well [1, 2]"),
        ("a\nb\rc\x1b[31m", r"a\nb\rc\x1b[31m"),
        ("[red]x[/red] [link=y]", r"\[red]x\[/red] \[link=y]"),
        ("\u202eabc\ud800", r"\u202eabc\ud800"),
        ("x" * 1000, "x" * 400 + "..."),
    ],
)
def test_text_of_others_is_shown_as_one_plain_line(text, plain):
    assert shown(text) == plain


def test_the_words_of_a_refusal_are_cut_and_escaped(three):
    job, _ = three
    evil = "\x1b[2J\n[bold]left out: client 0[/bold]\u202e" * 1000
    told, named = [], []

    def refusing(packet):
        head, _ = opened(packet)
        info = {"reason": evil, "detail": evil}
        return closed(packet, {**head, "kind": "refused", "info": info}, b"")

    net = loopback(job, lying(12, "exchange", refusing))
    net.sites[13] = site_of(job, 0)
    execute(server_of(job, net, report=told.append, left_out=named.append), 1)
    words = [*told, *(str(value) for entry in named for value in entry.values())]
    assert named and all(word.isprintable() and len(word) < 1000 for word in words)
    assert not any("[bold]" in word.replace("\\[", "") for word in words)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b"NaN",
        b"-Infinity",
        b"1e400",
        b"1" * 21,
        b'"\\ud800"',
        b'{"\\udfff": 1}',
        b"[" * 13 + b"]" * 13,
        b"[" * 10**5,
        b"\xff",
        '{"a": 1}'.encode("utf-16"),
        b"",
    ],
)
def test_json_is_read_strictly(text):
    with pytest.raises(ValueError):
        read_json(text)


def test_json_of_ours_is_read():
    value = {"a": [1, -2.5, None, True, "\u5b57\U0001f600"], "b": {"c": 2**63}}
    assert read_json(json.dumps(value).encode()) == value


def test_a_refusal_is_one_plain_line():
    refusal = RefusedError("x\n" * 100, "y\n" * 1000)
    assert str(refusal).isprintable() and len(str(refusal)) < 1000
    with pytest.raises(RefusedError, match="garbage"):
        unpack(b"nothing of ours", 100)


@pytest.mark.parametrize("scale", [1.0, 1e200])
def test_a_reply_is_far_by_its_length_beside_the_median(scale):
    def asked(length):
        reply = {"a": np.array([3.0, 4.0]), "b": np.zeros(2)}
        lengths = (1.0, 1.0, length)
        replies = {
            k: jax.tree.map(lambda leaf, by=by: by * scale * leaf, reply)
            for k, by in enumerate(lengths)
        }
        return implausible(replies, {0: 0, 1: 0, 2: 0}, {0: None}, 10.0)

    assert asked(9.9) == ({}, "")
    told = f"moves {50.5 * scale:.3g}, the median is {5 * scale:.3g}"
    assert asked(10.1) == ({2: told}, "")
