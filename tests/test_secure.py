"""Masks cancel exactly, hide what is under them, and are used once."""

import hashlib
import hmac
import struct
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.errors import (
    InvalidInputError,
    MaskRangeError,
    MaskReuseError,
    RevealRefusedError,
    UnmaskingError,
)
from fedbilevel.federation.secure.fixed_point import FRACTION_BITS, encode
from fedbilevel.federation.secure.protocol import (
    MOST_PARTICIPANTS,
    Answered,
    MaskedExchange,
    SecureSite,
    SiteKeys,
    block_scales,
    decode_mean,
    unmask_sum,
)

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


def add_up(replies) -> np.ndarray:
    return np.stack(list(replies)).sum(axis=0, dtype=np.uint64)


def assert_exact_mean(total, clients, weight=1.0):
    weights = dict.fromkeys(clients, weight)
    for number, mean in enumerate(decode_mean(total, weights, SCALES, SHAPES)):
        exact = sum(blocks_of(client)[number] for client in clients) / len(clients)
        assert mean.shape == SHAPES[number]
        np.testing.assert_array_equal(mean, exact)


# Sums


@pytest.mark.parametrize("count", range(2, 7))
def test_masks_cancel_exactly_in_the_whole_sum_and_in_no_other(count):
    exchange = MaskedExchange(0, tuple(range(count)))
    replies = replies_of(sites(count), exchange)
    total = unmask_sum(exchange, replies)
    plain = [encode(blocks_of(k), 1.0, SCALES, count) for k in range(count)]
    np.testing.assert_array_equal(total, add_up(plain))
    assert_exact_mean(total, range(count))
    for size in range(1, count):
        for some in combinations(range(count), size):
            part = add_up(replies[k] for k in some)
            with pytest.raises(UnmaskingError, match="not all masks are out of it"):
                decode_mean(part, dict.fromkeys(some, 1.0), SCALES, SHAPES)


@pytest.mark.parametrize("count", range(3, 7))
def test_whoever_drops_out_the_sum_over_the_others_is_exact(count):
    exchange = MaskedExchange(2**64 - 1, tuple(range(count)))
    for size in range(1, count - 1):
        for dropped in combinations(range(count), size):
            members = [one for one in sites(count) if one.client not in dropped]
            replies = replies_of(members, exchange, weight=0.5)
            seeds = {one.client: one.reveal_seeds(exchange, dropped) for one in members}
            total = unmask_sum(exchange, replies, seeds)
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
    (mean,) = decode_mean(unmask_sum(one, replies), dict.fromkeys(keys, 1), [0], [(2,)])
    np.testing.assert_array_equal(mean, np.ones(2))


@settings(max_examples=40, deadline=None)
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
    replies = {
        one.client: one.mask_reply(
            exchange, list(values[one.client]), weights[one.client], scales
        )
        for one in sites(count)
    }
    total = unmask_sum(exchange, replies)
    means = decode_mean(total, dict(enumerate(weights)), scales, [(20,)] * 3)
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
            reply = site(client).mask_reply(exchange, [value], 1.0, [0])
            hidden = encode([value], 1.0, [0], 2)
            # 255 degrees of freedom have mean 255 and standard deviation 22.6.
            assert abs(chi_square(reply) - 255) < 5 * 22.6
            assert chi_square(hidden) > 10_000
            # Uniform and independent: correlations of order 1 / sqrt(size).
            order = np.corrcoef(reply[:-1].astype(float), plain[1])[0, 1]
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
    ]
    members = [site(0), site(0), site(0), site(0, federation="another")]
    exchanges.append(exchanges[0])
    replies = [
        one.mask_reply(exchange, [np.zeros(5000)], 1.0, [0])
        for one, exchange in zip(members, exchanges, strict=True)
    ]
    for one, other in combinations(replies, 2):
        assert not np.any(one == other)
        assert abs(chi_square(one - other) - 255) < 5 * 22.6


def test_a_mask_is_the_key_stream_of_its_seed():
    # RFC 8439, appendix A.1, test vector 1: key, nonce and counter are zero.
    known = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    size, exchange = 2**17 + 3, MaskedExchange(0, (0, 1))
    replies, seeds = {0: np.zeros(size, np.uint64)}, {0: {1: bytes(32)}}
    mask = -unmask_sum(exchange, replies, seeds)
    assert mask[:4].astype("<u8").tobytes().hex() == known
    stream = Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), None).encryptor()
    assert mask.astype("<u8").tobytes() == stream.update(bytes(8 * size))
    # The later client subtracts what the earlier one adds.
    other = unmask_sum(exchange, {1: replies[0]}, {1: {0: bytes(32)}})
    np.testing.assert_array_equal(other, mask)


def test_seeds_are_derived_as_written_down():
    def derive(secret: bytes, info: bytes) -> bytes:  # RFC 5869, without a salt
        key = hmac.digest(bytes(32), secret, "sha256")
        return hmac.digest(key, b"fedbilevel secure mean 1 " + info + b"\1", "sha256")

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
    third = X25519PrivateKey.from_private_bytes(bytes(32)).public_key()
    roster = {k: pair.public_bytes for k, pair in pairs.items()}
    roster[11] = third.public_bytes_raw()
    assert pairs[4].shared_secret(roster[9]) == shared
    exchange = MaskedExchange(5, (4, 9, 11))
    one = SecureSite("trial", 4, pairs[4], roster)
    one.mask_reply(exchange, [np.zeros(1)], 1.0, [0])
    who = struct.pack("<Q", 4) + roster[4] + struct.pack("<Q", 9) + roster[9]
    secret = derive(shared, b"pair " + hashlib.sha256(b"trial").digest() + who)
    digest = hashlib.sha256(struct.pack("<4Q", 5, 4, 9, 11)).digest()
    assert one.reveal_seeds(exchange, [9]) == {9: derive(secret, b"exchange " + digest)}


def test_what_late_replies_give_away_is_what_the_module_says():
    exchange = MaskedExchange(0, (0, 1, 2, 3))
    members = sites(4)
    replies = replies_of(members, exchange)

    def opened(late: tuple[int, ...], dropped: tuple[int, ...]) -> np.ndarray:
        """Take the masks that survivors share with late clients out of their sum."""
        staying = [one for one in sites(4) if one.client not in dropped]
        replies_of(staying, exchange)
        total = add_up(replies[k] for k in late)
        for one in staying:
            known = one.reveal_seeds(exchange, dropped)
            for client in late:
                pair = MaskedExchange(0, (client, one.client))
                reply = {client: np.zeros_like(total)}
                total += unmask_sum(pair, reply, {client: {one.client: known[client]}})
        return total

    assert_exact_mean(opened((2,), dropped=(2,)), (2,))
    assert_exact_mean(opened((2, 3), dropped=(2, 3)), (2, 3))
    with pytest.raises(UnmaskingError):
        assert_exact_mean(opened((2,), dropped=(2, 3)), (2,))


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
def test_the_largest_numbers_do_not_wrap_and_larger_ones_raise(count, scale):
    most = 2.0 ** (63 - FRACTION_BITS + scale) / count
    assert count != MOST_PARTICIPANTS or most == 2.0**7 * 2.0**scale
    inside = [np.asarray([most, -most]) * (1 - 2**-40)]
    word = encode(inside, 1.0, [scale], count)
    total = word * np.uint64(count)
    exact = [int(one) * count for one in word[:2].view(np.int64)]
    assert [int(one) for one in total[:2].view(np.int64)] == exact
    assert encode([inside[0] * 2], 0.5, [scale], count)[0] == word[0]
    told = rf"block 1 .* holds {most * 1.001:.6g}, .*weight 1, scale 2\^{scale} and "
    told += rf"{count} participants .*within {most:.6g} either side"
    for sign in (-1, 1):
        with pytest.raises(MaskRangeError, match=told.replace("+", r"\+")):
            encode([np.zeros(2), [sign * most * 1.001]], 1.0, [0, scale], count)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(value):
    one = site(0)
    with pytest.raises(MaskRangeError, match="block 1 of the reply holds NaN or inf"):
        one.mask_reply(THREE, [np.zeros(2), np.asarray([0.0, value])], 1.0, [0, 0])
    assert one.records == {}
    with pytest.raises(InvalidInputError, match="block 1 holds NaN or infinity"):
        block_scales([np.zeros(2), np.asarray([0.0, value])])


def test_numbers_beyond_all_integers():
    with pytest.raises(MaskRangeError, match="holds 1e\\+308"):
        site(0).mask_reply(THREE, [np.asarray([1e308])], 1.0, [0])


# Masks are used once


def test_the_same_reply_may_be_sent_again_and_no_other():
    one = site(0)
    first = one.mask_reply(THREE, blocks_of(0), 1.0, SCALES)
    for _ in range(2):
        again = one.mask_reply(THREE, blocks_of(0), 1.0, SCALES)
        np.testing.assert_array_equal(again, first)
        with pytest.raises(
            MaskReuseError, match="client 0, exchange 7: .*other values"
        ):
            one.mask_reply(THREE, blocks_of(1), 1.0, SCALES)
        with pytest.raises(MaskReuseError, match="other values"):
            one.mask_reply(THREE, blocks_of(0), 0.5, SCALES)
        with pytest.raises(MaskReuseError, match="other participants"):
            one.mask_reply(MaskedExchange(7, (0, 1, 2, 3)), blocks_of(0), 1.0, SCALES)
        one.reveal_seeds(THREE, [2])  # and so it stays after seeds were revealed
    one.mask_reply(MaskedExchange(8, (0, 1, 2)), blocks_of(1), 1.0, SCALES)


def test_a_second_reply_under_the_same_masks_would_show_the_difference():
    one, other = (site(0).mask_reply(THREE, blocks_of(k), 1.0, SCALES) for k in (1, 2))
    plain, changed = (encode(blocks_of(k), 1.0, SCALES, 3) for k in (1, 2))
    np.testing.assert_array_equal(one - other, plain - changed)


@pytest.mark.parametrize(
    ("exchange", "dropped", "told"),
    [
        (THREE, [0], "this site has replied"),
        (THREE, [], r"clients \(\) are not some of its participants"),
        (THREE, [3], r"clients \(3,\) are not some of its participants"),
        (THREE, [1, 2], "1 in the sum would be fewer than the minimum 2"),
        (
            MaskedExchange(8, (0, 1, 2)),
            [2],
            "sent no reply to it with these participants",
        ),
        (
            MaskedExchange(7, (0, 1, 2, 3)),
            [3],
            "sent no reply to it with these participants",
        ),
    ],
)
def test_seeds_that_are_not_revealed(exchange, dropped, told):
    one = site(0)
    one.mask_reply(THREE, blocks_of(0), 1.0, SCALES)
    kept = dict(one.records)
    with pytest.raises(RevealRefusedError, match=f"client 0, exchange .*: .*{told}"):
        one.reveal_seeds(exchange, dropped)
    assert one.records == kept


def test_seeds_are_revealed_for_one_set_of_dropped_clients():
    exchange = MaskedExchange(0, (0, 1, 2, 3))
    one = site(0)
    one.mask_reply(exchange, blocks_of(0), 1.0, SCALES)
    first = one.reveal_seeds(exchange, [3])
    for dropped in ([2], [2, 3]):
        with pytest.raises(RevealRefusedError, match=r"seeds for clients \(3,\) were"):
            one.reveal_seeds(exchange, dropped)
    assert one.reveal_seeds(exchange, [3]) == first


def test_a_higher_minimum():
    one = site(0, minimum=3)
    with pytest.raises(InvalidInputError, match="2 participants, .*minimum is 3"):
        one.mask_reply(MaskedExchange(0, (0, 1)), blocks_of(0), 1.0, SCALES)
    one.mask_reply(THREE, blocks_of(0), 1.0, SCALES)
    with pytest.raises(RevealRefusedError, match="2 in the sum .*the minimum 3"):
        one.reveal_seeds(THREE, [2])
    with pytest.raises(InvalidInputError, match="minimum=1"):
        site(0, minimum=1)


def test_a_restarted_site_goes_on_where_it_was():
    one = site(0)
    first = one.mask_reply(THREE, blocks_of(0), 1.0, SCALES)
    seeds = one.reveal_seeds(THREE, [2])
    keys = SiteKeys.from_bytes(KEYS[0].private_bytes)
    records = {
        number: Answered(kept.exchange, kept.reply, kept.dropped)
        for number, kept in one.records.items()
    }
    other = SecureSite("trial", 0, keys, ROSTER, records=records)
    np.testing.assert_array_equal(
        other.mask_reply(THREE, blocks_of(0), 1.0, SCALES), first
    )
    assert other.reveal_seeds(THREE, [2]) == seeds
    with pytest.raises(MaskReuseError):
        other.mask_reply(THREE, blocks_of(1), 1.0, SCALES)
    with pytest.raises(RevealRefusedError):
        other.reveal_seeds(THREE, [1])


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
        {"weight": 0.25},
        {"scales": [0, 3, -3]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_site_that_differs_from_the_others_is_noticed(change):
    odd = {name: change[name] for name in ("federation", "roster") if name in change}
    exchange = change.get("exchange", THREE)
    weight, scales = change.get("weight", 1.0), change.get("scales", SCALES)
    replies = replies_of(sites(3)[1:], THREE)
    replies[0] = site(0, **odd).mask_reply(exchange, blocks_of(0), weight, scales)
    with pytest.raises(UnmaskingError, match=r"clients \[0, 1, 2\] is not one of"):
        assert_exact_mean(unmask_sum(THREE, replies), range(3))


def test_weights_in_float32_are_the_same_weights():
    members = sites(2)
    exchange = MaskedExchange(0, (0, 1))
    replies = replies_of(members, exchange, weight=0.3)
    weights = dict.fromkeys(range(2), float(np.float32(0.3)))
    means = decode_mean(unmask_sum(exchange, replies), weights, SCALES, SHAPES)
    exact = (blocks_of(0)[0] + blocks_of(1)[0]) / 2
    np.testing.assert_allclose(means[0], exact, rtol=1e-6)


def test_replies_and_seeds_that_do_not_fit():
    members = sites(3)
    replies = replies_of(members, THREE)
    some = {k: replies[k] for k in (0, 1)}
    seeds = {k: members[k].reveal_seeds(THREE, [2]) for k in (0, 1)}
    for wrong in (None, {0: seeds[0]}, {**seeds, 1: {}}):
        with pytest.raises(UnmaskingError, match=r"exchange 7: client .*\[2\] did not"):
            unmask_sum(THREE, some, wrong)
    with pytest.raises(InvalidInputError, match="seed of clients 1 and 2 has 31 bytes"):
        unmask_sum(THREE, some, {**seeds, 1: {2: bytes(31)}})
    with pytest.raises(UnmaskingError, match="not one of"):
        assert_exact_mean(unmask_sum(THREE, some, {**seeds, 1: {2: bytes(32)}}), some)
    for wrong in ({}, {**some, 4: some[0]}, {**some, 1: some[1][:-1]}):
        with pytest.raises(UnmaskingError, match="uint64 arrays of one shape"):
            unmask_sum(THREE, wrong, seeds)
    with pytest.raises(UnmaskingError, match="uint64 arrays of one shape"):
        unmask_sum(THREE, {k: reply.astype(float) for k, reply in some.items()}, seeds)
    with pytest.raises(UnmaskingError, match=r"shape \(9,\) does not hold"):
        decode_mean(replies[0], {0: 1.0}, [0], [(3,)])


def test_the_server_leaves_replies_as_they_came():
    replies = replies_of(sites(2), MaskedExchange(0, (0, 1)))
    kept = {client: reply.copy() for client, reply in replies.items()}
    unmask_sum(MaskedExchange(0, (0, 1)), replies)
    for client, reply in replies.items():
        np.testing.assert_array_equal(reply, kept[client])


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
