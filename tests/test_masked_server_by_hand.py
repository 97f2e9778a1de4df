"""Who is asked for a masked sum, who is enough, and what a sum that failed leaves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.errors import FedbilevelError, RevealRefusedError
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.secure.layout import (
    BOX_BYTES,
    ROW_BYTES,
    MaskedReply,
    context_of,
)
from fedbilevel.federation.secure.masks import SiteKeys
from fedbilevel.federation.secure.protocol import SecureSite
from fedbilevel.federation.secure.server import MaskedServer
from fedbilevel.federation.secure.unmasking import _to_blame
from fedbilevel.federation.server.requests import Answers
from fedbilevel.federation.wire import EVERYONE, Header, pack, unpack

KEYS = [SiteKeys.from_bytes(bytes([k + 1] * 32)) for k in range(6)]
WEIGHTS = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
HEADER = Header("exchange", "f", "s", "a", EVERYONE, 3, exchange=5)
# What is replied with, two blocks of two types.
CODED = (
    jax.ShapeDtypeStruct((2,), np.dtype(np.float32)),
    jax.ShapeDtypeStruct((), np.dtype(np.float64)),
)
NOBODY = "no key that can be used, or too few others for their minimum"


class World:
    """A roster of so many clients, their sites, and a server that asks them.

    `silent` do not answer a step, `refusing` refuse it, with a reason.
    """

    def __init__(self, clients=3, **minimum: Any) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[str, list[int]]] = []
        self.here, self.refreshed = set(range(clients)), 0
        self.silent: dict[str, set[int]] = {}
        self.refusing: dict[str, dict[int, RefusedError]] = {}
        roster: Any = SimpleNamespace(
            identity=SimpleNamespace(attempt=3),
            members={k: self._member(k, minimum) for k in range(clients)},
            weights=WEIGHTS[:clients],
            report=self.said.append,
            refresh=self._refresh,
            reachable=lambda chosen: [k for k in chosen if k in self.here],
        )
        self.roster, self.server = roster, MaskedServer(roster, self._ask)
        public = {k: KEYS[k].public_bytes for k in range(clients)}
        self.sites = [SecureSite("f", k, KEYS[k], public) for k in range(clients)]
        self.exchange: Any = None

    def _member(self, client: int, minimum: Any) -> Any:
        info = {"key": KEYS[client].public_bytes.hex(), "signature": "ab"}
        info["minimum"] = minimum.get(f"of_{client}", 2)
        return SimpleNamespace(info=info, weight=WEIGHTS[client])

    def _refresh(self) -> None:
        self.refreshed += 1

    def _ask(self, clients, request_for, read, like) -> Answers:
        answers, kind = Answers(traffic=np.asarray([1, 2, 3])), ""
        for client in clients:
            request = request_for(client, self.roster.members[client])
            kind, site = request.header.kind, self.sites[client]
            survivors = (request.header.info or {})["survivors"]
            if client in self.silent.get(kind, ()):
                continue
            if client in self.refusing.get(kind, {}):
                answers.refused[client] = self.refusing[kind][client]
                continue
            if kind == "agree":
                leaves = [site.confirm(self.exchange, survivors)]
            else:
                leaves = list(site.reveal(self.exchange, survivors, *request.leaves))
            _, listed, body = unpack(pack(request.header, leaves), 1 << 20)
            answers.taken[client] = read(client, {}, listed, body)
        self.steps.append((kind, list(clients)))
        return answers

    def asked(self, exchange=5, chosen=None) -> Any:
        every = list(self.roster.members)
        return self.server.announced(chosen or every, exchange)

    def sum(self, replying=None, exchange=5, value=1.0) -> tuple[Any, Answers]:
        """Let those that are announced reply, and the server take the mean."""
        announced = self.asked(exchange)
        header = replace(HEADER, exchange=exchange, info={"repeat": announced.repeat})
        self.exchange = announced.exchange(context_of(header, ["one"]))
        answers = Answers()
        for client in replying or announced.participants:
            blocks = [np.full(2, value * client), np.asarray(client + 8.0)]
            share = WEIGHTS[client] / max(self.roster.weights)
            # The scales are 0, and 3 of what is about 8.
            reply = self.sites[client].mask_reply(self.exchange, blocks, share, [0, 3])
            answers.taken[client] = reply, False
        about = (jnp.zeros(2), jnp.asarray(8.0))
        self.server.average(answers, announced, (header, ["one"]), CODED, about)
        return announced, answers


def test_every_sum_has_a_number_of_its_own():
    world = World(3)
    first, second = world.asked(exchange=5), world.asked(exchange=6, chosen=[2, 0])
    assert (first.number, second.number) == (3 * 2**32 + 1, 3 * 2**32 + 2)
    assert (first.participants, second.participants) == ([0, 1, 2], [0, 2])
    assert first.repeat == second.repeat == 0
    assert second.keys == {str(k): KEYS[k].public_bytes.hex() for k in (2, 0)}
    assert second.signatures == {"0": "ab", "2": "ab"}
    world.here = {1}
    assert world.asked() is None and world.refreshed == 3
    world.here = {0, 1}
    assert world.asked().number == 3 * 2**32 + 3  # where nobody was asked there is none


@pytest.mark.parametrize(
    ("minimum", "asked"),
    [
        ({"of_2": 3}, [0, 1, 2]),
        ({"of_2": 4}, [0, 1]),
        ({"of_1": 3, "of_2": 4}, None),  # without 2 there are too few for 1
        ({"of_0": True}, [0, 1, 2]),  # no whole number counts as 2
        ({"of_0": "9"}, [0, 1, 2]),
        ({"of_0": 9, "of_1": 9, "of_2": 9}, None),
    ],
)
def test_who_would_not_take_part_is_not_asked(minimum, asked):
    world = World(3, **minimum)
    made = world.asked()
    assert (made and made.participants) == asked
    away = sorted({0, 1, 2} - set(asked or ()))
    assert world.said == ([f"clients {away} are not asked: {NOBODY}"] if away else [])


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ({"signature": "a" * 192}, True),
        ({"signature": "a" * 193}, False),
        ({"signature": b"ab"}, False),
        ({"key": "zz"}, False),
        ({"key": "00" * 31}, False),
        ({"key": "00" * 32}, False),  # no secret comes of it
    ],
)
def test_who_has_no_key_that_can_be_used_is_not_asked(more, taken):
    world = World(3)
    world.roster.members[1].info |= more
    assert world.asked().participants == ([0, 1, 2] if taken else [0, 2])


def test_no_signature_is_needed_where_nobody_checks_it():
    world = World(2)
    del world.roster.members[1].info["signature"]
    made = world.asked()
    assert made.participants == [0, 1] and made.signatures["1"] == ""


def test_a_masked_reply_has_two_words_more_and_a_row_for_everybody():
    world = World(3)
    like = world.server.like(CODED, world.asked())
    assert (like.words.shape, like.words.dtype) == ((2 + 1 + 2,), np.uint64)
    assert (like.sealed.shape, like.sealed.dtype) == ((3, ROW_BYTES), np.uint8)


def test_the_mean_is_by_the_weights_of_the_server_and_in_the_types_of_replies():
    world = World(3)
    _, answers = world.sum()
    mean, number = answers.reply
    # 1, 2 and 4 of 7, of the values 0, 1, 2 and 8, 9, 10.
    np.testing.assert_allclose(mean, [10 / 7] * 2, rtol=1e-7)
    np.testing.assert_allclose(number, 8 + 10 / 7, rtol=1e-10)
    assert (mean.dtype, number.dtype) == (np.float32, np.float64)
    assert world.steps == [("agree", [0, 1, 2]), ("reveal", [0, 1, 2])]
    assert answers.traffic.tolist() == [2, 4, 6] and not answers.refused
    assert sorted(answers.taken) == [0, 1, 2] and not world.said


def test_without_about_all_scales_are_one():
    world = World(2)
    announced = world.asked()
    exchange = announced.exchange(context_of(HEADER, []))
    world.exchange, answers = exchange, Answers()
    for client in (0, 1):
        blocks = [np.full(2, 3.0), np.asarray(40.0)]
        share = WEIGHTS[client] / 2
        reply = world.sites[client].mask_reply(exchange, blocks, share, [0, 0])
        answers.taken[client] = reply, False
    world.server.average(answers, announced, (HEADER, []), CODED, None)
    np.testing.assert_allclose(answers.reply[1], 40.0)


def test_two_thirds_of_the_announced_must_reply_and_the_silent_wait():
    world = World(4)
    announced, answers = world.sum([0, 3])
    assert world.said == ["2 of 3 replies needed to open a sum, none of clients [1, 2]"]
    assert not answers.taken and answers.reply is None and not world.steps
    # The next sum is over the others, and says that nothing of this one was opened.
    announced, answers = world.sum()
    assert (announced.participants, announced.repeat) == ([0, 3], 0)
    assert answers.reply is not None
    # After a sum that was had all are asked again.
    assert world.asked(exchange=6).participants == [0, 1, 2, 3]


def test_if_too_few_are_left_the_silent_are_asked_after_all():
    world = World(3)
    world.sum([2])
    assert world.said[0].startswith("1 of 2 replies needed")
    assert world.asked().participants == [0, 1, 2]


def test_a_minimum_of_one_that_replied_holds_for_all():
    # Of 5, 4 are two thirds; the last one wants 5.
    world = World(5, of_4=5)
    world.sum([0, 1, 2, 4])
    assert world.said == ["4 of 5 replies needed to open a sum, none of clients [3]"]
    world = World(5, of_4=5)
    world.sites[4].minimum = 2
    _, answers = world.sum([0, 1, 2, 3])  # it is not in this sum
    assert answers.reply is not None


def test_two_thirds_must_confirm():
    world = World(4)
    world.silent["agree"] = {1}
    _, answers = world.sum()
    assert answers.reply is not None
    assert world.steps == [("agree", [0, 1, 2, 3]), ("reveal", [0, 2, 3])]
    # Who confirmed nothing had nothing to reveal: it is named, though it did no harm.
    why = "replied, but did not reveal what opens the sum"
    assert {k: one.detail for k, one in answers.refused.items()} == {1: why}
    assert answers.refused[1].reason == "share"
    world = World(4)
    world.silent["agree"] = {1, 2}
    _, answers = world.sum()
    assert world.said == ["exchange 5: 2 of 3 confirmations needed"]
    assert {k: str(one) for k, one in answers.refused.items()} == {
        k: "sum: replied, but did not confirm the set in the sum" for k in (1, 2)
    }
    assert not answers.taken and answers.reply is None
    assert world.steps == [("agree", [0, 1, 2, 3])]
    # Its number may have been confirmed, so that the next sum is another repeat.
    world.silent.clear()
    assert (world.asked().repeat, world.asked().participants) == (1, [0, 3])
    assert (world.asked(exchange=6).repeat, world.asked().repeat) == (0, 0)


def test_what_a_site_refused_in_a_step_is_kept_as_it_is():
    world = World(3)
    mine = RefusedError("mask", "not this one")
    world.refusing["agree"] = {0: mine, 1: mine}
    _, answers = world.sum()
    assert answers.refused[0] is mine and answers.refused[1] is mine
    assert not answers.taken and world.server._avoided == {0, 1}


def test_three_failures_in_a_row_end_it_and_name_their_suspects():
    world = World(4)
    for exchange, silent in ((5, {0, 1}), (5, {2, 3}), (5, {0, 1})):
        world.server.check_progress()
        world.silent["agree"], world.server._avoided = silent, set()
        world.sum(exchange=exchange)
    why = "replied, but did not confirm the set in the sum"
    every = "; ".join(f"client {k} {why}" for k in range(4))
    with pytest.raises(FedbilevelError, match=f"^3 sums in a row .*: {every}. Look"):
        world.server.check_progress()


def test_a_sum_that_was_had_forgives_earlier_failures():
    world = World(4)
    for silent in ({0, 1}, {2, 3}):
        world.silent["agree"], world.server._avoided = silent, set()
        world.sum()
    world.silent.clear()
    world.sum()
    for _ in range(2):
        world.silent["agree"], world.server._avoided = {0, 1}, set()
        world.sum()
    world.server.check_progress()


def test_sums_with_numbers_beyond_the_range_are_all_suspects():
    world = World(2)
    _, answers = world.sum(value=1e30)
    why = "is in a sum with numbers that are not finite or too large for masks"
    assert {k: one.detail for k, one in answers.refused.items()} == {0: why, 1: why}
    assert world.said[0].startswith("exchange 5: 1 of 2 replies hold numbers that are")
    assert not answers.taken and answers.reply is None


def test_where_no_one_is_to_blame_all_are_in_a_wrong_sum():
    world = World(2)
    world.roster.members[1].weight = 4.0  # another one than it used
    _, answers = world.sum()
    assert {k: str(one) for k, one in answers.refused.items()} == {
        k: "sum: is in a wrong sum" for k in (0, 1)
    }
    assert world.server._avoided == set()  # it is nobody's fault


def after_a_cohort_was_refused() -> World:
    """A world whose last sum was over 0, 1, 2, and whose sites answer no other."""
    world = World(4)
    world.server.goes_on({0, 1, 2})
    world.server.goes_on({0, 1, 2, 3})  # the first word counts
    world.refusing["agree"] = dict.fromkeys((0, 1), RefusedError("cohort", "another"))
    world.sum()
    world.refusing.clear()
    return world


def test_where_sites_keep_cohorts_apart_sums_go_on_over_the_last_one():
    world = after_a_cohort_was_refused()
    apart = "since sites keep the sites of their sums apart (`node --cohorts`)"
    assert world.said[-1] == f"sums continue over [0, 1, 2], {apart}"
    # It is no failure, and no one is avoided.
    assert world.server._failures == [] and world.server._avoided == set()
    assert world.asked().participants == [0, 1, 2]
    world.here = {0, 2, 3}
    assert world.asked() is None
    assert world.said[-1] == f"waiting for clients [1], {apart}"
    # A cohort that is drawn without one of them may have another sum.
    assert world.asked(chosen=[0, 2, 3]).participants == [0, 2, 3]


def test_a_sum_of_a_cohort_apart_needs_all_of_it():
    world = after_a_cohort_was_refused()
    world.sum([0, 2], exchange=6)
    assert world.said[-1] == (
        "2 of 3 replies needed to open a sum, none of clients [1]"
    )
    assert world.sum(exchange=7)[1].reply is not None


def test_without_an_earlier_sum_a_refused_cohort_is_a_failure():
    world = World(4)
    world.refusing["agree"] = dict.fromkeys((0, 1), RefusedError("cohort", "another"))
    world.sum()
    assert len(world.server._failures) == 1
    world = after_a_cohort_was_refused()
    world.refusing["agree"] = dict.fromkeys((0, 1), RefusedError("cohort", "another"))
    world.sum(exchange=6)
    assert len(world.server._failures) == 1  # bound already, and still refused


def test_who_fits_fewer_others_is_to_blame():
    what = "not {}"
    assert _to_blame([], what) == {}
    assert _to_blame([(0, 1)], what) == {0: "not [1]", 1: "not [0]"}
    assert _to_blame([(0, 2), (1, 2)], what) == {2: "not [0, 1]"}
    # Told twice it is one pair, and one with itself is its own fault.
    assert _to_blame([(0, 1), (0, 1)], what) == {0: "not [1]", 1: "not [0]"}
    assert _to_blame([(3, 3)], what) == {3: "not [3]"}


def test_a_box_is_for_its_receiver_and_says_in_sums_of_how_many_it_counts():
    """The row for client 1 of what 0 sent: minimum, box, and two checks."""
    world = World(3)
    exchange = world.asked().exchange(b"")
    member = SecureSite("f", 0, KEYS[0], world.sites[0]._roster, minimum=3)
    sent: MaskedReply = member.mask_reply(exchange, [np.zeros(1)], 1.0, [0])
    assert sent.sealed[1, :4].tolist() == [3, 0, 0, 0]
    assert not sent.sealed[0, :BOX_BYTES].any() and sent.sealed[0, BOX_BYTES:].any()
    with pytest.raises(RevealRefusedError, match="2 in the sum, of 3 needed"):
        member.confirm(exchange, (0, 1))
