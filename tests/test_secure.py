"""Masks cancel exactly, hide what is under them, and are used once."""

import hashlib
import hmac
import math
import struct
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.errors import (
    InvalidInputError,
    MaskReuseError,
    RevealRefusedError,
    UnmaskingError,
)
from fedbilevel.federation.secure.fixed_point import (
    FRACTION_BITS,
    block_scales,
    decode_mean,
    encode,
)
from fedbilevel.federation.secure.layout import MOST_PARTICIPANTS, MaskedExchange
from fedbilevel.federation.secure.masks import SiteKeys, add_mask
from fedbilevel.federation.secure.protocol import Answered, SecureSite
from fedbilevel.federation.secure.unmasking import Unmasking
from tests.masked import confirmations, opened, revealed

SHAPES = [(3,), (), (2, 2)]
SCALES = [0, 3, -4]
KEYS = [SiteKeys.from_bytes(hashlib.sha256(bytes([k])).digest()) for k in range(6)]
ROSTER = {client: keys.public_bytes for client, keys in enumerate(KEYS)}
THREE = MaskedExchange(7, (0, 1, 2))


def site(client: int, **changes) -> SecureSite:
    arguments = {"federation": "trial", "roster": ROSTER, **changes}
    return SecureSite(client=client, keys=KEYS[client], **arguments)


def sites(count: int, **changes) -> list[SecureSite]:
    return [site(client, **changes) for client in range(count)]


def blocks_of(client: int) -> list[np.ndarray]:
    """Numbers that fixed point holds exactly, so that their sums are exact as well."""
    draw = np.random.default_rng(client)
    return [draw.integers(-(2**20), 2**20, shape) / 2.0**16 for shape in SHAPES]


def replies_of(members, exchange, blocks=blocks_of, weight=1.0, scales=SCALES):
    return {
        member.client: member.mask_reply(
            exchange, blocks(member.client), weight, scales
        )
        for member in members
        if member.client in exchange.participants
    }


def add_up(words) -> np.ndarray:
    return np.stack(list(words)).sum(axis=0, dtype=np.uint64)


def assert_exact_mean(total, clients, weight=1.0):
    weights = dict.fromkeys(clients, weight)
    for number, mean in enumerate(decode_mean(total, weights, SCALES, SHAPES)[0]):
        exact = sum(blocks_of(client)[number] for client in clients) / len(clients)
        assert mean.shape == SHAPES[number]
        np.testing.assert_array_equal(mean, exact)


# Sums


@pytest.mark.parametrize("count", range(2, 7))
def test_masks_cancel_exactly_in_the_whole_sum_and_in_no_other(count):
    exchange, members = MaskedExchange(0, tuple(range(count))), sites(count)
    replies = replies_of(members, exchange)
    total = opened(members, exchange, replies)
    plain = [encode(blocks_of(k), 1.0, SCALES, count) for k in range(count)]
    np.testing.assert_array_equal(total, add_up(plain))
    assert_exact_mean(total, range(count))
    for size in range(1, count):
        for some in combinations(range(count), size):
            part = add_up(replies[k].words for k in some)
            with pytest.raises(UnmaskingError, match="not all masks are out of it"):
                decode_mean(part, dict.fromkeys(some, 1.0), SCALES, SHAPES)


@pytest.mark.parametrize("count", range(3, 7))
def test_whoever_drops_out_the_sum_over_the_others_is_exact(count):
    exchange = MaskedExchange(2**64 - 1, tuple(range(count)))
    for size in range(count // 3 + 1):
        for dropped in combinations(range(count), size):
            members = [one for one in sites(count) if one.client not in dropped]
            replies = replies_of(members, exchange, weight=0.5)
            total = opened(members, exchange, replies)
            assert_exact_mean(total, replies, weight=0.5)


def test_clients_have_any_numbers_and_are_announced_in_any_order():
    keys = {number: SiteKeys.generate() for number in (900, 3, 2**40)}
    roster = {number: pair.public_bytes for number, pair in keys.items()}
    members = [SecureSite("trial", k, keys[k], roster) for k in keys]
    one, other = MaskedExchange(1, (3, 900, 2**40)), MaskedExchange(1, (2**40, 3, 900))
    replies = {
        member.client: member.mask_reply(exchange, [np.ones(2)], 1.0, [0])
        for member, exchange in zip(members, (one, other, one), strict=True)
    }
    total = opened(members, one, replies)
    (mean,), _ = decode_mean(total, dict.fromkeys(keys, 1), [0], [(2,)])
    np.testing.assert_array_equal(mean, np.ones(2))


@settings(max_examples=60)
@given(data=st.data())
def test_any_drop_outs_leave_the_plain_mean_or_name_who_is_missing(data):
    """Drop-outs before the reply, and between the reply and the reveal."""
    count = data.draw(st.integers(2, 6))
    before = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    after = data.draw(st.sets(st.integers(0, count - 1))) - before
    weights = data.draw(st.lists(st.floats(0.05, 1.0), min_size=count, max_size=count))
    exchange = MaskedExchange(5, tuple(range(count)))
    members = [one for one in sites(count) if one.client not in before]
    replies = {
        one.client: one.mask_reply(
            exchange, blocks_of(one.client), weights[one.client], SCALES
        )
        for one in members
    }
    needed = math.ceil(2 * count / 3)
    if len(replies) < needed:
        with pytest.raises(RevealRefusedError, match=f"of {needed} needed"):
            opened(members, exchange, replies)
    elif len(replies) - len(after) < needed or (before and after):
        # Nobody else has the seeds that the dropped share with the silent.
        with pytest.raises(UnmaskingError) as failure:
            opened(members, exchange, replies, silent=after)
        assert set(failure.value.suspects) == after
    else:
        total = opened(members, exchange, replies, silent=after)
        shares = {k: weights[k] for k in replies}
        for number, mean in enumerate(decode_mean(total, shares, SCALES, SHAPES)[0]):
            values = [blocks_of(k)[number] for k in replies]
            exact = np.average(values, axis=0, weights=list(shares.values()))
            resolution = 2.0 ** (SCALES[number] - FRACTION_BITS - 1)
            bound = resolution * len(shares) / sum(shares.values())
            assert np.max(np.abs(mean - exact)) <= bound + 1e-12


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5),
)
def test_the_mean_is_within_the_stated_bound(seed, weights):
    draw, count = np.random.default_rng(seed), len(weights)
    sizes = np.asarray([1e-6, 1.0, 1e4])
    values = draw.normal(size=(count, 3, 20)) * sizes[:, None]
    scales = block_scales(list(draw.normal(size=(3, 20)) * sizes[:, None]))
    exchange = MaskedExchange(3, tuple(range(count)))
    members = sites(count)
    replies = {
        one.client: one.mask_reply(
            exchange, list(values[one.client]), weights[one.client], scales
        )
        for one in members
    }
    total = opened(members, exchange, replies)
    means, _ = decode_mean(total, dict(enumerate(weights)), scales, [(20,)] * 3)
    for number, mean in enumerate(means):
        exact = np.average(values[:, number], axis=0, weights=weights)
        off = np.max(np.abs(mean - exact))
        bound = 2.0 ** (scales[number] - FRACTION_BITS - 1) / np.mean(weights)
        assert off <= bound + 1e-14 * np.max(np.abs(exact))
        assert off <= 1e-4 * np.max(np.abs(exact))


# What a masked reply shows


def chi_square(words: np.ndarray) -> float:
    counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    expected = words.nbytes / 256
    return float(np.sum((counts - expected) ** 2) / expected)


def test_a_masked_reply_looks_uniform_whatever_is_under_it():
    size, exchange = 20_000, MaskedExchange(0, (0, 1))
    plain = [np.zeros(size), np.linspace(-100.0, 100.0, size)]
    for client in (0, 1):
        for value in plain:
            reply = site(client).mask_reply(exchange, [value], 1.0, [0]).words
            hidden = encode([value], 1.0, [0], 2)
            # 255 degrees of freedom have mean 255 and standard deviation 22.6.
            assert abs(chi_square(reply) - 255) < 5 * 22.6
            assert chi_square(hidden) > 10_000
            # Uniform and independent: correlations of order 1 / sqrt(size).
            order = np.corrcoef(reply[:-2].astype(float), plain[1])[0, 1]
            assert abs(order) < 5 / np.sqrt(size)
            bits = np.unpackbits(reply.view(np.uint8) ^ hidden.view(np.uint8))
            assert abs(np.mean(bits) - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
            assert not np.any(reply == hidden)
            assert value.tobytes()[:64] not in reply.tobytes()


def test_masks_of_different_exchanges_have_nothing_in_common():
    exchanges = [
        MaskedExchange(0, (0, 1)),
        MaskedExchange(1, (0, 1)),
        MaskedExchange(0, (0, 1, 2)),
        MaskedExchange(0, (0, 1), b"about another message"),
    ]
    members = [*(site(0) for _ in exchanges), site(0, federation="another")]
    exchanges.append(exchanges[0])
    replies = [
        one.mask_reply(exchange, [np.zeros(5000)], 1.0, [0]).words
        for one, exchange in zip(members, exchanges, strict=True)
    ]
    for one, other in combinations(replies, 2):
        assert not np.any(one == other)
        assert abs(chi_square(one - other) - 255) < 5 * 22.6


def test_a_mask_is_the_key_stream_of_its_seed():
    # RFC 8439, appendix A.1, test vector 1: key, nonce and counter are zero.
    known = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    size = 2**17 + 3
    mask, taken = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
    add_mask(mask, bytes(32), 1)
    add_mask(taken, bytes(32), -1)
    assert mask[:4].astype("<u8").tobytes().hex() == known
    stream = Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), None).encryptor()
    assert mask.astype("<u8").tobytes() == stream.update(bytes(8 * size))
    np.testing.assert_array_equal(mask + taken, 0)


def derive(secret: bytes, info: bytes, size: int = 32) -> bytes:
    """RFC 5869, without a salt."""
    key, block, made = hmac.digest(bytes(32), secret, "sha256"), b"", b""
    info = b"fedbilevel secure mean 2 " + info
    for number in range(-(-size // 32)):
        block = hmac.digest(key, block + info + bytes([number + 1]), "sha256")
        made += block
    return made[:size]


def test_seeds_are_derived_as_written_down():
    # RFC 7748, section 6.1.
    alice, bob, shared = (
        bytes.fromhex(text)
        for text in (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
            "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742",
        )
    )
    pairs = {4: SiteKeys.from_bytes(alice), 9: SiteKeys.from_bytes(bob)}
    roster = {k: pair.public_bytes for k, pair in pairs.items()}
    assert pairs[4].shared_secret(roster[9]) == shared
    exchange = MaskedExchange(5, (4, 9), b"context")
    one = SecureSite("trial", 4, pairs[4], roster)
    reply = one.mask_reply(exchange, [np.zeros(1)], 1.0, [0]).words
    who = struct.pack("<Q", 4) + roster[4] + struct.pack("<Q", 9) + roster[9]
    name = hashlib.sha256(b"trial").digest()
    digest = hashlib.sha256(struct.pack("<4Q", 5, 2, 4, 9) + b"context").digest()
    made = derive(derive(shared, b"pair " + name + who), b"exchange " + digest, 168)
    own = derive(alice, b"own mask " + name + digest)
    secret = int.from_bytes(own, "little") % (2**127 - 1)
    add_mask(reply, made[:32], -1)
    add_mask(reply, derive(secret.to_bytes(16, "little"), b"self " + digest), -1)
    np.testing.assert_array_equal(reply, encode([np.zeros(1)], 1.0, [0], 2))


# Range and scales


@pytest.mark.parametrize(
    ("block", "scale"),
    [
        (0.0, 0),
        (-1.0, 0),
        (1.0000001, 1),
        (-2.0, 1),
        (1e-6, 0),
        ([3.0, -1e4], 14),
        ([], 0),
        (np.float32(5), 3),
        (1.7e308, 1024),
    ],
)
def test_a_scale_is_the_power_of_two_that_holds_the_block(block, scale):
    assert block_scales([np.asarray(block), np.zeros(2)]) == [scale, 0]


@pytest.mark.parametrize("count", [2, 3, 5, 7, 1000, 65535, MOST_PARTICIPANTS])
@pytest.mark.parametrize("scale", [0, 5, -3])
def test_the_largest_numbers_do_not_wrap_and_larger_ones_are_cut(count, scale):
    most = 2.0 ** (63 - FRACTION_BITS + scale) / count
    assert count != MOST_PARTICIPANTS or most == 2.0**7 * 2.0**scale
    inside = [np.asarray([most, -most]) * (1 - 2**-40)]
    word = encode(inside, 1.0, [scale], count)
    total = word * np.uint64(count)
    exact = [int(one) * count for one in word[:2].view(np.int64)]
    assert [int(one) for one in total[:2].view(np.int64)] == exact
    assert encode([inside[0] * 2], 0.5, [scale], count)[0] == word[0]
    assert word[2] == 0
    for larger in (1.001, 1e30, math.inf):
        cut = encode([[most * larger, -most * larger, 1.0]], 1.0, [scale], count)
        most_of_all, least, plain, flag = cut[:4].view(np.int64).tolist()
        # All of them together neither wrap nor lose more than a double does.
        assert 2**63 * (1 - 2**-40) < most_of_all * count < 2**63
        assert least == -most_of_all and flag == 1
        assert plain == 2.0 ** (FRACTION_BITS - scale)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e308])
def test_numbers_that_are_not_finite_are_answered_and_counted_in_the_sum(value):
    """A refusal would say something of the rows in the clear."""

    def blocks(client):
        first, *others = blocks_of(client)
        return [np.where(client == 1, value, first), *others]

    members = sites(3)
    replies = replies_of(members, THREE, blocks)
    total = opened(members, THREE, replies)
    means, cut = decode_mean(total, dict.fromkeys(range(3), 1.0), SCALES, SHAPES)
    assert cut == 1 and np.isfinite(means[0]).all()
    for number in (1, 2):
        exact = sum(blocks_of(client)[number] for client in range(3)) / 3
        np.testing.assert_array_equal(means[number], exact)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_of_numbers_that_are_not_finite(value):
    with pytest.raises(InvalidInputError, match="block 1 holds NaN or infinity"):
        block_scales([np.zeros(2), np.asarray([0.0, value])])


# Masks are used once


def test_no_number_is_answered_twice_whatever_is_asked():
    """Whether a reply is the same as before would say something of the rows."""
    members = sites(3)
    one, replies = members[0], replies_of(members, THREE)
    for _ in range(2):
        for other, values in (
            (THREE, blocks_of(0)),
            (THREE, blocks_of(1)),
            (MaskedExchange(7, (0, 1, 2, 3)), blocks_of(0)),
            (MaskedExchange(7, (0, 1, 2), b"message"), blocks_of(0)),
            (MaskedExchange(6, (0, 1, 2)), blocks_of(0)),
        ):
            with pytest.raises(MaskReuseError, match="client 0, exchange [67]: a "):
                one.mask_reply(other, values, 1.0, SCALES)
        opened(members, THREE, replies)  # and so it stays after the sum was opened
    one.mask_reply(MaskedExchange(8, (0, 1, 2)), blocks_of(1), 1.0, SCALES)


def test_a_second_reply_under_the_same_masks_would_show_the_difference():
    one, other = (
        site(0).mask_reply(THREE, blocks_of(k), 1.0, SCALES).words for k in (1, 2)
    )
    plain, changed = (encode(blocks_of(k), 1.0, SCALES, 3) for k in (1, 2))
    np.testing.assert_array_equal(one - other, plain - changed)


@pytest.mark.parametrize(
    ("exchange", "survivors", "told"),
    [
        (THREE, [1, 2], "this site has replied"),
        (THREE, [], "this site has replied"),
        (THREE, [0, 1, 3], r"clients \(0, 1, 3\) are not all among its participants"),
        (THREE, [0], "1 in the sum, of 2 needed"),
        (MaskedExchange(8, (0, 1, 2)), [0, 1], "sent no reply to it with these"),
        (MaskedExchange(7, (0, 1, 2, 3)), [0, 1, 2], "sent no reply to it with these"),
        (MaskedExchange(7, (0, 1, 2), b"another"), [0, 1], "sent no reply to it"),
    ],
)
def test_sums_that_are_not_confirmed(exchange, survivors, told):
    one = site(0)
    one.mask_reply(THREE, blocks_of(0), 1.0, SCALES)
    kept = dict(one.records)
    with pytest.raises(RevealRefusedError, match=f"client 0, exchange .*: .*{told}"):
        one.confirm(exchange, survivors)
    assert one.records == kept


def test_one_sum_is_confirmed_and_revealed_and_no_other():
    """Shares of one's own mask and seeds with it are never given both."""
    members = sites(3)
    replies = replies_of(members, THREE)
    tags = confirmations(members, THREE, (0, 1, 2))
    first = revealed(members, THREE, replies, tags)[0]
    assert first.shares.any(axis=1).all() and not first.seeds.any()
    for survivors in ((0, 1), (0, 2)):
        with pytest.raises(RevealRefusedError, match=r"\(0, 1, 2\) was confirmed"):
            members[0].confirm(THREE, survivors)
        with pytest.raises(RevealRefusedError, match="not the one that was confirmed"):
            revealed(members[:1], THREE, replies, tags, survivors)
    again = revealed(members, THREE, replies, tags)[0]
    np.testing.assert_array_equal(again.shares, first.shares)


def test_a_higher_minimum():
    one, all_five = site(0, minimum=5), MaskedExchange(1, (0, 1, 2, 3, 4))
    with pytest.raises(InvalidInputError, match="3 participants, .*minimum is 5"):
        one.mask_reply(THREE, blocks_of(0), 1.0, SCALES)
    one.mask_reply(all_five, blocks_of(0), 1.0, SCALES)
    with pytest.raises(RevealRefusedError, match="4 in the sum, of 5 needed"):
        one.confirm(all_five, [0, 1, 2, 3])
    # Others hold it to its word as well, and do not give its share in a smaller sum.
    some = sites(3)
    replies = replies_of([site(0, minimum=3), *some[1:]], THREE)
    some[0].mask_reply(THREE, blocks_of(0), 1.0, SCALES)
    tags = {k: some[k].confirm(THREE, [0, 1]) for k in (0, 1)}
    del replies[2]
    given = revealed(some[1:2], THREE, replies, tags, [0, 1])[1]
    assert given.shares.any(axis=1).tolist() == [False, True, False]
    with pytest.raises(InvalidInputError, match="minimum=1"):
        site(0, minimum=1)


def test_a_restarted_site_goes_on_where_it_was():
    members = sites(3)
    replies = replies_of(members[:2], THREE)
    tags = confirmations(members[:2], THREE, (0, 1))
    first = revealed(members[:1], THREE, replies, tags)[0]
    keys = SiteKeys.from_bytes(KEYS[0].private_bytes)
    records = {
        number: Answered(kept.exchange, kept.context, kept.question, kept.survivors)
        for number, kept in members[0].records.items()
    }
    other = SecureSite("trial", 0, keys, ROSTER, records=records)
    np.testing.assert_array_equal(
        revealed([other], THREE, replies, tags)[0].seeds, first.seeds
    )
    with pytest.raises(MaskReuseError):
        other.mask_reply(THREE, blocks_of(0), 1.0, SCALES)
    with pytest.raises(RevealRefusedError):
        other.confirm(THREE, (0, 2))


# Disagreement between sites and server


def swapped() -> dict[int, bytes]:
    return {**ROSTER, 1: KEYS[5].public_bytes}


@pytest.mark.parametrize(
    "change",
    [
        {"federation": "another"},
        {"roster": swapped()},
        {"exchange": MaskedExchange(8, (0, 1, 2))},
        {"exchange": MaskedExchange(7, (0, 1, 2, 3))},
        {"exchange": MaskedExchange(7, (0, 1, 2), b"about another message")},
        {"weight": 0.25},
        {"scales": [0, 3, -3]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_site_that_differs_from_the_others_is_noticed(change):
    odd = {name: change[name] for name in ("federation", "roster") if name in change}
    exchange = change.get("exchange", THREE)
    weight, scales = change.get("weight", 1.0), change.get("scales", SCALES)
    members = [site(0, **odd), *sites(3)[1:]]
    replies = replies_of(members[1:], THREE)
    replies[0] = members[0].mask_reply(exchange, blocks_of(0), weight, scales)
    if "weight" in change or "scales" in change:
        total = opened(members, THREE, replies)
        with pytest.raises(UnmaskingError, match=r"clients \[0, 1, 2\] is not one of"):
            assert_exact_mean(total, range(3))
        return
    sealed = {
        k: reply._replace(sealed=reply.sealed[:3]) for k, reply in replies.items()
    }
    with pytest.raises(UnmaskingError, match="do not have the seeds") as failure:
        Unmasking(THREE, sealed, {}).total()
    # Who has another key for client 1 than everybody else, or client 1: that is open.
    assert failure.value.suspects.keys() <= ({0, 1} if "roster" in change else {0})


def test_weights_in_float32_are_the_same_weights():
    members = sites(2)
    exchange = MaskedExchange(0, (0, 1))
    replies = replies_of(members, exchange, weight=0.3)
    weights = dict.fromkeys(range(2), float(np.float32(0.3)))
    total = opened(members, exchange, replies)
    means, _ = decode_mean(total, weights, SCALES, SHAPES)
    exact = (blocks_of(0)[0] + blocks_of(1)[0]) / 2
    np.testing.assert_allclose(means[0], exact, rtol=1e-6)


def test_replies_that_do_not_fit():
    replies = replies_of(sites(3), THREE)
    words = {k: reply.words for k, reply in replies.items()}
    for wrong in (
        {},
        {**replies, 4: replies[0]},
        {**replies, 1: replies[1]._replace(words=words[1][:-1])},
        {k: one._replace(words=words[k].astype(float)) for k, one in replies.items()},
    ):
        with pytest.raises(UnmaskingError, match="uint64 arrays of one shape"):
            Unmasking(THREE, wrong, {}).total()
    with pytest.raises(UnmaskingError, match=r"shape \(10,\) does not hold"):
        decode_mean(words[0], {0: 1.0}, [0], [(3,)])


def test_the_server_leaves_replies_as_they_came():
    members = sites(2)
    replies = replies_of(members, MaskedExchange(0, (0, 1)))
    kept = {client: reply.words.copy() for client, reply in replies.items()}
    opened(members, MaskedExchange(0, (0, 1)), replies)
    for client, reply in replies.items():
        np.testing.assert_array_equal(reply.words, kept[client])


# Inputs that cannot be used


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_of_a_wrong_length(length):
    with pytest.raises(InvalidInputError, match=f"key of client 1 .*{length} bytes"):
        site(0, roster={**ROSTER, 1: bytes(length)})
    with pytest.raises(InvalidInputError, match=f"private key .* has {length} bytes"):
        SiteKeys.from_bytes(bytes(length))


def test_a_public_key_without_a_secret():
    one = site(0, roster={**ROSTER, 1: bytes(32)})
    with pytest.raises(InvalidInputError, match="client 1: no secret can be shared"):
        one.mask_reply(THREE, blocks_of(0), 1.0, SCALES)


def test_rosters_and_participants_without_this_site():
    others = {client: key for client, key in ROSTER.items() if client}
    for roster in (others, {**ROSTER, 0: ROSTER[1]}):
        with pytest.raises(InvalidInputError, match="client 0: .*another public key"):
            site(0, roster=roster)
    with pytest.raises(InvalidInputError, match="this site is not among"):
        site(4).mask_reply(THREE, blocks_of(4), 1.0, SCALES)
    with pytest.raises(InvalidInputError, match=r"clients \[8\] are not in the roster"):
        site(0).mask_reply(MaskedExchange(0, (0, 8)), blocks_of(0), 1.0, SCALES)


@pytest.mark.parametrize(
    ("number", "participants", "told"),
    [
        (-1, (0, 1), "exchange -1: number exchanges from 0"),
        (2**64, (0, 1), "number exchanges from 0"),
        (0, (0, 1, 1), "must be different client numbers"),
        (0, (-1, 1), "must be different client numbers"),
        (0, (0, 2**64), "must be different client numbers"),
        (0, (), "0 participants cannot hide"),
        (0, (3,), "1 participants cannot hide"),
        (0, tuple(range(MOST_PARTICIPANTS + 1)), "between 2 and 65536"),
    ],
)
def test_exchanges_that_cannot_be_announced(number, participants, told):
    with pytest.raises(InvalidInputError, match=told):
        MaskedExchange(number, participants)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.5, np.nan])
def test_weights_out_of_range(weight):
    with pytest.raises(InvalidInputError, match=f"weight={weight}: divide weights"):
        site(0).mask_reply(THREE, blocks_of(0), weight, SCALES)


def test_scales_and_blocks_that_do_not_match():
    with pytest.raises(InvalidInputError, match="2 scales for 3 blocks"):
        site(0).mask_reply(THREE, blocks_of(0), 1.0, SCALES[:2])
    with pytest.raises(InvalidInputError, match="0 scales for 0 blocks"):
        site(0).mask_reply(THREE, [], 1.0, [])
    with pytest.raises(InvalidInputError, match="3 scales for 2 blocks"):
        decode_mean(np.zeros(4, np.uint64), {0: 1.0}, SCALES, [(3,), (1,)])


def test_new_keys_differ_and_do_not_show_in_print():
    one, other = SiteKeys.generate(), SiteKeys.generate()
    assert one.private_bytes != other.private_bytes
    assert one.public_bytes != other.public_bytes
    assert one.private_bytes.hex() not in repr(one)
    assert repr(one.private_bytes) not in repr(one)
