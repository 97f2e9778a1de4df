"""Every field of every packet, both ways, with whatever may stand in it.

A packet that was changed is refused by name, or it is one that could have been sent.
Nothing else happens: no error leaves a reader, what is refused changes nothing, and
afterwards the right packet is answered as before.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from benchmarks.tests_of_lines import Lines
from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import strategies as st

from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import SiteSchema
from fedbilevel.experiments.clients import read_channel
from fedbilevel.experiments.federated import agreed
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Identity, Roster, SiteLimits, Terms
from fedbilevel.federation.server.measuring import conclude, measure
from fedbilevel.federation.wire import unpack
from fedbilevel.runtime import execute, keys
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.federation import FEDERATION, Loopback, server_of, site_of
from tests.tampering import closed, kind_of, opened

BSGM = case_of("local-bsgm").algorithm
KINDS = ("hello", "exchange", "measure", "conclude", "agree", "reveal")
LEDGER = ("spent",)
CONCLUDED = {"one": 1.0, "names": ["a", "b"]}
CONCLUDES = {"one": "number", "names": "texts"}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(2**40, 2**53 - 1, 2**53, 2**62, 2**63, 2**64, 2**70, -(2**70), 10**400),
    *(0.0, -0.0, 0.5, 3.5, 1e308, -1e308, 1e-320, float("nan"), float("inf")),
    *("", "a", "0", "1", "a" * 129, "a" * 5000, "\x00", "\n", "\x1b[2J", "\ud800"),
    *("\u5b57" * 60, "../../etc", "[red]x[/red]", "NaN", "<f8", "<i8", "|O", "hello"),
    *([], [[]], {}, [{}], {"a": 1}, {"": None}, {"\udfff": 1}, [0] * 1000, [2**70]),
    *([1.5], ["x"], [None], [[0, 1], [2]], [True], [-1], {"0": "00"}, {"0": 1}),
    [[[[[[[[[[[[[[[]]]]]]]]]]]]]]],
    ["<f8", [1] * 70, None],
    ["<f8", [2**39, 2**39], None],
    ["<f8", [0, 2**62], None],
    ["<f8", [], "00"],
]
AGREED = 300  # hellos from which a job is built, which takes a while
TEXTS = [b"NaN", b"Infinity", b"1e999", b"-1e999", b"1" * 4999, b"[" * 9999, b'"']


def mutated(packet: bytes, draw: random.Random) -> bytes:
    """Return a packet with one thing changed, or a few."""
    head, body = opened(packet)
    how = draw.randrange(12)
    if how == 0:
        return closed(packet, head, changed_bytes(body, draw))
    if how == 1:
        return closed(packet, changed_text(json.dumps(head).encode(), draw), body)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        change_one(head, draw)
    return closed(packet, head, body)


def change_one(head: Any, draw: random.Random) -> None:
    """Change, drop or add a value somewhere in a header."""
    holder: Any = None
    name: Any = None
    here, inside = head, True
    while inside:
        names = list(here) if isinstance(here, dict) else range(len(here))
        if not names:
            break
        holder, name = here, draw.choice(list(names))
        here = holder[name]
        inside = isinstance(here, dict | list) and draw.random() < 0.8
    if holder is None:
        return
    what = draw.randrange(10)
    if what == 0:
        del holder[name]
    elif what == 1 and isinstance(holder, dict):
        holder[draw.choice(["more", "leaves", "info", "kind", "", "0"])] = value(draw)
    elif what == 2 and isinstance(holder, list):
        holder.append(value(draw))
    elif what == 3 and isinstance(here, int | float) and abs(here) < 2**64:
        holder[name] = here + draw.choice((-1, 1, 0.5, 2**31, 2**32, 2**53))
    elif what == 4:
        holder[name] = str(here)
    else:
        holder[name] = value(draw)


def value(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(VALUES))  # it may be changed in turn


def changed_text(text: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(text))
    return draw.choice(
        [
            text[:place],
            text[:place] + draw.choice(TEXTS) + text[place:],
            text[:-1] + b',"kind":"hello"}',
            text + text,
            text.decode(errors="replace").encode("utf-16"),
            bytes(draw.randrange(256) for _ in range(20)),
        ]
    )


def changed_bytes(body: bytes, draw: random.Random) -> bytes:
    numbers = [np.nan, np.inf, -np.inf, 1e308, 1e-320, -0.0]
    number = np.asarray(draw.choice(numbers), "<f8").tobytes()
    place = draw.randrange(len(body) + 1)
    return draw.choice(
        [
            body[:place],
            body + b"\0" * draw.choice((1, 8, 4096)),
            (body[:place] + number + body[place + 8 :])[: len(body)],
            bytes(draw.randrange(256) for _ in range(len(body))),
        ]
    )


def number_of(packet: bytes) -> int:
    """Return the number of the request that a packet is, or answers."""
    return opened(packet)[0]["number"]


# A site that is sent such packets


class Target:
    """Something that reads packets; `read` returns a refusal's reason, or "" for none.

    `state` is what nothing that was refused may change.
    """

    def __init__(
        self,
        packets: dict[str, bytes],
        read: Callable[[str, bytes], str],
        state: Callable[[], Any],
        sound: Callable[[], None],
    ) -> None:
        self.packets, self.read, self.state, self.sound = packets, read, state, sound
        self.seen: Counter[tuple[str, str]] = Counter()

    def attack(self, draw: random.Random, kind: str) -> None:
        """Feed one packet that was changed."""
        packet = mutated(self.packets[kind], draw)
        before = self.state()
        reason = self.read(kind, packet)
        assert reason != "internal", (kind, packet)
        if reason:
            assert self.state() == before, (kind, reason, packet)
        self.seen[kind, reason] += 1


def sites_of(job):
    """Return the sites of a job, by node; they measure, and have a conclusion."""
    more: dict[str, Any] = {"limits": SiteLimits(measure="scalars")}
    more["conclude"] = lambda state: CONCLUDED
    return {10 + k: site_of(job, k, **more) for k in range(job.clients)}


def run_of(job):
    """Return sites, and the last packets and answers of a run in which one was lost."""
    net = Loopback(sites_of(job))

    def script(node, packet, one):
        gone = kind_of(packet) == "exchange" and node == 12 and len(one.sent) > 9
        return None if gone else one.sites[node].handle(packet)

    net.script = script
    runtime = server_of(job, net)
    runtime._concludes = CONCLUDES
    runtime.conclude(execute(runtime, 2).state, 2)
    last = {kind_of(p): (p, a) for node, p, a in net.sent if node == 10}
    return net, last


def site_target(job) -> Target:
    net, last = run_of(job)
    site = net.sites[10]
    held, secrets = site.checkpoints[FEDERATION], site._secrets[FEDERATION]
    kept, leaves, records = dict(held.kept), dict(site._held), secrets.site.records
    # As before all requests, so that each of them is new.
    newest = replace(held.newest, number=0)
    told = {name: copy.deepcopy(getattr(site.ledger, name)) for name in LEDGER}

    def restore():
        # Numbers only grow: a packet that was taken ends all before it.
        site._secrets = {FEDERATION: secrets}
        secrets.site.records = dict(records)
        site.checkpoints = {FEDERATION: held}
        held.kept, held.newest, site._held = dict(kept), newest, dict(leaves)
        site._answered = (None, b"")
        for name, value in told.items():
            setattr(site.ledger, name, copy.deepcopy(value))

    def answer_to(packet):
        restore()
        return site.handle(packet)

    answers = {kind: unpack(answer_to(p), 1 << 30)[2] for kind, (p, _) in last.items()}

    def read(kind, packet):
        answer = opened(site.handle(packet))[0]
        if answer["kind"] == "refused":
            return answer["info"]["reason"]
        # It could have been sent: answered, and undone, for the next one.
        assert answer["kind"] in KINDS and answer["client"] == 0
        restore()
        return ""

    def state():
        now = site.checkpoints.get(FEDERATION)
        names = {n: id(one) for n, one in now.kept.items()} if now else None
        return set(site.checkpoints), names, now and now.newest, set(site._held)

    def sound():
        for kind, (packet, _) in last.items():
            answer = answer_to(packet)
            assert kind_of(answer) == kind
            assert unpack(answer, 1 << 30)[2] == answers[kind]

    restore()
    packets = {kind: packet for kind, (packet, _) in last.items()}
    return Target(packets, read, state, sound)


# A server that is answered so


def server_target(job) -> Target:
    """Return a server of which one client alone answers, so that no mean is taken."""
    net, named = Loopback(sites_of(job)), []
    answered: list[bytes] = []

    def script(node, packet, one):
        asked = kind_of(packet)
        if asked == "hello" and not answered:
            return one.sites[node].handle(packet)
        return answered[0] if node == 10 and answered else None

    net.script = script
    runtime = server_of(job, net, left_out=named.append)
    exchanges, start = runtime.exchanges, runtime.blank().server
    packets, questions = {}, {}

    def stand(client):
        return 0, 0

    head = exchanges.roster.header("exchange", round=1, exchange=1)
    question = exchanges.question(head, start, (keys.ROUNDS, 0), 0, [0, 1, 2])
    questions["exchange"] = lambda: exchanges.exchange(question, stand)
    head = exchanges.roster.header("measure", round=1, exchange=0)
    questions["measure"] = lambda head=head: measure(exchanges, head, start, stand)
    head = exchanges.roster.header("conclude", round=1, exchange=0)
    questions["conclude"] = lambda head=head: conclude(
        exchanges, head, start, stand, CONCLUDES
    )

    def honest(node, packet, one):
        answer = one.sites[node].handle(packet)
        packets.setdefault(kind_of(packet), answer) if node == 10 else None
        return answer

    net.script = honest
    before = {kind: question().taken[0] for kind, question in questions.items()}
    net.script = script

    def read(kind, packet):
        answered[:], named[:] = [packet], []
        net.sent.clear()
        runtime.roster._number = number_of(packets[kind]) - 1
        answers = questions[kind]()
        # One that answers as if it had forgotten us is asked, and read, twice.
        runtime.roster._met.add(10)
        for member in runtime.roster.members.values():
            member.late = False
        if 0 in answers.taken:
            finite = jax.tree.leaves(answers.reply)
            assert all(np.isfinite(np.asarray(leaf)).all() for leaf in finite)
            return ""
        assert [entry["client"] for entry in named] == [0]
        entry = named[0]
        assert f"{entry['reason']}{entry['detail']}".isprintable()
        return entry["reason"]

    def state():
        return {k: one.node for k, one in runtime.roster.members.items()}

    def sound():
        net.script = honest
        # Sites have answered every number until then, and take none of them again.
        runtime.roster._number = max(map(number_of, packets.values()))
        for kind, question in questions.items():
            same = (question().taken[0], before[kind])
            jax.tree.map(np.testing.assert_array_equal, *same)
        net.script = script

    packets = {kind: packets[kind] for kind in questions}
    return Target(packets, read, state, sound)


def hello_target() -> Target:
    """Return a roster that reads hellos of sites of a named task."""
    experiment = Experiment("quadratic", "fedbio", clients=2, precision="float64")
    sites = {k: build_site(experiment, k, trial=True) for k in range(2)}
    told: list[str] = []
    answered: list[bytes] = []
    taken: list[bytes] = []

    def script(node, packet, net):
        return answered[0] if answered else net.sites[node].handle(packet)

    net = Loopback(sites, script)
    identity = Identity("f", sites[0].fingerprints.settings, 1)
    roster = Roster(
        net, 2, identity, Terms(patience=1), told.append, check_facts=SiteSchema.check
    )
    roster.gather(1, 2)
    members = dict(roster.members)
    honest = next(answer for node, _, answer in net.sent if node == 0)
    assert honest is not None

    def read(kind, packet):
        answered[:], told[:] = [packet], []
        roster.members = dict(members)
        roster.again(0)
        net.sent.clear()
        roster._number = number_of(honest) - 1
        roster.refresh()
        (line,) = told
        assert line.isprintable() and len(line) < 1000
        if line.startswith("client "):
            taken.append(packet)
            if len(taken) <= AGREED:
                agree(experiment, roster)
            roster.members = dict(members)
            return ""
        assert line.startswith("node 0 is not taken: ")
        return line.removeprefix("node 0 is not taken: ").partition(":")[0]

    def sound():
        answered.clear()
        roster.again(0)
        roster.refresh()
        assert agreed(experiment, roster)[1].plain() == members[0].facts

    return Target({"hello": honest}, read, lambda: dict(roster.members), sound)


def agree(experiment, roster):
    """Agree with a site that was taken: it says what another does, or is named."""
    alone: Any = SimpleNamespace(
        members={0: roster.members.get(0, roster.members[1])},
        clients=2,
        weights=roster.weights,
    )
    try:
        agreed(experiment, alone)
    except InvalidInputError as error:
        assert str(error)


@pytest.fixture(scope="module")
def targets():
    jobs = [
        quadratic_job(BSGM, quadratic_data(3), channel=channel)
        for channel in (
            read_channel(aggregate="secure"),
            read_channel(compress="quantize:8"),
        )
    ]
    return {
        "site": site_target(jobs[0]),
        "server": server_target(jobs[1]),
        "roster": hello_target(),
    }


CHOICES = [("site", kind) for kind in KINDS]
CHOICES += [("server", kind) for kind in KINDS[1:4]] + [("roster", "hello")]


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(draw=st.randoms(use_true_random=False), where=st.sampled_from(CHOICES))
def test_a_packet_that_was_changed_is_refused_or_could_have_been_sent(
    targets, draw, where
):
    name, kind = where
    targets[name].attack(draw, kind)


@pytest.mark.slow
@pytest.mark.parametrize("where", CHOICES, ids=" ".join)
def test_packets_that_reach_far_are_refused_or_could_have_been_sent(targets, where):
    """Hypothesis is led by how many lines of the package a packet reaches."""
    lines = Lines(tool=3)

    @settings(
        max_examples=200,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.target],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(draw=st.randoms(use_true_random=False))
    def attack(draw):
        with lines.watched() as reached:
            targets[where[0]].attack(draw, where[1])
        target(float(sum(bits.bit_count() for bits in reached.values())))

    attack()


@pytest.mark.exhaustive
def test_100000_packets_that_were_changed(targets):
    draw = random.Random(15)
    for _ in range(100_000):
        name, kind = draw.choice(CHOICES)
        targets[name].attack(draw, kind)
    for name, one in targets.items():
        one.sound()
        kinds = {kind for kind, _ in one.seen}
        assert kinds == {kind for which, kind in CHOICES if which == name}
        # The changes reach every check, and some are none that anybody could notice.
        assert len({reason for _, reason in one.seen}) >= 6, one.seen
