"""What a site answers, refuses and keeps, request by request; its work is played."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedbilevel.federation import Fingerprints
from fedbilevel.federation import site as site_module
from fedbilevel.federation.checkpoints import Newest, SiteCheckpoints
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.site import Site
from fedbilevel.federation.wire import (
    CHECKSUM,
    EVERYONE,
    NOTICE,
    Header,
    digest,
    mask_of,
    pack,
    unpack,
)

WHERE = (1, 0)
HELLO = Header("hello", "f", "s", "", EVERYONE, 1, number=1)
ASKED = Header(
    *("exchange", "f", "s", "a", EVERYONE, 1),
    number=2,
    addressees=mask_of([4]),
    exchange=5,
    stage=1,
    name="phase",
)
POINT = np.asarray([1.0, 2.0])


class Held(NamedTuple):
    """What a client keeps, as far as it is asked for here."""

    own: np.ndarray


class World:
    """A site, client 4, whose computations and ledger only note what they get."""

    def __init__(self, **more: Any) -> None:
        self.said: list[str] = []
        self.counted: list[tuple] = []
        self.worked: list[tuple] = []
        self.found: Any = Held(np.full(1, 7.0)), (np.asarray([3.0]),), True
        ledger = SimpleNamespace(
            measures=True,
            rows=None,
            limits=SimpleNamespace(check_point=lambda point: None),
            exchange=lambda *given: self.counted.append(given),
            measure=lambda *given: self.counted.append(("measure", *given)),
            conclude=lambda *given: self.counted.append(("conclude", *given)),
        )
        phase = SimpleNamespace(name="phase")
        job = SimpleNamespace(x=np.zeros(2), y=np.ones(1), cohort=lambda phase: 3)
        work = SimpleNamespace(
            job=job,
            seen="seen",
            is_noisy=False,
            links={WHERE: SimpleNamespace(phase=phase, where=WHERE)},
            sent={WHERE: (np.zeros(2),)},
            state=(np.zeros(2),),
            blocks={WHERE: 2},
            exchange=self._work,
            measure=lambda server, own: {"loss": np.asarray(own[0])},
            take=lambda *given: self.worked.append(given),
        )
        made: Any = Site.__new__(Site)
        usual = {
            "work": work,
            "client": 4,
            "fingerprints": Fingerprints("s", "a"),
            "follow": None,
            "_followed": "",
            "facts": {"k": 1},
            "folder": None,
            "holds": True,
            "conclude": None,
            "report": self.said.append,
            "seal": CHECKSUM,
            "identity": None,
            "minimum": 2,
            "largest_weight": 4.0,
            "ledger": ledger,
            "_draws": SimpleNamespace(turn=lambda job, header, names: "turn"),
            "checkpoints": {},
            "is_over": False,
            "_held": {},
            "_answered": (None, b""),
            "_computed": (None, None),
            "_masks": False,
            "_secrets": {},
            "_common": {},
            "largest": 1 << 22,
            "_fresh": lambda name: SiteCheckpoints(
                Held(np.zeros(1)),  # type: ignore[arg-type]
                None,
                name,
                4,
            ),
        }
        vars(made).update({**usual, **more})
        self.site, self.ledger, self.work = made, ledger, work

    def _work(self, *given):
        self.worked.append(given)
        return self.found

    def ask(self, header: Header, leaves=(), known=frozenset()) -> Header:
        """Return what is answered, as a header."""
        return unpack(self.site.handle(pack(header, leaves, known)), 1 << 22)[0]

    def reason(self, header: Header, leaves=()) -> str:
        found = self.ask(header, leaves)
        assert found.kind == "refused" and found.client == 4
        return (found.info or {})["reason"]

    def greeted(self) -> "World":
        assert self.ask(HELLO).kind == "hello"
        return self


def test_a_hello_says_what_there_is():
    world = World()
    world.site._held = {"old": POINT}
    packet = pack(HELLO)
    answer = world.site.handle(packet)
    header, listed, body = unpack(answer, 1 << 20)
    assert (header.client, header.algorithm, header.number) == (4, "a", 1)
    told = {"facts": {"k": 1}, "holds": True, "measures": True, "concludes": False}
    assert header.info == told
    assert [one[1] for one in listed] == [[2], [1]] and len(body) == 24
    assert world.site._held == {} and world.site.checkpoints["f"].newest.number == 1
    assert world.site.handle(packet) is answer  # the same once more
    # Another hello that is no newer is refused.
    assert world.reason(replace(HELLO, index=3)) == "replayed"
    quiet = World(conclude=dict)
    quiet.ledger.measures = False
    assert quiet.ask(HELLO).info == {**told, "measures": False}
    blind = World(conclude=dict)
    blind.work.seen = None
    assert blind.ask(HELLO).info == {**told, "measures": False, "concludes": True}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("f" * 64, True),
        ("f" * 65, False),
        ("", False),
        ("a-b", False),
        ("../a", False),
        ("\u00e4", False),
    ],
)
def test_a_federation_has_a_plain_name(name, taken):
    world = World()
    found = world.ask(replace(HELLO, federation=name))
    assert (found.kind == "hello") is taken and (
        name in world.site.checkpoints
    ) is taken


def test_a_hello_carries_nothing_and_another_federation_takes_its_place():
    world = World()
    assert world.reason(HELLO, [POINT]) == "oversized"
    assert world.reason(replace(HELLO, info={"lr_x": 1})) == "steps"
    assert world.site.checkpoints == {}
    world.greeted().ask(replace(HELLO, federation="g"))
    assert list(world.site.checkpoints) == ["g"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "odd"}, "garbage"),
        ({"settings": "t"}, "settings"),
        ({"client": 3}, "client"),
        ({"addressees": mask_of([3, 5])}, "client"),
        ({"federation": "g"}, "federation"),
        ({"algorithm": "b"}, "algorithm"),
        ({"number": 1}, "replayed"),
        ({"attempt": 0}, "attempt"),
        ({"stage": 0}, "phase"),
        ({"phase": 1}, "phase"),
        ({"exchange": 0, "kind": "exchange"}, "jump"),
        ({"name": "other"}, "phase"),
        ({"kind": "agree"}, "mask"),
        ({"kind": "reveal"}, "mask"),
        ({"kind": "conclude"}, "garbage"),
    ],
)
def test_a_request_that_is_refused_changes_nothing(change, reason):
    world = World().greeted()
    assert world.reason(replace(ASKED, **change), [POINT]) == reason
    assert not world.counted and not world.worked
    assert world.site.checkpoints["f"].newest == Newest(attempt=1, number=1)
    assert len(world.said) == 1 and world.said[0].startswith(
        f"packet refused: {reason}"
    )
    assert world.ask(ASKED, [POINT]).kind == "exchange"


def test_an_error_is_told_at_the_site_alone():
    world = World().greeted()

    def fails(*given):
        raise KeyError("a row")

    world.work.exchange = fails
    assert world.ask(ASKED, [POINT]).info == {"reason": "internal"}
    assert world.said == [
        "packet refused: internal: reading it raised KeyError, 'a row'"
    ]


def test_a_reply_is_counted_and_kept_before_it_leaves():
    world = World().greeted()
    found = world.ask(ASKED, [POINT])
    assert (found.info, found.exchange) == ({"renewed": False}, 5)
    (where, (sent,), before, turn) = world.worked[0]
    assert (where, sent.tolist(), turn) == (WHERE, [1.0, 2.0], "turn")
    assert before.own.tolist() == [0.0]
    (blocks, shares, federation, (_, name)) = world.counted[0]
    assert (blocks, shares, federation) == (2, 1, "f")
    assert name == digest(np.asarray([3.0]))
    held = world.site.checkpoints["f"]
    assert held.at(5).own.tolist() == [7.0] and held.newest.number == 2
    # From there it goes on, if the server took it in; what is lost is begun anew.
    world.ask(replace(ASKED, number=3, exchange=6, accepted=5, kept=5), [POINT])
    assert world.worked[1][2].own.tolist() == [7.0]
    lost = replace(ASKED, number=4, exchange=7, accepted=4, kept=4)
    assert world.ask(lost, [POINT]).info == {"renewed": True}
    assert world.worked[2][2].own.tolist() == [0.0]
    assert sorted(held.kept) == [5, 6, 7]
    world.ask(replace(ASKED, number=5, exchange=8, accepted=7, kept=7), [POINT])
    assert sorted(held.kept) == [7, 8]
    # Without blocks that count there are none.
    world.work.blocks.clear()
    world.ask(replace(ASKED, number=6, exchange=9), [POINT])
    assert world.counted[-1][0] == 0


def test_what_was_sent_before_may_be_named():
    world = World().greeted()
    world.ask(ASKED, [POINT])
    known = frozenset({digest(POINT)})
    assert world.ask(replace(ASKED, number=3), [POINT], known).kind == "exchange"
    assert world.worked[1][1][0].tolist() == [1.0, 2.0]
    other = World(holds=False).greeted()
    other.ask(ASKED, [POINT])
    found = other.ask(replace(ASKED, number=3), [POINT], known)
    assert found.info == {"reason": "unknown"} and other.site._held == {}


def test_short_leaves_do_not_hold_their_packets():
    world = World().greeted()
    long = np.zeros(2**17)  # 2^20 bytes
    for leaf, owns in ((POINT, True), (long[:-1], True), (long, False)):
        world.work.sent[WHERE] = (np.zeros(leaf.shape),)
        number = world.site.checkpoints["f"].newest.number + 1
        assert world.ask(replace(ASKED, number=number), [leaf]).kind == "exchange"
        (held,) = world.site._held.values()
        assert held.flags.owndata is owns


def test_a_reply_that_is_not_finite_is_refused_in_the_clear():
    world = World().greeted()
    world.found = (*world.found[:2], False)
    assert world.reason(ASKED, [POINT]) == "not-finite"
    assert world.site.checkpoints["f"].kept == {}
    assert len(world.counted) == 1  # it was counted all the same


def test_under_noise_it_is_answered_and_what_was_kept_stays():
    world = World().greeted()
    world.work.is_noisy, world.found = True, (*world.found[:2], False)
    assert world.ask(ASKED, [POINT]).kind == "exchange"
    assert world.site.checkpoints["f"].at(5).own.tolist() == [0.0]
    assert world.said == [
        "the reply computed here holds NaN or infinity, which counts as 0. Smaller "
        "steps are the usual cure."
    ]


def test_the_same_question_has_the_same_noise():
    for noisy, times in ((True, 1), (False, 2)):
        world = World().greeted()
        world.work.is_noisy = noisy
        world.ask(ASKED, [POINT])
        world.ask(replace(ASKED, number=3), [POINT])
        assert len(world.worked) == times and len(world.counted) == 2
        assert world.counted[0] == world.counted[1]
        world.ask(replace(ASKED, number=4), [2 * POINT])
        assert len(world.worked) == times + 1


@pytest.mark.parametrize(("minimum", "shares"), [(2, 2), (3, 3), (9, 3)])
def test_under_masks_the_smallest_sum_counts(minimum, shares, monkeypatch):
    world = World(_masks=True, minimum=minimum)
    hello: Any = SimpleNamespace(introduction=lambda: {"key": "aa"})
    monkeypatch.setattr(Site, "_secrets_of", lambda self, name: hello)
    monkeypatch.setattr(Site, "_masked", lambda self, *given: [np.zeros(1)])
    assert (world.ask(HELLO).info or {})["key"] == "aa"
    world.ask(ASKED, [POINT])
    assert world.counted[0][1] == shares
    world.found = (*world.found[:2], False)
    assert world.ask(replace(ASKED, number=3), [POINT]).kind == "exchange"


def test_measurements_are_counted_first():
    world = World().greeted()
    asked = replace(ASKED, kind="measure")
    packet = world.site.handle(pack(asked, [POINT]))
    header, _, body = unpack(packet, 1 << 20)
    assert header.info is None and np.frombuffer(body).tolist() == [0.0]
    (kind, counted, content) = world.counted[0]
    assert (kind, counted, bytes(content)) == ("measure", asked, POINT.tobytes())
    world.work.seen = None
    assert world.reason(replace(asked, number=3), [POINT]) == "measure"
    assert len(world.counted) == 1

    def no(*given):
        raise RefusedError("limit", "no more")

    world.work.seen, world.ledger.measure = "seen", no
    assert world.reason(replace(asked, number=4), [POINT]) == "limit"


def test_a_conclusion_sees_the_clients_own_blocks(monkeypatch):
    seen: list[Any] = []
    world = World(conclude=lambda state: seen.append(state) or {"auc": 0.5}).greeted()
    monkeypatch.setattr(site_module, "combine", lambda server, own: (server, own))
    world.ask(ASKED, [POINT])
    asked = replace(ASKED, kind="conclude", number=3, accepted=5)
    assert world.ask(asked, [POINT]).info == {"auc": 0.5}
    ((server,), own) = seen[0]
    assert server.tolist() == [1.0, 2.0] and own.tolist() == [[7.0]]
    assert [one[0] for one in world.counted[1:]] == ["conclude"]


def test_steps_are_taken_with_a_hello_and_belong_to_its_federation(monkeypatch):
    given: list[Any] = []
    monkeypatch.setattr(site_module, "algorithm_fingerprint", lambda job: f"of {job}")
    world = World(follow=lambda info: given.append(info) or ("job", "seen"))
    assert world.ask(HELLO).algorithm == "of job"
    assert given == [{}] and world.worked == [("job", "seen")]
    asked = replace(ASKED, algorithm="of job")
    world.work.job = World().work.job
    assert world.ask(asked, [POINT]).kind == "exchange"
    world.site._followed = "g"
    assert world.reason(replace(asked, number=3), [POINT]) == "federation"


def notice(**changes: Any) -> Header:
    return Header(**{**vars(HELLO), "kind": NOTICE, "number": 2, **changes})


def test_a_notice_ends_a_site_and_is_not_answered():
    world = World().greeted()
    why = {"over": False, "reason": "key", "detail": "by its key not"}
    assert world.site.handle(pack(notice(info=why))) == b"" and not world.site.is_over
    told = "the server does not take this node: key: by its key not"
    assert world.said == [told]
    over = pack(notice(number=3, info={"over": True}))
    assert world.site.handle(over) == b"" and world.site.is_over
    world.site.is_over = False
    # Neither an old one, nor one of others, nor a long one does.
    assert world.site.handle(over) == b""
    for wrong in (
        notice(number=4, federation="g", info={"over": True}),
        notice(number=4, info={"over": True, "text": "x" * 2**13}),
    ):
        assert world.site.handle(pack(wrong)) == b""
    assert world.site.handle(pack(notice(number=4, info={"over": 1}))) == b""
    assert not world.site.is_over
    reasons = [line.split(": ")[1] for line in world.said[1:4]]
    assert reasons == ["replayed", "federation", "oversized"]
    assert all(line.startswith("notice refused") for line in world.said[1:4])
    assert world.said[4] == "the server does not take this node: None: None"


def test_what_could_not_be_carried_is_refused_as_it_says():
    world = World()
    found = unpack(world.site.handle(RefusedError("pieces", "lost")), 1 << 20)[0]
    assert (found.client, found.number, found.info) == (4, 0, {"reason": "pieces"})
