"""Reductions at few replies, coders at their bounds, and channels, by hand."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel._types import Pair
from fedbilevel.channels import (
    Channel,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    Privacy,
    Quantize,
    SecureMean,
    TopK,
    TrimmedMean,
)
from fedbilevel.channels.coders import BFloat16, Levels, Protected, Sparse
from fedbilevel.channels.reductions import weighted_mean
from fedbilevel.errors import InvalidInputError

NAN = math.nan
KEY = jr.key(0)


def column(*values: float) -> jax.Array:
    return jnp.asarray(values, jnp.float64)


def reduced(rule, values, weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    return np.asarray(rule(column(*values), column(*weights))).tolist()


# Reductions.


@pytest.mark.parametrize(
    ("values", "weights", "middle"),
    [
        ([7.0], None, 7.0),
        ([1.0, 4.0], None, 2.5),
        ([9.0, 1.0, 4.0], None, 4.0),
        ([9.0, 1.0, 4.0, 2.0], None, 3.0),
        ([1.0, 1.0, 1.0, 9.0, 9.0], None, 1.0),  # ties
        ([NAN, 1.0, 9.0, 3.0], [0.0, 1.0, 1.0, 1.0], 3.0),  # who is absent
        ([-9.0, 1.0, 4.0, -9.0], [0.0, 1.0, 0.5, 0.0], 2.5),
        ([1.0, 2.0, 9.0], [100.0, 1.0, 1e-9], 2.0),  # weights do not count
    ],
)
def test_the_median_is_the_middle_of_those_that_came(values, weights, middle):
    assert reduced(Median(), values, weights) == middle


@pytest.mark.parametrize(
    ("fraction", "values", "weights", "mean"),
    [
        (0.0, [1.0, 2.0, 9.0], None, 4.0),
        (0.1, [1.0, 2.0, 9.0], None, 2.0),  # one at each end, though .3 would do
        (0.2, [5.0, 1.0, 2.0, 3.0, 100.0], None, 10 / 3),
        (0.2, [6.0, 5.0, 1.0, 2.0, 3.0, 100.0], None, 4.0),  # 1.2 of 6 are 2
        (0.25, [5.0, 1.0, 2.0, 100.0], None, 3.5),
        (0.2, [NAN, 5.0, 1.0, 2.0, 3.0, 100.0], [0.0] + [1.0] * 5, 10 / 3),
        (0.2, [5.0, 1.0, 2.0, 3.0, 100.0], [9.0, 1.0, 1.0, 1.0, 1.0], 10 / 3),
        (0.25, [1.0, 1.0, 1.0, 5.0], None, 1.0),  # of ties one is left out at an end
        (0.33, [3.0, 1.0, 8.0], None, 3.0),
    ],
)
def test_a_trimmed_mean_leaves_out_a_share_at_each_end(fraction, values, weights, mean):
    assert reduced(TrimmedMean(fraction), values, weights) == pytest.approx(mean)


def test_a_trimmed_mean_keeps_one_reply_at_least():
    TrimmedMean(0.2).check(3)
    TrimmedMean(0.3).check(5)
    TrimmedMean(0.0).check(1)
    for fraction, participants, cut in ((0.2, 2, 1), (0.2, 1, 1), (0.3, 4, 2)):
        told = f"leaves out {cut} of {participants} participants"
        with pytest.raises(InvalidInputError, match=told):
            TrimmedMean(fraction).check(participants)
    TrimmedMean(0.499)
    for fraction in (-0.01, 0.5):
        with pytest.raises(InvalidInputError, match="at least 0 and below 0.5"):
            TrimmedMean(fraction)


def test_krum_takes_the_reply_whose_neighbors_are_nearest():
    # Of 5 present and 1 faulty two neighbors count: 1 + 4, 1 + 1, 1 + 4, 64 + .25.
    assert reduced(Krum(1), [0.0, 1.0, 2.0, 10.0, 10.5]) == 1.0
    # With none faulty three count: 1 + 4 + 100, 1 + 1 + 81, 1 + 4 + 64, ...
    assert reduced(Krum(0), [0.0, 1.0, 2.0, 10.0, 10.5]) == 2.0
    # With 2 faulty one counts: .25 is the least, which two have; the first one.
    assert reduced(Krum(2), [0.0, 1.0, 2.0, 10.0, 10.5]) == 10.0
    # Who is absent is neither chosen nor a neighbor, and weights do not count.
    values, weights = [10.0, 0.0, 10.1, 1.0, 2.1], [0.0, 1.0, 0.0, 9.0, 1.0]
    assert reduced(Krum(0), values, weights) == 0.0
    values, weights = [NAN, 0.0, 1.2, 2.0], [0.0, 1.0, 1.0, 5.0]
    assert reduced(Krum(0), values, weights) == 1.2


def test_krum_needs_two_thirds_of_good_ones_and_more():
    for faulty, least in ((0, 3), (1, 5), (2, 7)):
        Krum(faulty).check(least)
        told = rf"2 \* faulty \+ 3 = {least} participants, there are {least - 1}\."
        with pytest.raises(InvalidInputError, match=told):
            Krum(faulty).check(least - 1)
    with pytest.raises(InvalidInputError, match="must not be negative"):
        Krum(-1)


def test_a_mean_leaves_out_who_is_absent_whatever_it_holds():
    assert reduced(Mean(), [NAN, 1.0, 4.0], [0.0, 1.0, 2.0]) == pytest.approx(3.0)
    assert reduced(Mean(), [5.0], [0.25]) == 5.0
    # Over devices both the weights and their parts are added up.
    twice = lambda value: 2 * value  # noqa: E731
    found = weighted_mean(column(1.0, 4.0), column(1.0, 2.0), twice)
    assert found == pytest.approx(3.0)


def test_who_adds_up_and_in_which_width():
    rules = (Mean(), SecureMean(), Median(), TrimmedMean(0.1), Krum(1))
    assert [rule.adds_up for rule in rules] == [True, True, False, False, False]
    assert [rule.bytes_per_number for rule in rules] == [None, 8, None, None, None]


def test_a_geometric_median_of_three_on_a_line_is_the_middle_one():
    rule = GeometricMedian(iterations=200)
    assert reduced(rule, [0.0, 1.0, 50.0]) == pytest.approx(1.0, abs=1e-4)
    assert reduced(rule, [7.0]) == 7.0
    # Here weights count: half of all is at 50 and more.
    found = reduced(rule, [0.0, 1.0, 50.0], [1.0, 1.0, 3.0])
    assert found == pytest.approx(50.0, abs=1e-3)
    found = reduced(rule, [NAN, 0.0, 1.0, 50.0], [0.0, 1.0, 1.0, 1.0])
    assert found == pytest.approx(1.0, abs=1e-4)
    assert (GeometricMedian().iterations, float(GeometricMedian().smoothing)) == (
        16,
        pytest.approx(1e-6),
    )
    GeometricMedian(iterations=1)
    with pytest.raises(InvalidInputError, match="iterations=0"):
        GeometricMedian(iterations=0)


def test_a_distance_is_over_all_leaves_of_a_reply():
    # Client 1 is near in `a` and far in `b`.
    replies = {"a": column(0.0, 0.1, 3.0, 3.5), "b": column(0.0, 50.0, 0.0, 0.2)}
    chosen = Krum(1)(replies, jnp.ones(4))
    assert {name: float(one) for name, one in chosen.items()} == {"a": 3.0, "b": 0.0}


# Coders.


def encoded(coder, values, memory: Any = None):
    return coder.encode(column(*values), memory, KEY)


@pytest.mark.parametrize(
    ("clip", "vector", "clipped"),
    [
        (5.0, [3.0, 4.0], [3.0, 4.0]),  # at the bound
        (2.5, [3.0, -4.0], [1.5, -2.0]),
        (9.0, [3.0, 4.0], [3.0, 4.0]),
        (1.0, [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_a_vector_is_cut_to_the_clip_and_no_shorter(clip, vector, clipped):
    found, memory = encoded(Privacy(clip), vector)
    np.testing.assert_allclose(found, clipped, rtol=1e-12)
    assert memory is None


def test_noise_is_the_share_of_one_participant_times_the_clip():
    draw = np.asarray(jr.normal(KEY, (2,), jnp.float64))
    found, _ = encoded(Privacy(2.5, 0.4, 4), [3.0, -4.0])
    # .4 * 2.5 / sqrt(4)
    np.testing.assert_allclose(found, np.asarray([1.5, -2.0]) + draw / 2, rtol=1e-12)


@pytest.mark.parametrize("given", [(0, 1), (-1, 1), (math.inf, 1), (1, -0.1), (1, NAN)])
def test_a_clip_is_above_zero_and_noise_not_below(given):
    Privacy(1e-30, 0.0)
    with pytest.raises(InvalidInputError, match="clip must be above 0 and noise not"):
        Privacy(*given)


def test_the_largest_entries_travel_and_the_others_are_kept():
    memory = column(0.0, 0.0, 0.0, 0.5)
    found, kept = encoded(TopK(0.5), [1.0, -3.0, 2.0, 0.0], memory)
    assert dict(zip(found.indices.tolist(), found.values.tolist(), strict=True)) == {
        1: -3.0,
        2: 2.0,
    }
    assert kept.tolist() == [1.0, 0.0, 0.0, 0.5]
    found, kept = encoded(TopK(0.25), [2.0, 0.5, 0.0, 0.0], kept)
    assert (found.indices.tolist(), found.values.tolist()) == ([0], [3.0])
    assert kept.tolist() == [0.0, 0.5, 0.0, 0.5]
    arrived = TopK(0.25).decode(found, jax.ShapeDtypeStruct((4,), np.dtype(float)))
    assert arrived.tolist() == [3.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fraction", "size", "count"),
    [(0.001, 4, 1), (0.25, 4, 1), (0.26, 4, 2), (0.1, 30, 3), (1.0, 4, 4)],
)
def test_a_share_of_entries_is_rounded_up_and_one_at_least(fraction, size, count):
    vector = jnp.arange(size, dtype=float)
    found, _ = TopK(fraction).encode(vector, jnp.zeros(size), KEY)
    assert found.indices.shape == (count,) and found.indices.dtype == np.int32


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([0, 3], ""),
        ([], ""),
        ([0, 4], "has entries outside of a block of 4"),
        ([-1, 2], "has entries outside of a block of 4"),
        ([2, 2], "has an entry twice"),
    ],
)
def test_places_that_no_client_sends(places, told):
    like = jax.ShapeDtypeStruct((4,), np.dtype(float))
    coded: Any = Sparse(np.asarray(places, np.int32), np.zeros(len(places)))  # type: ignore[arg-type]
    assert TopK(0.5).why_impossible(coded, like) == told


def test_levels_are_between_the_extremes_of_a_block():
    assert [Quantize(bits).highest for bits in (2, 8, 16)] == [1, 127, 2**15 - 1]
    # What is a whole number of levels is never rounded.
    found, _ = encoded(Quantize(3), [6.0, -2.0, 0.0, -6.0, 4.0])
    assert (float(found.scale), found.levels.tolist()) == (6.0, [3, -1, 0, -3, 2])
    like = jax.ShapeDtypeStruct((5,), np.dtype(np.float64))
    arrived = Quantize(3).decode(found, like)
    np.testing.assert_allclose(arrived, [6.0, -2.0, 0.0, -6.0, 4.0], rtol=1e-12)
    found, _ = encoded(Quantize(2), [0.0, 0.0])
    assert (float(found.scale), found.levels.tolist()) == (0.0, [0, 0])
    kinds = [encoded(Quantize(bits), [1.0])[0].levels.dtype for bits in (8, 9)]
    assert kinds == [np.int8, np.int16]


def test_an_entry_is_rounded_up_with_the_chance_of_its_rest():
    vector = jnp.concatenate([jnp.ones(1), jnp.full(4000, 0.25)])
    found, _ = Quantize(2).encode(vector, None, KEY)
    ups = np.asarray(jr.uniform(KEY, vector.shape, vector.dtype)) < 0.25
    assert found.levels[1:].tolist() == ups[1:].astype(int).tolist()


@pytest.mark.parametrize(
    ("scale", "levels", "told"),
    [
        (0.0, [3, -3], ""),
        (1.0, [], ""),
        (-1.0, [0], "has the scale -1"),
        (math.inf, [0], "has the scale inf"),
        (NAN, [0], "has the scale nan"),
        (1.0, [4, 0], "has levels (0, 4), beyond 3"),
        (1.0, [0, -4], "has levels (-4, 0), beyond 3"),
    ],
)
def test_levels_that_no_client_sends(scale, levels, told):
    coded: Any = Levels(np.float64(scale), np.asarray(levels, np.int8))  # type: ignore[arg-type]
    assert Quantize(3).why_impossible(coded, None) == told  # type: ignore[arg-type]


def test_bits_and_shares_are_in_range():
    for bits in (2, 16):
        Quantize(bits)
    for bits in (1, 17):
        with pytest.raises(InvalidInputError, match="between 2 and 16 bits"):
            Quantize(bits)
    TopK(1.0)
    for share in (0.0, 1.01):
        with pytest.raises(InvalidInputError, match="a share above 0, at most 1"):
            TopK(share)


def test_short_numbers_have_eight_significant_bits():
    found, _ = encoded(BFloat16(), [1.0 + 2.0**-7, 1.0 + 2.0**-9, 3e38])
    assert found.dtype == jnp.bfloat16
    assert found.astype(float).tolist()[:2] == [1.0 + 2.0**-7, 1.0]
    assert np.isfinite(found.astype(float)).all()


# Channels.

SPARSE, PRIVATE = TopK(0.5), Privacy(1.0)
BESIDE = Pair({"a": jnp.asarray([3.0, 1.0])}, jnp.asarray(7.0))  # y is a single number


def test_coders_have_an_order_and_masked_numbers_are_not_compressed():
    Channel((PRIVATE, SPARSE))
    for coders, told in (
        ((SPARSE, PRIVATE), "Privacy must come first"),
        ((PRIVATE, PRIVATE), "Privacy must come first"),
        ((SPARSE, Quantize(4)), "only the last coder may compress"),
    ):
        with pytest.raises(InvalidInputError, match=told):
            Channel(coders)
    Channel((PRIVATE,), SecureMean())
    with pytest.raises(InvalidInputError, match="`SecureMean` adds up masked numbers"):
        Channel((PRIVATE, SPARSE), SecureMean())


def test_what_a_channel_says_of_itself():
    channels = (Channel(), Channel((SPARSE,)), Channel((), Median()))
    channels += (Channel((), SecureMean()), Channel(down=BFloat16()))
    seen = [(one.is_plain, one.sends_changes, one.plain_mean) for one in channels]
    plain, coded, median = (True, False, True), (False, True, True), (False,) * 3
    assert seen == [plain, coded, median, median, coded]
    assert Channel((PRIVATE, SPARSE)).privacy is PRIVATE
    assert Channel((SPARSE,)).privacy is None is Channel().privacy


def test_the_channels_of_a_method_and_of_a_run_are_joined():
    both = Channel((PRIVATE,), Median(), BFloat16()).joined(Channel((SPARSE,)), "Own")
    assert both.coders == (PRIVATE, SPARSE) and isinstance(both.reduction, Median)
    assert both.down is not None
    run = Channel((PRIVATE,))
    assert run.joined(Channel(), "Own") is run
    assert isinstance(run.joined(Channel((), Krum(1)), "Own").reduction, Krum)
    for part, one in (("compression", (SPARSE,)), ("reduction", ())):
        own = Channel(one, Mean() if one else Median())
        with pytest.raises(InvalidInputError, match=f"`Own` has a {part} of its own"):
            own.joined(own, "Own")


def test_noise_is_shared_by_participants_and_added_once():
    channel = Channel((PRIVATE, SPARSE), Median(), BFloat16())
    shared = channel.shared_by(7)
    assert shared.privacy is not None and shared.privacy.participants == 7
    assert shared.coders[1:] == (SPARSE,) and shared.down is not None
    sent = channel.protected()
    assert [type(one) for one in sent.coders] == [Protected, TopK]
    assert Channel((SPARSE,)).shared_by(7).coders == (SPARSE,)


def test_single_numbers_are_not_compressed():
    channel = Channel((Quantize(3),))
    coded, held = channel.encode(BESIDE, channel.start(BESIDE), KEY)
    assert isinstance(coded[0], Levels) and coded[1].tolist() == [7.0]
    arrived = channel.decode(coded, BESIDE)
    assert arrived.x["a"].tolist()[0] == 3.0 and float(arrived.y) == 7.0
    assert len(held) == 2 and held[1] == ()
    assert channel.why_impossible(coded, BESIDE) == ""
    wrong = (Levels(coded[0].scale, coded[0].levels * 9), coded[1])
    assert "beyond 3" in channel.why_impossible(wrong, BESIDE)
    assert Channel().why_impossible(wrong, BESIDE) == ""


def test_every_block_and_coder_has_a_key_of_its_own():
    keys: Any = []
    noisy = SimpleNamespace(encode=lambda v, m, key: (keys.append(key) or v, m))
    channel: Any = Channel((PRIVATE,))
    object.__setattr__(channel, "coders", (noisy, noisy))
    object.__setattr__(noisy, "compresses", False)
    channel.encode(BESIDE, ((None, None), (None, None)), KEY)
    expected = [jr.fold_in(jr.fold_in(KEY, b), c) for b in (0, 1) for c in (0, 1)]
    assert [jr.key_data(one).tolist() for one in keys] == [
        jr.key_data(one).tolist() for one in expected
    ]


def test_what_goes_down_is_rounded_but_for_single_numbers():
    exact, close = 1.0 + 2.0**-9, 1.0
    message = Pair(jnp.asarray([exact], jnp.float32), jnp.asarray(exact, jnp.float32))
    assert Channel().sent(message) is message
    sent = Channel(down=BFloat16()).sent(message)
    assert sent.x.dtype == jnp.bfloat16 and float(sent.x[0]) == close
    assert sent.y.dtype == jnp.float32 and float(sent.y) == exact
    heard = Channel(down=BFloat16()).received(sent, message)
    assert heard.x.dtype == jnp.float32 and Channel().received(sent, message) is sent
    # What is as short already stays in its own type.
    half = Pair(jnp.asarray([exact], jnp.float16), jnp.zeros(()))
    assert Channel(down=BFloat16()).sent(half).x.dtype == jnp.float16
