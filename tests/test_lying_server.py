"""A server that lies to sites under masks learns no reply; who cheats it is named."""

import functools
import hashlib
import itertools
import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.deployment.serving import TRIAL_KEYS, make_keys
from fedbilevel.errors import (
    FedbilevelError,
    InvalidInputError,
    RevealRefusedError,
    UnmaskingError,
)
from fedbilevel.federation import SiteLimits
from fedbilevel.federation.refusals import REASONS, RefusedError
from fedbilevel.federation.secure.fixed_point import encode
from fedbilevel.federation.secure.layout import MaskedExchange
from fedbilevel.federation.secure.masks import (
    SiteKeys,
    add_mask,
    combine,
    self_seed,
    sign,
    split,
    threshold,
)
from fedbilevel.federation.secure.protocol import SecureSite
from fedbilevel.federation.secure.unmasking import Unmasking
from fedbilevel.federation.signatures import (
    SiteIdentity,
    read_private_key,
    server_seal,
)
from fedbilevel.federation.wire import EVERYONE, pack, unpack
from fedbilevel.runtime import SimulatorRuntime, execute
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.federation import Loopback, of_all_rows, server_of, site_of
from tests.masked import confirmations, for_site, opened, revealed
from tests.tampering import renewed
from tests.test_federation import job_through

BSGM = case_of("local-bsgm").algorithm
FOUR = MaskedExchange(3, (0, 1, 2, 3))
SIZE = 4000


def crowd(count: int, **more) -> list[SecureSite]:
    seeds = [hashlib.sha256(bytes([k])).digest() for k in range(count)]
    keys = [SiteKeys.from_bytes(seed) for seed in seeds]
    roster = {k: pair.public_bytes for k, pair in enumerate(keys)}
    return [SecureSite("trial", k, keys[k], roster, **more) for k in range(count)]


def values_of(client: int, size: int = SIZE) -> list[np.ndarray]:
    return [np.random.default_rng(client).normal(size=size)]


def plain(client: int, count: int, size: int = SIZE) -> np.ndarray:
    return encode(values_of(client, size), 1.0, [0], count)


def replies_of(members, exchange, size: int = SIZE):
    return {
        one.client: one.mask_reply(exchange, values_of(one.client, size), 1.0, [0])
        for one in members
    }


def looks_random(words: np.ndarray) -> bool:
    """Say whether bytes are as evenly spread as drawn ones, within five deviations."""
    counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    expected = words.nbytes / 256
    distance = float(np.sum((counts - expected) ** 2) / expected)
    return abs(distance - 255) < 5 * 22.6


# What a lying server can compute


def without_pair_masks(words, victim, others, seeds_of):
    """Take out of a reply the masks it shares with others, as far as seeds are told."""
    words = words.copy()
    for other in others:
        add_mask(words, seeds_of(other), -sign(victim, other))
    return words


def test_a_reply_said_to_have_dropped_out_stays_closed():
    """The server keeps the reply of client 3, and says that it never came."""
    members = crowd(4)
    replies = replies_of(members, FOUR)
    some = {k: replies[k] for k in (0, 1, 2)}
    tags = confirmations(members[:3], FOUR, some)
    given = revealed(members[:3], FOUR, replies, tags, survivors=some)
    np.testing.assert_array_equal(
        Unmasking(FOUR, some, given).total(),
        sum((plain(k, 4) for k in some), np.zeros(SIZE + 2, np.uint64)),
    )
    # All masks that client 3 shares with others are known to the server now.
    left = without_pair_masks(
        replies[3].words, 3, (0, 1, 2), lambda k: given[k].seeds[3].tobytes()
    )
    assert looks_random(left[:-2]) and looks_random((left - plain(3, 4))[:-2])
    assert not looks_random(plain(3, 4)[:-2])
    # Without masks of one's own that would be the reply: this mask is what is left.
    secret, _ = members[3]._own_shares(FOUR)
    opened_by_its_owner = left.copy()
    add_mask(opened_by_its_owner, self_seed(secret, FOUR.digest), -1)
    np.testing.assert_array_equal(opened_by_its_owner, plain(3, 4))
    # Nobody gave a share of it, and one site that works with the server has too few.
    assert not any(one.shares[3].any() for one in given.values())
    _, shares = members[3]._own_shares(FOUR)
    known = {FOUR.places[k] + 1: shares[k] for k in (2, 3)[:1]}
    assert combine(known).to_bytes(16, "little") != secret


def test_a_survivors_own_mask_leaves_it_under_those_it_shares():
    members = crowd(4)
    replies = replies_of(members, FOUR)
    tags = confirmations(members, FOUR, replies)
    given = revealed(members, FOUR, replies, tags)
    assert not any(one.seeds.any() for one in given.values())
    secret, _ = members[3]._own_shares(FOUR)
    left = replies[3].words.copy()
    add_mask(left, self_seed(secret, FOUR.digest), -1)
    assert looks_random(left[:-1]) and looks_random((left - plain(3, 4))[:-1])


@pytest.mark.parametrize("count", [3, 4, 5])
def test_no_two_stories_are_both_believed(count):
    """Every way to tell some sites one set of survivors, and the others another."""
    everyone, without = tuple(range(count)), tuple(range(count - 1))
    exchange, needed = MaskedExchange(1, everyone), -(-2 * count // 3)
    for stories in itertools.product((everyone, without), repeat=count - 1):
        members = crowd(count)
        replies = replies_of(members, exchange, 3)
        told = {**dict(enumerate(stories)), count - 1: everyone}
        tags = {k: members[k].confirm(exchange, told[k]) for k in told}
        believed = set()
        for k, story in told.items():
            boxes = for_site(k, exchange, replies, tags)
            try:
                members[k].reveal(exchange, story, *boxes)
                believed.add(story)
            except RevealRefusedError as error:
                assert f"confirm this sum, of {needed} needed" in str(error)
            for other in {everyone, without} - {story}:
                with pytest.raises(RevealRefusedError):
                    members[k].reveal(exchange, other, *boxes)
        assert len(believed) <= 1


def test_confirmations_that_others_did_not_give_do_not_count():
    members = crowd(4)
    replies = replies_of(members, FOUR)
    tags = confirmations(members, FOUR, replies)
    own, (boxes, proofs) = members[0], for_site(0, FOUR, replies, tags)
    forged = [
        np.zeros_like(proofs),
        np.roll(proofs, 1, axis=0),
        np.stack([tags[0][k] for k in range(4)]),  # what it said itself, sent back
    ]
    for wrong in forged:
        with pytest.raises(RevealRefusedError, match="1 confirm this sum, of 3 needed"):
            own.reveal(FOUR, (0, 1, 2, 3), boxes, wrong)
    wrong = proofs.copy()
    wrong[3] = 0  # three of four are enough
    own.reveal(FOUR, (0, 1, 2, 3), boxes, wrong)


def test_a_box_opens_for_its_receiver_in_its_exchange_alone():
    members, other = crowd(4), MaskedExchange(4, (0, 1, 2, 3))
    replies, later = replies_of(members, FOUR), replies_of(members, other)
    tags = confirmations(members, other, later)
    for boxes in (
        for_site(1, other, later, tags)[0],  # those for somebody else
        for_site(0, FOUR, replies, tags)[0],  # those of an earlier exchange
    ):
        proofs = for_site(0, other, later, tags)[1]
        given = members[0].reveal(other, (0, 1, 2, 3), boxes, proofs)
        assert given.shares.any(axis=1).tolist() == [True, False, False, False]


# Shares


def test_shares_tell_the_secret_from_the_threshold_on():
    draw, needed, points = np.random.default_rng(0), 4, (1, 2, 5, 7, 11, 64)
    prime, secret = 2**127 - 1, 123456789 << 90
    drawn = draw.bytes(32 * needed)
    shares = split(secret, needed, points, drawn)
    coefficients = [
        int.from_bytes(drawn[32 * k : 32 * k + 32], "little") % prime for k in range(3)
    ]
    for point, share in shares.items():
        value = secret + sum(c * point ** (k + 1) for k, c in enumerate(coefficients))
        assert int.from_bytes(share, "little") == value % prime
    for size in range(1, len(points) + 1):
        for some in itertools.combinations(points, size):
            told = combine({point: shares[point] for point in some})
            assert (told == secret) == (size >= needed)
    # Three shares fit any other secret as well: some fourth share makes it.
    three = {point: shares[point] for point in (1, 2, 5)}
    low, high = (
        combine({**three, 7: value.to_bytes(16, "little")}) for value in (0, 1)
    )
    fourth = (42 - low) * pow(high - low, -1, prime) % prime
    assert combine({**three, 7: fourth.to_bytes(16, "little")}) == 42


@pytest.mark.parametrize(
    ("holders", "needed"), [(2, 2), (3, 2), (4, 3), (16, 11), (64, 43)]
)
def test_two_thirds_of_the_holders_are_needed(holders, needed):
    assert threshold(holders) == needed


# Whose part is wrong


def test_who_gives_a_wrong_share_is_named_and_not_needed():
    members = crowd(4)
    replies = replies_of(members, FOUR)
    given = revealed(members, FOUR, replies, confirmations(members, FOUR, replies))
    given[2].shares[:, 0] ^= 1
    unmasking = Unmasking(FOUR, replies, given)
    exact = sum((plain(k, 4) for k in range(4)), np.zeros(SIZE + 2, np.uint64))
    np.testing.assert_array_equal(unmasking.total(), exact)
    assert set(unmasking.suspects) == {2}


def test_who_promised_other_shares_is_named():
    members = crowd(4)
    replies = replies_of(members, FOUR)
    tags = confirmations(members, FOUR, replies)
    given = revealed(members, FOUR, replies, tags)
    for columns in (slice(36, 44), slice(44, 52)):  # checks of shares, of the secret
        sealed = replies[1].sealed.copy()
        sealed[slice(None) if columns.start == 36 else 1, columns] ^= 1
        wrong = {**replies, 1: replies[1]._replace(sealed=sealed)}
        with pytest.raises(UnmaskingError) as failure:
            Unmasking(FOUR, wrong, given).total()
        assert set(failure.value.suspects) == {1}


def test_who_reveals_a_wrong_seed_is_named():
    members = crowd(4)
    replies = replies_of(members[:3], FOUR)
    tags = confirmations(members[:3], FOUR, replies)
    given = revealed(members[:3], FOUR, replies, tags)
    given[0].seeds[3, 5] ^= 1
    with pytest.raises(UnmaskingError, match="seed of clients 0 and 3") as failure:
        Unmasking(FOUR, replies, given).total()
    assert set(failure.value.suspects) == {0}


# Many sites


def test_many_sites_have_few_neighbors_and_exact_sums():
    count = 66
    exchange, members = MaskedExchange(0, tuple(range(count))), crowd(count)
    neighbors = [set(one._neighbors(exchange)) for one in members]
    for k, mine in enumerate(neighbors):
        assert all(k in neighbors[other] for other in mine)
    # 42 of 65 are expected, with a standard deviation of 3.9.
    degrees = [len(mine) for mine in neighbors]
    assert abs(np.mean(degrees) - 42) < 2 and max(degrees) < count - 1
    later = MaskedExchange(1, exchange.participants)
    assert set(crowd(count)[5]._neighbors(later)) != neighbors[5]
    staying = [one for one in members if one.client % 9]  # 8 dropped out
    replies = replies_of(staying, exchange, 3)
    exact = sum((plain(k, count, 3) for k in replies), np.zeros(5, np.uint64))
    np.testing.assert_array_equal(opened(staying, exchange, replies), exact)
    # A server that would cut a site off from its neighbors is not helped.
    gone = sorted(neighbors[1])[: len(neighbors[1]) // 3 + 2]
    rest = [k for k in range(count) if k not in gone]
    with pytest.raises(RevealRefusedError, match="neighbors dropped out"):
        staying[0].confirm(exchange, rest)


# Real packets


def identities(count: int) -> list[SiteIdentity]:
    private = [ec.generate_private_key(ec.SECP384R1()) for _ in range(count)]
    public = [key.public_key() for key in private]
    return [SiteIdentity(k, private[k], public) for k in range(count)]


KNOWN = identities(4)


def net_of(job, folder=None, minimum=2) -> Loopback:
    net = Loopback({})
    for k in range(job.clients):
        net.sites[10 + k] = site_of(
            job,
            k,
            None if folder is None else folder / str(k),
            identity=KNOWN[k],
            minimum=minimum,
            holds=False,
            report=net.told.append,
            limits=SiteLimits(cohorts="any"),
        )
    return net


def changed(packet: bytes, change) -> bytes:
    """Return a packet with another header or other leaves, packed as a server would."""
    header, listed, body = unpack(packet, 1 << 30)
    leaves, at = [], 0
    for kind, shape, _ in listed:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        leaves.append(np.frombuffer(body[at : at + size], kind).reshape(shape).copy())
        at += size
    return pack(*change(header, leaves))


def refusals(net: Loopback, node: int) -> set[tuple[str, str]]:
    """Return what a node refused, by the kind of packet and the reason."""
    found = set()
    for where, packet, answer in net.sent:
        reply = unpack(answer, 1 << 30)[0] if answer else None
        if where == node and reply is not None and reply.kind == "refused":
            kind = unpack(packet, 1 << 30)[0].kind
            found.add((kind, (reply.info or {})["reason"]))
    return found


@functools.cache  # compiled once
def secure_job():
    return of_all_rows(job_through(BSGM, 4, aggregate="secure"))


@functools.cache
def whole_job():
    return of_all_rows(quadratic_job(BSGM, quadratic_data(4)))


def run_with(job, script, folder=None, *, minimum=2, rounds=1) -> Any:
    """Run through a script; return net, entries of what was left out, and the end."""
    net, entries = net_of(job, folder, minimum), []
    net.script = script
    try:
        end = execute(server_of(job, net, left_out=entries.append), rounds)
    except FedbilevelError as error:
        end = error
    return net, entries, end


def assert_the_mean(end):
    record = end.state.attendance
    rounds = len(end.columns["round"])
    replayed = execute(SimulatorRuntime(whole_job().replaying(record)), rounds)
    for mean, exact in zip(
        jax.tree.leaves(end.state.server),
        jax.tree.leaves(replayed.state.server),
        strict=True,
    ):
        np.testing.assert_allclose(mean, exact, rtol=1e-9, atol=1e-9)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Ask again at once."""
    monkeypatch.setattr("fedbilevel.federation.server.exchanges._PAUSE", 0.0)


def own_key(header, info):
    """Announce {victim, a key of the server's own}."""
    keys = {"0": info["keys"]["0"], "1": SiteKeys.generate().public_bytes.hex()}
    return {**info, "participants": [0, 1], "keys": keys}


def own_signature(header, info):
    """And sign it, with another key than that of client 1."""
    info = own_key(header, info)
    stranger = identities(2)[1]
    key = bytes.fromhex(info["keys"]["1"])
    signature = stranger.sign(header.federation, 1, key).hex()
    return {**info, "signatures": {**info["signatures"], "1": signature}}


def made_up_participant(header, info):
    """Announce somebody that nobody knows."""
    key = SiteKeys.generate().public_bytes.hex()
    keys = {**info["keys"], "7": key}
    signatures = {**info["signatures"], "7": info["signatures"]["1"]}
    members = [*info["participants"], 7]
    return {**info, "participants": members, "keys": keys, "signatures": signatures}


def key_of_another_federation(header, info):
    """Announce a key that client 1 signed for other purposes."""
    key = bytes.fromhex(info["keys"]["1"])
    signature = KNOWN[1].sign("f2", 1, key).hex()
    return {**info, "signatures": {**info["signatures"], "1": signature}}


def key_of_another_client(header, info):
    """Announce client 2 as client 1."""
    swap = {"1": "2", "2": "1"}
    moved = {
        name: {k: info[name][swap.get(k, k)] for k in info[name]}
        for name in ("keys", "signatures")
    }
    return {**info, **moved}


def no_signature(header, info):
    """Announce keys without signatures."""
    return {**info, "signatures": {}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [
        own_key,
        own_signature,
        made_up_participant,
        key_of_another_federation,
        key_of_another_client,
        no_signature,
    ],
)
def test_keys_that_their_owners_did_not_sign_are_refused(lie):
    def script(node, packet, net):
        if node == 10 and unpack(packet, 1 << 30)[0].kind == "exchange":
            packet = changed(
                packet,
                lambda header, leaves: (
                    replace(header, info=lie(header, header.info)),
                    leaves,
                ),
            )
        return net.sites[node].handle(packet)

    net, entries, end = run_with(secure_job(), script)
    assert refusals(net, 10) == {("exchange", "key")}
    assert {(entry["client"], entry["reason"]) for entry in entries} == {(0, "key")}
    assert entries[0]["detail"] == REASONS["key"]
    named = "client 7 is not on" if lie is made_up_participant else "client"
    assert any(named in line for line in net.told)
    # The others go on without client 0.
    assert not isinstance(end, FedbilevelError)


def test_without_keys_of_the_others_a_server_that_lies_opens_a_reply():
    """What --insecure gives up, and what the signatures prevent."""
    keys = [SiteKeys.generate() for _ in range(2)]
    roster = {k: pair.public_bytes for k, pair in enumerate(keys)}
    members = [SecureSite("trial", k, keys[k], roster) for k in range(2)]
    exchange = MaskedExchange(0, (0, 1))
    replies = replies_of(members, exchange)
    # Client 1 is the server, and knows what it sent.
    left = opened(members, exchange, replies) - plain(1, 2)
    np.testing.assert_array_equal(left, plain(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [None, 13])
def test_sites_that_know_each_other_make_the_mean(lost):
    def script(node, packet, net):
        header = unpack(packet, 1 << 30)[0]
        if node == lost and header.kind == "exchange" and header.round == 2:
            return None
        return net.sites[node].handle(packet)

    job = secure_job()
    net, entries, end = run_with(job, script, rounds=2)
    assert_the_mean(end)
    assert entries == [] and refusals(net, 10) == set()
    kinds = [unpack(packet, 1 << 30)[0].kind for _, packet, _ in net.sent]
    assert kinds.count("agree") == kinds.count("reveal") > 0


def test_who_is_gone_between_reply_and_reveal_is_in_the_sum_all_the_same():
    def script(node, packet, net):
        gone = node == 12 and unpack(packet, 1 << 30)[0].kind in ("agree", "reveal")
        return None if gone else net.sites[node].handle(packet)

    job = secure_job()
    net, entries, end = run_with(job, script)
    assert (end.state.attendance > 0).all()
    assert_the_mean(end)
    assert {(entry["client"], entry["reason"]) for entry in entries} == {(2, "share")}


def test_sites_that_are_told_different_sums_reveal_nothing():
    def script(node, packet, net):
        if node in (10, 11) and unpack(packet, 1 << 30)[0].kind in ("agree", "reveal"):

            def lie(header, leaves):
                info = {**header.info, "survivors": [0, 1, 2]}
                return replace(header, info=info), leaves

            packet = changed(packet, lie)
        return net.sites[node].handle(packet)

    net, entries, end = run_with(secure_job(), script)
    for node in (10, 11, 12, 13):
        assert refusals(net, node) == {("reveal", "mask")}
    assert isinstance(end, FedbilevelError) and "3 sums in a row" in str(end)
    told = [a for _, p, a in net.sent if unpack(p, 1 << 30)[0].kind == "reveal"]
    assert told and not any(unpack(a or b"", 1 << 30)[2] for a in told)


def other_message(header, leaves):
    return header, [leaf + 1 for leaf in leaves]


def other_repeat(header, leaves):
    return replace(header, info={**header.info, "repeat": 7}), leaves


@pytest.mark.parametrize("lie", [other_message, other_repeat])
def test_sites_that_are_told_different_things_make_no_sum(lie):
    """The others' part could be made zero, or known, and one reply would be left."""

    def script(node, packet, net):
        if node != 10 and unpack(packet, 1 << 30)[0].kind == "exchange":
            packet = changed(packet, lie)
            answer = net.sites[node].handle(packet)
            return changed(answer, lambda h, leaves: (replace(h, info=None), leaves))
        return net.sites[node].handle(packet)

    job = secure_job()
    net, entries, end = run_with(job, script)
    asked = [unpack(packet, 1 << 30)[0] for _, packet, _ in net.sent]
    sums = [one.info["survivors"] for one in asked if one.info and one.kind == "agree"]
    assert not any(0 in members for members in sums)
    assert entries[0]["client"] == 0 and "other seeds" in entries[0]["detail"]
    assert isinstance(end, FedbilevelError) and "3 sums in a row" in str(end)


def last_of(net: Loopback, node: int, kind: str) -> bytes:
    sent = [packet for where, packet, _ in net.sent if where == node]
    of_kind = [one for one in sent if unpack(one, 1 << 30)[0].kind == kind]
    return renewed(of_kind[-1])


def test_what_was_given_is_remembered_on_disk_and_the_other_is_refused(tmp_path):
    job = secure_job()
    net, _, _ = run_with(job, lambda n, p, net: net.sites[n].handle(p), tmp_path)
    again = site_of(job, 0, tmp_path / "0", identity=KNOWN[0])
    # The same is given again, by another process too.
    same = unpack(again.handle(last_of(net, 10, "reveal")), 1 << 30)
    assert same[0].kind == "reveal" and same[2]

    def drop(header, leaves):
        return replace(header, info={**header.info, "survivors": [0, 1, 2]}), leaves

    for kind in ("agree", "reveal"):
        other = changed(last_of(net, 10, kind), drop)
        reply = unpack(again.handle(other), 1 << 30)[0]
        assert reply.kind == "refused" and (reply.info or {})["reason"] == "mask"


HOSTILE = [
    {"number": 3.5},
    {"number": -1},
    {"number": 2**70},
    {"participants": 5},
    {"participants": [0, 2**70]},
    {"participants": [0, -1], "keys": {"0": "00" * 32, "-1": "00" * 32}},
    {"participants": [[0], 1]},
    {"participants": [0, 0, 1]},
    {"participants": [1, 2, 3]},
    {"keys": []},
    {"keys": {"0": 7}},
    {"keys": {"0": "zz"}},
    {"signatures": {"0": None}},
    {"repeat": -1},
    {"repeat": 2**16},
    {"repeat": 1.0},
    {"survivors": None},
    {"survivors": [[0]]},
    {"survivors": [0, 1, 2**70]},
    {"survivors": [0, 1, -1]},
    {"more": 1},
]


def test_announcements_that_make_no_sense_are_refused_and_change_nothing(tmp_path):
    job = secure_job()
    net, _, _ = run_with(job, lambda n, p, net: net.sites[n].handle(p), tmp_path)
    (file,) = (tmp_path / "0").glob("*.keys.json")
    kept, own = file.read_bytes(), net.sites[10]
    for kind, wrong in itertools.product(("exchange", "agree", "reveal"), HOSTILE):
        if kind == "exchange" and "survivors" in wrong:
            continue
        lie = changed(
            last_of(net, 10, kind),
            lambda header, leaves, wrong=wrong: (
                replace(header, info={**header.info, **wrong}),
                leaves,
            ),
        )
        reply = unpack(own.handle(lie), 1 << 30)[0]
        assert reply.kind == "refused", (kind, wrong)
        reasons = ("announcement", "mask", "key", "garbage")
        assert (reply.info or {})["reason"] in reasons
        assert file.read_bytes() == kept


def test_a_site_takes_part_in_sums_of_its_minimum_alone():
    def script(node, packet, net):
        header = unpack(packet, 1 << 30)[0]
        seen.append(header.kind)
        if node == 13 and header.kind == "exchange" and seen.count("exchange") < 9:
            return None
        return net.sites[node].handle(packet)

    seen: list[str] = []
    job = secure_job()
    net, entries, end = run_with(job, script, minimum=4)
    # Three replies were enough for a sum, but not for these sites.
    first = seen.index("agree")
    assert seen[:first].count("exchange") > 8
    assert_the_mean(end)

    def fewer(header, leaves):
        info = dict(header.info)
        keys = {client: info["keys"][client] for client in ("0", "1", "2")}
        info |= {"number": info["number"] + 1, "participants": [0, 1, 2], "keys": keys}
        return replace(header, info=info), leaves

    packet = changed(last_of(net, 10, "exchange"), fewer)
    reply = unpack(net.sites[10].handle(packet), 1 << 30)[0]
    assert reply.kind == "refused" and reply.info == {"reason": "mask"}
    assert "minimum is 4" in net.told[-1]


def test_a_stall_ends_and_the_suspects_are_named():
    """One node sends masked numbers that are none: the sum is never right."""

    def script(node, packet, net):
        answer = net.sites[node].handle(packet)
        if node == 12 and unpack(packet, 1 << 30)[0].kind == "exchange":

            def spoil(header, leaves):
                leaves[0][-1] += 1
                return header, leaves

            answer = changed(answer, spoil)
        return answer

    net, entries, end = run_with(secure_job(), script)
    assert isinstance(end, FedbilevelError)
    assert "3 sums in a row could not be opened" in str(end) and "client 2" in str(end)
    assert {entry["client"] for entry in entries} == {0, 1, 2, 3}
    assert {entry["reason"] for entry in entries} == {"sum"}
    assert len(net.sent) < 60
    json.dumps(entries)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["seed", "silent", "checks", "key"])
def test_a_node_that_spoils_sums_is_named_and_left_out_of_the_next(what):
    """Client 3 drops out; client 2 gives nothing, or something wrong, for its masks."""

    def script(node, packet, net):
        header = unpack(packet, 1 << 30)[0]
        if node == 13 and header.kind == "exchange":
            return None
        answer = net.sites[node].handle(packet)
        if node != 12:
            return answer
        if what == "silent" and header.kind == "reveal":
            return None

        def spoil(head, leaves):
            if what == "seed" and header.kind == "reveal":
                leaves[1][3] ^= 1
            if what == "checks" and header.kind == "exchange":
                leaves[1][:, 44:] ^= 1
            if what == "key" and header.kind == "hello":
                head = replace(head, info={**head.info, "key": "00" * 32})
            return head, leaves

        return changed(answer, spoil)

    job = secure_job()
    net, entries, end = run_with(job, script)
    assert (end.state.attendance > 0).tolist() == [[True, True, False, False]] * len(
        end.state.attendance
    )
    assert_the_mean(end)
    if what != "key":
        assert {(entry["client"], entry["reason"]) for entry in entries} == {(2, "sum")}


# Keys and commands


def test_lists_of_keys_that_cannot_be_right():
    private = [ec.generate_private_key(ec.SECP384R1()) for _ in range(3)]
    public = [key.public_key() for key in private]
    with pytest.raises(InvalidInputError, match="client 2 has the public key of"):
        SiteIdentity(1, private[1], [public[0], public[1], public[0]])
    for client, keys in ((1, public[:1]), (1, [public[1], public[0]]), (3, public)):
        with pytest.raises(InvalidInputError, match=f"for client {client} is not"):
            SiteIdentity(client, private[1], keys)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--aggregate secure --insecure --site-key a.pub", "exclude each other"),
        (
            "--aggregate secure --root-certificates c --private-key k --server-key s",
            "0 times --site-key",
        ),
        (
            "--aggregate secure --root-certificates c --private-key k --server-key s "
            "--site-key a.pub",
            "1 times --site-key for 2",
        ),
        ("--insecure --site-key a.pub", "--site-key is for --aggregate secure"),
        ("--aggregate secure --insecure --minimum 3", "minimum=3"),
        ("--aggregate secure --insecure --minimum 1", "minimum=1"),
    ],
)
def test_a_node_with_odd_keys_is_told(words, reason, tmp_path, monkeypatch):
    # This process goes on in double precision.
    monkeypatch.setattr("fedbilevel.runtime.configure", lambda *_, **__: None)
    start = "node quadratic --clients 2 --client 0 --superlink 127.0.0.1:1 --trial"
    done = CliRunner().invoke(
        app, [*start.split(), "--state", str(tmp_path), *words.split()]
    )
    assert done.exit_code == 2 and reason in " ".join(done.output.split())
    assert not any(tmp_path.iterdir())


def test_a_node_has_all_that_its_operator_typed(tmp_path, monkeypatch):
    given, took_part = {}, []
    monkeypatch.setattr("fedbilevel.runtime.configure", lambda *_, **__: None)
    monkeypatch.setattr(
        "fedbilevel.experiments.sites.build_site", lambda *_, **more: given.update(more)
    )
    monkeypatch.setattr(
        "fedbilevel.cli.node._take_part", lambda *both: took_part.append(both)
    )
    keys = make_keys(tmp_path, 3)
    words = "node quadratic --clients 3 --client 1 --aggregate secure --minimum 3"
    words += " --superlink 127.0.0.1:1 --trial --measure scalars --max-exchanges 9"
    words += f" --state {tmp_path / 'state'} --root-certificates {tmp_path / 'ca'}"
    words += f" --private-key {tmp_path / TRIAL_KEYS / '1'} --server-key {keys.private}"
    words += ".pub " + " ".join(f"--site-key {one}" for one in keys.peers)
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert (given["folder"], given["minimum"]) == (tmp_path / "state", 3)
    assert (given["trial"], given["tune"]) == (True, False)
    assert given["limits"] == SiteLimits(measure="scalars", max_exchanges=9)
    # It knows the keys of all sites, and those of server and own packets.
    own = [read_private_key(tmp_path / TRIAL_KEYS / str(k)) for k in range(3)]
    theirs = [
        SiteIdentity(k, key, [one.public_key() for one in own])
        for k, key in enumerate(own)
    ]
    for client in (0, 2):
        signed = theirs[client].sign("f", client, b"masks")
        given["identity"].check("f", {client: b"masks"}, {client: signed})
        with pytest.raises(RefusedError, match="key"):
            given["identity"].check("f", {client: b"more"}, {client: signed})
    assert (
        given["seal"].author([b"asked"], server_seal(keys).mark([b"asked"])) == EVERYONE
    )
    assert server_seal(keys).author([b"said"], given["seal"].mark([b"said"])) == 1
    ((_, link),) = took_part
    assert (link.superlink, link.root_certificates) == ("127.0.0.1:1", tmp_path / "ca")
    assert link.private_key == tmp_path / TRIAL_KEYS / "1"
