"""Who is enough to confirm and to open a masked sum, at the bounds of both."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedbilevel.errors import InvalidInputError, RevealRefusedError, UnmaskingError
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.secure.layout import BOX_BYTES, MaskedExchange
from fedbilevel.federation.secure.masks import SiteKeys, pair_secret, sign, threshold
from fedbilevel.federation.secure.protocol import SecureSite
from fedbilevel.federation.secure.unmasking import Unmasking, check_replies
from fedbilevel.federation.server import measuring
from fedbilevel.federation.server.requests import Answers
from fedbilevel.federation.wire import EVERYONE, Header
from tests.masked import confirmations, for_site, opened, revealed

KEYS = [SiteKeys.from_bytes(bytes([k + 1] * 32)) for k in range(66)]


def sites(count: int, **more: Any) -> list[SecureSite]:
    roster = {k: KEYS[k].public_bytes for k in range(count)}
    return [SecureSite("f", k, KEYS[k], roster, **more) for k in range(count)]


def reply(site: SecureSite, exchange: MaskedExchange, value=1.0):
    return site.mask_reply(exchange, [np.full(2, value)], 1.0, [0])


def told(error: type[Exception], function, *given) -> str:
    with pytest.raises(error) as raised:
        function(*given)
    return str(raised.value)


def test_two_thirds_of_the_neighbors_must_be_in_the_sum():
    """Of 65 each has about 42 neighbors; the site itself counts among them."""
    count = 65
    exchange = MaskedExchange(1, tuple(range(count)))
    roster = {k: KEYS[k].public_bytes for k in range(count)}
    site = SecureSite("f", 0, KEYS[0], roster)
    sent = reply(site, exchange)
    near = {0, *site._neighbors(exchange)}
    assert 30 < len(near) < 55
    # Who is no neighbor has an empty row.
    filled = set(np.flatnonzero(sent.sealed.any(axis=1)).tolist())
    assert filled == near
    away = sorted(near - {0})
    least = threshold(len(near))
    for gone, confirmed in ((len(near) - least, True), (len(near) - least + 1, False)):
        members = set(range(count)) - set(away[:gone])
        assert len(members) >= threshold(count)  # or that bound would hold first
        if confirmed:
            assert site._why_not_confirm(exchange, tuple(sorted(members))) is None
        else:
            problem = told(RevealRefusedError, site.confirm, exchange, members)
            assert f"{gone} of {len(near)} neighbors dropped out" in problem


def test_two_thirds_must_confirm_the_same_sum():
    exchange, members = MaskedExchange(1, (0, 1, 2, 3, 4)), sites(5)
    replies = {one.client: reply(one, exchange) for one in members}
    tags = confirmations(members, exchange, replies)
    for others, enough in (((1, 2, 3), True), ((1, 2), False)):
        some = {k: tags[k] for k in others}
        given = (exchange, replies, *for_site(0, exchange, replies, some))
        if enough:
            assert members[0].reveal(*given).shares.any(axis=1).all()
        else:
            problem = told(RevealRefusedError, members[0].reveal, *given)
            assert "3 confirm this sum, of 4 needed. Nothing was revealed" in problem


def test_a_minimum_above_two_thirds_holds():
    exchange, members = MaskedExchange(1, (0, 1, 2, 3, 4)), sites(5, minimum=5)
    replies = {one.client: reply(one, exchange) for one in members}
    tags = confirmations(members, exchange, replies)
    some = {k: tags[k] for k in (1, 2, 3)}
    given = (exchange, replies, *for_site(0, exchange, replies, some))
    problem = told(RevealRefusedError, members[0].reveal, *given)
    assert "4 confirm this sum, of 5 needed" in problem


def test_a_sum_is_opened_by_two_thirds_of_the_shares():
    exchange, members = MaskedExchange(1, (0, 1, 2, 3, 4)), sites(5)
    replies = {one.client: reply(one, exchange) for one in members}
    assert opened(members, exchange, replies, silent=[4])[0] == 5 * 2**40
    given = revealed(
        members, exchange, replies, confirmations(members, exchange, range(5))
    )
    for who, enough in (((0, 1, 2, 3), True), ((1, 3, 4), False)):
        unmasking = Unmasking(exchange, replies, {k: given[k] for k in who})
        silent = sorted({0, 1, 2, 3, 4} - set(who))
        why = "replied, but did not reveal what opens the sum"
        assert unmasking.suspects == dict.fromkeys(silent, why)
        if enough:
            assert unmasking.total()[0] == 5 * 2**40
        else:
            problem = told(UnmaskingError, unmasking.total)
            assert problem.startswith(
                "exchange 1: 3 of 4 shares of client 0 are good, so that its sum cannot"
            )


def test_what_is_given_of_who_is_there_and_of_who_is_not():
    exchange, members = MaskedExchange(1, (3, 4, 5)), sites(6)[3:]
    replies = {one.client: reply(one, exchange) for one in members[:2]}
    tags = confirmations(members[:2], exchange, replies)
    given = revealed(members[:2], exchange, replies, tags)[3]
    # Of 3 and 4 shares, of 5 the seed of the mask between them.
    assert given.shares.any(axis=1).tolist() == [True, True, False]
    assert given.seeds.any(axis=1).tolist() == [False, False, True]
    # A box that does not open leaves its row empty.
    boxes, proofs = for_site(3, exchange, replies, tags)
    boxes[1, 4] ^= 1
    again = members[0].reveal(exchange, replies, boxes, proofs)
    assert again.shares.any(axis=1).tolist() == [True, False, False]
    boxes[1, 4] ^= 1
    boxes[1, 0] += 1  # another minimum than it was closed with
    again = members[0].reveal(exchange, replies, boxes, proofs)
    assert again.shares.any(axis=1).tolist() == [True, False, False]


def test_a_seed_that_is_missing_is_the_fault_of_who_has_it():
    exchange, members = MaskedExchange(1, (0, 1, 2, 3)), sites(4)
    replies = {one.client: reply(one, exchange) for one in members[:3]}
    tags = confirmations(members[:3], exchange, replies)
    given = revealed(members[:3], exchange, replies, tags)
    assert Unmasking(exchange, replies, given).total()[0] == 3 * 2**40
    given[1].seeds[3, 0] ^= 1
    wrong = Unmasking(exchange, replies, given)
    assert "the seed of clients 1 and 3 is wrong" in told(UnmaskingError, wrong.total)
    assert wrong.suspects == {1: "revealed a wrong seed with client 3"}


def test_who_promised_other_seeds_than_all_others_is_named():
    exchange, members = MaskedExchange(1, (0, 1, 2)), sites(3)
    replies = {one.client: reply(one, exchange) for one in members}
    check_replies(exchange, replies)
    replies[2].sealed[:2, BOX_BYTES + 8] ^= 1
    with pytest.raises(
        UnmaskingError, match=r"clients \[2\] do not have the seeds"
    ) as no:
        check_replies(exchange, replies)
    assert no.value.suspects == {2: "has other seeds than clients [0, 1]"}
    replies[2].sealed[0, BOX_BYTES + 8] ^= 1
    with pytest.raises(UnmaskingError) as no:
        check_replies(exchange, replies)
    assert no.value.suspects == {
        1: "has other seeds than clients [2]",
        2: "has other seeds than clients [1]",
    }
    # The last byte of a check counts, the check of a share beside it does not.
    replies[2].sealed[1, BOX_BYTES + 8] ^= 1
    replies[2].sealed[1, BOX_BYTES + 7] ^= 1
    check_replies(exchange, replies)
    replies[2].sealed[1, BOX_BYTES + 15] ^= 1
    with pytest.raises(UnmaskingError):
        check_replies(exchange, replies)


def test_a_roster_that_changes_makes_new_secrets_of_who_changed():
    site = sites(3)[0]
    exchange = MaskedExchange(1, (0, 1, 2))
    before = dict(site._pairs_in(exchange))
    one, two = site._secret(1), site._secret(2)
    changed = {**site._roster, 2: KEYS[9].public_bytes}
    site.meet(changed)
    assert site._secret(1) == one and site._secret(2) != two
    after = site._pairs_in(exchange)
    assert after[1] == before[1] and after[2] != before[2]
    site.meet({k: changed[k] for k in (0, 1)})
    assert sorted(site._secrets) == [1]  # who left is forgotten
    with pytest.raises(InvalidInputError, match="holds another public key for this"):
        site.meet({1: changed[1]})


def test_secrets_of_two_are_the_same_on_both_sides_and_of_their_federation():
    roster = {k: KEYS[k].public_bytes for k in range(3)}
    one = pair_secret(KEYS[0], "f", roster, (0, 1))
    assert pair_secret(KEYS[1], "f", roster, (1, 0)) == one
    assert pair_secret(KEYS[0], "g", roster, (0, 1)) != one
    assert (sign(0, 1), sign(1, 0), sign(1, 1)) == (1, -1, -1)


def test_a_minimum_is_two_or_more_and_the_announced_are_as_many():
    assert sites(3, minimum=2)[0].minimum == 2
    site = sites(3, minimum=3)[0]
    assert reply(site, MaskedExchange(1, (0, 1, 2))).words.shape == (4,)
    problem = told(InvalidInputError, reply, site, MaskedExchange(2, (0, 1)))
    assert "2 participants, but this site's minimum is 3" in problem
    assert sorted(site.records) == [1]  # what was not answered leaves no trace


# Measurements at the server's point.


def test_who_measures_is_asked_and_odd_numbers_are_left_out():
    header = Header("measure", "f", "s", "a", EVERYONE, 1, exchange=5)
    members = {k: SimpleNamespace(info={"measures": k != 1}) for k in (2, 0, 1)}
    named: list[Any] = []
    asked: list[Any] = []

    def ask(clients, request_for, read, like) -> Answers:
        asked.append((clients, [request_for(k, members[k]) for k in clients], like))
        taken = {0: {"loss": np.asarray(1.0)}, 2: {"loss": np.asarray(np.nan)}}
        return Answers(taken, {3: RefusedError("limit", "no more")})

    exchanges: Any = SimpleNamespace(
        measurement={"loss": np.zeros(())},
        roster=SimpleNamespace(members=members),
        ask=ask,
        name_refused=lambda header, answers: named.append(sorted(answers.refused)),
    )
    point = (np.asarray([1.0]), np.asarray(2.0))
    stands = {0: (4, 3), 2: (4, 3), 1: (5, 3)}
    found = measuring.measure(exchanges, header, point, stands.__getitem__)
    ((clients, requests, like),) = asked
    assert clients == [0, 2] and like == exchanges.measurement
    assert (requests[0].header.accepted, requests[0].header.kept) == (4, 3)
    assert requests[0] is requests[1]  # the same point: the same bytes
    assert [one.tolist() for one in requests[0].leaves] == [[1.0], 2.0]
    assert list(found.taken) == [0] and named == [[3], [2]]


def test_a_conclusion_has_no_leaves():
    reads: list[Any] = []
    exchanges: Any = SimpleNamespace(
        roster=SimpleNamespace(members={0: SimpleNamespace(info={"concludes": True})}),
        ask=lambda clients, request_for, read, like: reads.append(read) or Answers(),
        name_refused=lambda header, answers: None,
    )
    header = Header("conclude", "f", "s", "a", EVERYONE, 1)
    expected = {"auc": "number"}
    measuring.conclude(exchanges, header, (), lambda client: (0, 0), expected)
    (read,) = reads
    assert read(0, {"auc": 0.5}, [], b"") == {"auc": 0.5}
    for wrong in (([1], b""), ([], b"x")):
        problem = told(RefusedError, read, 0, {"auc": 0.5}, *wrong)
        assert problem == "oversized: a conclusion carries no leaves"
