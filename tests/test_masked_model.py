"""The masked exchange is searched, for small numbers, for all a server could do."""

import functools
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.errors import RevealRefusedError
from fedbilevel.federation.secure.cohorts import Cohorts, Question
from fedbilevel.federation.secure.layout import MaskedExchange
from fedbilevel.federation.secure.masks import SiteKeys, threshold
from fedbilevel.federation.secure.protocol import SecureSite
from tests.masked import for_site
from tests.masked_model import (
    RULES,
    World,
    answers,
    may_answer,
    may_confirm,
    search,
)


@pytest.mark.parametrize(
    "world",
    [
        World(3),
        World(3, minimum=3),
        World(3, of_batches=False, apart=True),
        # One of four works with the server, and sites are never fewer than that.
        World(4, minimum=4, colluding=frozenset({3})),
    ],
    ids=["three", "three at least", "all rows", "one of four colludes"],
)
def test_no_way_leads_to_the_reply_of_one_site(world):
    assert search(world) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "world",
    [
        World(4),
        World(4, of_batches=False, apart=True),
        World(5, minimum=4, colluding=frozenset({4})),
    ],
    ids=["four", "all rows", "one of five colludes"],
)
def test_no_way_leads_to_the_reply_of_one_site_among_more(world):
    assert search(world, depth=2) is None


@pytest.mark.parametrize("hole", sorted(RULES - {"cuts"}))
def test_the_search_finds_the_hole_that_a_missing_rule_is(hole):
    way = search(World(3, rules=RULES - {hole}))
    assert way is not None
    # Two sums were asked for of the same replies, the second over one site more.
    if hole == "rows are secret":  # the same sites were asked
        assert way[0].participants == way[1].participants
    if hole == "one set for a question":
        first, second = (set(story.participants) for story in way)
        assert len(first ^ second) == 1 and way[0].question == way[1].question


def test_where_replies_are_of_all_rows_only_cohorts_apart_keep_them():
    """A point nearby is another question, with the same answer."""
    way = search(World(3, of_batches=False))
    assert way is not None and way[0].question != way[1].question


def opened(sites, minimum, asked):
    """Return the sums that are opened: enough of their sites confirm them."""
    found = []
    for number, members in enumerate(asked):
        question = Question("", str(number))
        told = [sites[k].enter(question, members) for k in members]
        if told.count(None) >= max(threshold(len(members)), minimum):
            found.append(members)
    return frozenset(found)


@functools.cache
def fewest_alone(count, sums):
    """Return the fewest sites in a combination of sums."""
    known = np.asarray([[k in one for k in range(count)] for one in sums], float)
    rank = np.linalg.matrix_rank(known)
    for few in range(1, count + 1):
        for some in itertools.combinations(range(count), few):
            rest = np.delete(known, some, axis=1)
            if rest.size == 0 or np.linalg.matrix_rank(rest) < rank:
                return few
    return count


@pytest.mark.parametrize("minimum", [2, 3])
def test_no_combination_of_sums_is_over_few_sites_of_five(minimum):
    """All orders of three sums, of which sites with the real rules open some."""
    every = [
        some
        for many in range(minimum, 6)
        for some in itertools.combinations(range(5), many)
    ]
    families = set()
    for asked in itertools.product(every, repeat=3):
        sites = [Cohorts(minimum, apart=True) for _ in range(5)]
        families.add(opened(sites, minimum, asked))
    assert len(families) > 10
    assert min(fewest_alone(5, one) for one in families) >= minimum


@pytest.mark.parametrize("count", [5, 9])
def test_sums_that_differ_by_enough_in_pairs_can_leave_one_site(count):
    """Among nine, no site is in more than two of these sums."""
    sums = [(0, 1, 2), (0, 3, 4), (0, 1, 2, 3, 4)]
    if count == 9:
        sums = [(0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (0, 1, 6, 7, 8)]
    for one, other in itertools.combinations(map(set, sums), 2):
        assert len(one - other) >= 2 and len(other - one) >= 2 or one < other
    assert fewest_alone(count, frozenset(sums)) == 1
    for order in itertools.permutations(sums):
        sites = [Cohorts(2, apart=True) for _ in range(count)]
        assert fewest_alone(count, opened(sites, 2, order)) >= 2


def test_what_is_seen_in_the_clear_depends_on_no_row():
    """A refusal for numbers out of range is a comparison with a row."""
    seen = [{answers(World(3), out) for out in (False, True)}]
    seen += [{answers(World(3, rules=RULES - {"cuts"}), out) for out in (False, True)}]
    assert seen == [{"masked"}, {"masked", "refused"}]


KEYS = [SiteKeys.from_bytes(hashlib.sha256(bytes([k])).digest()) for k in range(4)]
ROSTER = {client: keys.public_bytes for client, keys in enumerate(KEYS)}
SETS = st.sets(st.integers(0, 3), min_size=2).map(lambda some: tuple(sorted(some)))


@settings(max_examples=150)
@given(st.booleans(), st.lists(st.tuples(SETS, st.integers(0, 1), SETS), max_size=6))
def test_sites_follow_the_rules_that_were_searched(apart, asked):
    """Real sites confirm and reveal exactly what the sites of the model do."""
    world = World(4, apart=apart)
    sites = [
        SecureSite("trial", k, KEYS[k], ROSTER, cohorts=Cohorts(2, apart))
        for k in range(4)
    ]
    past: list[dict[int, set]] = [{} for _ in sites]
    for number, (participants, question, members) in enumerate(asked):
        exchange = MaskedExchange(number, participants, bytes([question]))
        about = Question("", str(question))
        replies = {
            k: sites[k].mask_reply(exchange, [[1.0]], 1.0, [0], about)
            for k in participants
        }
        tags = {}
        for k in participants:
            expected = may_confirm(
                world, k, participants, members, before=()
            ) and may_answer(world, question, members, past[k])
            try:
                tags[k] = sites[k].confirm(exchange, members)
            except RevealRefusedError:
                assert not expected
                continue
            assert expected
            past[k].setdefault(question, set()).add(members)
        for k in tags:
            boxes = for_site(k, exchange, replies, tags)
            enough = len(tags) >= world.needed(participants)
            try:
                sites[k].reveal(exchange, members, *boxes)
            except RevealRefusedError:
                assert not enough
                continue
            assert enough
