"""Limits, sums and noise of sites, by numbers that stand here."""

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel._types import Pair
from fedbilevel.channels import Mean, Privacy, SecureMean
from fedbilevel.channels import discrete_gaussian as discrete
from fedbilevel.channels.coders import share_of
from fedbilevel.errors import CheckpointError, InvalidInputError, UnmaskingError
from fedbilevel.federation import SiteLimits
from fedbilevel.federation import noise as noise_module
from fedbilevel.federation.noise import SiteNoise
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.secure.cohorts import Cohorts, Question
from fedbilevel.federation.secure.fixed_point import block_scales, decode_mean, encode
from fedbilevel.federation.secure.layout import MaskedExchange
from fedbilevel.federation.secure.masks import combine, split, threshold
from fedbilevel.federation.server.guard import (
    implausible,
    not_finite,
    require_weight,
    why_unusable,
)

# What a site allows.


def job_of(upper=9, lower=9, batches=(4, 4), noise=0.0, masked=False, sends=False):
    made: Any = SimpleNamespace(
        channel=SimpleNamespace(
            privacy=Privacy(1.0, noise) if noise else None,
            reduction=SecureMean() if masked else Mean(),
        ),
        data=SimpleNamespace(upper_sizes=[upper], lower_sizes=[lower]),
        upper_batch=batches[0],
        lower_batch=batches[1],
        algorithm=SimpleNamespace(sends_hessian=sends),
    )
    return made


def test_a_site_measures_where_nothing_is_hidden():
    usual, never, asked = SiteLimits(), SiteLimits("none"), SiteLimits("scalars")
    for job, measures in (
        (job_of(), True),
        (job_of(noise=1.0), False),
        (job_of(masked=True), False),
    ):
        assert usual.measures(job) is measures
        assert never.measures(job) is False
        assert asked.measures(job) is True


def test_sums_are_kept_apart_where_replies_are_of_all_rows():
    usual, some, apart = SiteLimits(), SiteLimits(cohorts="any"), "apart"
    for job, is_apart in (
        (job_of(), False),
        (job_of(batches=(None, 4)), True),
        (job_of(batches=(4, None)), True),
        (job_of(sends=True), True),
    ):
        assert usual.apart(job) is is_apart
        assert some.apart(job) is False
        assert SiteLimits(cohorts=apart).apart(job) is True


@pytest.mark.parametrize("sizes", [(5, 9), (9, 5)])
def test_the_level_with_fewest_rows_must_have_enough(sizes):
    job = job_of(*sizes)
    SiteLimits(minimum_rows=5).check(job)
    with pytest.raises(InvalidInputError, match="has 5 rows at one of the levels"):
        SiteLimits(minimum_rows=6).check(job)


@pytest.mark.parametrize(
    ("batches", "smallest"),
    [((3, 4), 3), ((4, 3), 3), ((None, 4), 4), ((None, None), 9), ((20, 20), 9)],
)
def test_the_smallest_sample_must_be_large_enough(batches, smallest):
    job = job_of(batches=batches)
    SiteLimits(minimum_batch=smallest).check(job)
    with pytest.raises(InvalidInputError, match=f"a sample is of {smallest} rows"):
        SiteLimits(minimum_batch=smallest + 1).check(job)


def refused(limits, point):
    try:
        limits.check_point(point)
    except RefusedError as error:
        return str(error)
    return ""


def test_a_point_is_taken_up_to_the_largest_number():
    limits = SiteLimits(largest_point=50.0)
    for value in (50.0, -50.0):
        assert not refused(limits, Pair(jnp.asarray([0.0, value]), jnp.zeros(2)))
    for value in (50.001, -50.001):
        for point in (
            Pair(jnp.asarray([0.0, value]), jnp.zeros(2)),
            Pair(jnp.zeros(2), jnp.asarray([value])),
        ):
            assert "holds a number beyond 50" in refused(limits, point)
    assert not refused(limits, Pair(jnp.zeros(0), jnp.zeros(2)))


# Which sums a site is in.

ASKED, OTHER = Question("s", "one"), Question("s", "two")


def test_a_question_is_answered_in_one_sum(tmp_path):
    path = tmp_path / "cohorts.jsonl"
    held = Cohorts(2, path=path)
    assert held.enter(ASKED, (0, 1, 2)) is None
    assert held.enter(ASKED, (0, 1, 2)) is None  # again, and noted once
    assert path.read_text() == '["s", "one", [0, 1, 2], false]\n'
    assert path.stat().st_mode & 0o777 == 0o600
    again = Cohorts(2, path=path)
    told = "it was answered in a sum over clients (0, 1, 2), and in no other"
    assert held.enter(ASKED, (0, 1)) == again.enter(ASKED, (0, 1)) == told
    assert again.enter(OTHER, (0, 1)) is None
    # The first one sees what the other process wrote meanwhile.
    assert held.enter(OTHER, (0, 1, 2)) is not None
    assert Cohorts(2).enter(ASKED, (0, 1)) is None


def test_sums_that_are_kept_apart_are_over_one_set(tmp_path):
    path = tmp_path / "cohorts.jsonl"
    held = Cohorts(2, apart=True, path=path)
    assert held.enter(ASKED, (0, 1, 2)) is None
    assert held.enter(OTHER, (0, 1, 2)) is None
    told = held.enter(Question("s", "three"), (0, 1))
    assert told == (
        "sums that are kept apart were over clients (0, 1, 2), and are over no others "
        "in any federation"
    )
    # What was any sum before stays so; these hold for those that are apart.
    assert Cohorts(2, path=path).enter(Question("s", "four"), (0, 1)) is None
    assert Cohorts(2, apart=True, path=path).seen == {(0, 1, 2)}


def test_sums_of_earlier_versions_count_as_apart(tmp_path):
    path = tmp_path / "cohorts.jsonl"
    path.write_text('["s", "one", [0, 1]]\n["s", "two", [0, 1, 2]]\n["s", "thr')
    held = Cohorts(2, apart=True, path=path)
    assert held.seen == {(0, 1), (0, 1, 2)}
    # What a crash cut off was never answered.
    assert path.read_text().endswith("[0, 1, 2]]\n")
    assert "an earlier version allowed" in str(held.enter(ASKED, (0, 1)))
    path.write_text('["s", "one", ["0"]]\n')
    with pytest.raises(CheckpointError, match="clients that are no numbers"):
        Cohorts(2, path=path)


# Masked sums.


def test_two_thirds_of_the_holders_give_a_secret():
    needed = {1: 1, 2: 2, 3: 2, 4: 3, 5: 4, 6: 4, 7: 5, 9: 6, 100: 67}
    assert {holders: threshold(holders) for holders in needed} == needed


def test_shares_are_those_of_the_polynomial():
    drawn = b"".join(int(n).to_bytes(32, "little") for n in (5, 7))
    shares = split(11, 3, (1, 2, 4), drawn)
    # 11 + 5 t + 7 t^2
    values = {point: 11 + 5 * point + 7 * point**2 for point in (1, 2, 4)}
    assert shares == {k: v.to_bytes(16, "little") for k, v in values.items()}
    assert combine(shares) == 11
    assert combine({k: shares[k] for k in (1, 2)}) != 11
    assert split(2**127 - 2, 1, (3,), b"")[3] == (2**127 - 2).to_bytes(16, "little")
    # The field has 2^127 - 1 elements.
    last = (2**127 - 1).to_bytes(32, "little")
    assert split(0, 2, (1,), last)[1] == bytes(16)


def test_up_to_64_sites_are_all_neighbors_and_of_more_some_are():
    few = MaskedExchange(0, tuple(range(64)))
    assert few.are_neighbors(2**64 - 1)
    many = MaskedExchange(0, tuple(range(65)))  # 6 * 7 neighbors of 64 others
    edge = 42 * 2**64 // 64
    assert many.are_neighbors(edge - 1) and not many.are_neighbors(edge)
    more = MaskedExchange(0, tuple(range(129)))  # 6 * 8 of 128 others
    edge = 48 * 2**64 // 128
    assert more.are_neighbors(edge - 1) and not more.are_neighbors(edge)


def test_a_scale_is_the_power_of_two_that_holds_a_block():
    blocks = [[0.1], [1.0], [1.5, -2.0], [2.1], [-5.0], []]
    assert block_scales([np.asarray(one) for one in blocks]) == [0, 0, 1, 2, 3, 0]
    with pytest.raises(InvalidInputError, match="block 1 holds NaN"):
        block_scales([np.zeros(1), np.asarray([np.nan])])


def test_numbers_in_fixed_point_are_weighted_steps():
    words = encode([np.asarray([[1.5, -2.0]])], 0.5, [1], 2)
    # .75 and -1 in steps of 2^-39.
    assert words[:2].view(np.int64).tolist() == [3 * 2**37, -(2**39)]
    assert words[2] == 0  # nothing was cut
    other = encode([np.asarray([[0.5, 4.0]])], 1.0, [1], 2)
    means, cut = decode_mean(words + other, {0: 0.5, 3: 1.0}, [1], [(1, 2)])
    # (.5 * 1.5 + .5) / 1.5 and (-1 + 4) / 1.5
    np.testing.assert_allclose(means[0], [[1.25 / 1.5, 2.0]], rtol=1e-12)
    assert cut == 0
    for wrong in ({0: 0.5}, {0: 0.5, 3: 0.5}):
        with pytest.raises(UnmaskingError, match="is not one of replies"):
            decode_mean(words + other, wrong, [1], [(1, 2)])


def test_numbers_beyond_the_range_are_cut_and_counted():
    # Of 4 sites each may have a fourth of 2^63 steps of 2^-40: 2^21.
    words = encode([np.asarray([2.0**21 * 1.01, 1.0])], 1.0, [0], 4)
    assert 2**61 - 2**9 <= words[0] < 2**61 and words[2] == 1
    words = encode([np.asarray([2.0**21 * 0.99, math.nan])], 1.0, [0], 4)
    assert words[1] == 0 and words[2] == 1
    both = words + encode([np.asarray([1.0, 1.0])], 1.0, [0], 4)
    assert decode_mean(both, {0: 1.0, 1: 1.0}, [0], [(2,)])[1] == 1


# Noise of a site.


@pytest.mark.parametrize(
    ("clip", "noise", "participants", "step", "deviation"),
    [
        (1.0, 1.0, 1, 2.0**-20, 2**20),
        (1.0, 1.5, 1, 2.0**-20, 3 * 2**19),
        (1.0, 0.75, 1, 2.0**-21, 3 * 2**19),
        (2.0, 1.5, 4, 2.0**-20, 3 * 2**19),  # shared by four, half of it each
        (1.0, 1 + 2.0**-21, 1, 2.0**-20, 2**20 + 1),  # rounded up
    ],
)
def test_a_step_is_a_power_of_two_below_the_deviation(
    clip, noise, participants, step, deviation
):
    made = SiteNoise(Privacy(clip, noise, participants))
    assert (made.step, made.deviation) == (step, deviation)


def test_a_share_that_the_grid_cannot_hold_is_refused():
    SiteNoise(Privacy(1.0, 2.0**-20))
    SiteNoise(Privacy(2.0**13, 2.0**-33))
    for clip, noise in ((1.0, 0.99 * 2.0**-20), (2.0**14, 2.0**-34)):
        with pytest.raises(InvalidInputError, match="too little for the grid"):
            SiteNoise(Privacy(clip, noise))


@pytest.mark.parametrize(
    ("block", "released"),
    [
        # A hair below what it is: the norm is rounded, and what is left is cut off.
        ([3.0, -4.0], [1.5 - 2.0**-20, -2.0 + 2.0**-20]),
        ([0.5, 0.0], [0.5 - 2.0**-20, 0.0]),
        ([3e200, -4e200], [1.5 - 2.0**-20, -2.0 + 2.0**-20]),
        ([0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_a_block_is_cut_and_put_on_the_grid_toward_zero(block, released, monkeypatch):
    none = lambda deviation, size, bits: np.zeros(size, np.int64)  # noqa: E731
    monkeypatch.setattr(noise_module, "discrete_gaussian", none)
    made = SiteNoise(Privacy(2.5, 0.4))  # a deviation of 1, in steps of 2^-20
    assert made.step == 2.0**-20
    assert np.asarray(made.protect(jnp.asarray(block))).tolist() == released


def test_noise_is_added_in_steps(monkeypatch):
    one = lambda deviation, size, bits: np.full(size, 3, np.int64)  # noqa: E731
    monkeypatch.setattr(noise_module, "discrete_gaussian", one)
    made = SiteNoise(Privacy(2.5, 0.4))
    assert np.asarray(made.protect(jnp.zeros(2))).tolist() == [3 * 2.0**-20] * 2


@pytest.mark.parametrize(
    ("limit", "words", "found"),
    [
        # 2^64 - 1 is a multiple of 3: what is below it is as often each of the three.
        (3, [2**64 - 1, 2**64 - 2], 2),
        (3, [2**64 - 2], 2),
        # Of 4 the last whole multiple is 2^64 - 4.
        (4, [2**64 - 4, 2**64 - 5], 3),
        (4, [2**64 - 1, 2**64 - 2, 6], 2),
        (1, [2**64 - 2], 0),
    ],
)
def test_uniform_numbers_are_drawn_again_where_they_would_not_be(limit, words, found):
    left = list(words)

    def bits(count):
        assert count == 8
        return left.pop(0).to_bytes(8, "little")

    assert discrete._below(np.asarray([limit]), bits).tolist() == [found]
    assert not left


def test_shares_of_a_count_are_rounded_up_but_not_by_rounding_errors():
    assert [share_of(0.1, n) for n in (0, 1, 10, 11, 30, 31)] == [0, 1, 1, 2, 3, 4]
    assert share_of(0.5, 5) == 3 and share_of(1.0, 7) == 7


# Which replies a server believes.


def moved(*lengths):
    return {k: {"x": np.asarray([length, 0.0])} for k, length in enumerate(lengths)}


def judged(lengths, tolerance=10.0, known=None):
    places = {k: 0 for k in range(len(lengths))}
    return implausible(moved(*lengths), places, {0: known}, tolerance)


def test_a_reply_far_from_the_median_is_left_out():
    far, told = judged([1.0, 2.0, 20.1])  # the median is 2
    assert list(far) == [2] and not told
    assert far[2] == "moves 20.1, the median is 2"
    assert judged([1.0, 2.0, 20.0]) == ({}, "")
    # Of an even number the lower of the two in the middle counts.
    assert list(judged([1.0, 2.0, 3.0, 20.1])[0]) == [3]
    assert judged([5.0]) == ({}, "")
    # It is a distance from what both sides know.
    known = {"x": np.asarray([100.0, 0.0])}
    assert list(judged([101.0, 102.0, 121.0], known=known)[0]) == [2]


def test_of_two_replies_neither_is_named():
    far, told = judged([1.0, 10.1])
    assert not far and told == (
        "one of 2 replies is wrong, but not clear which: client 0 1, client 1 10.1"
    )


def test_short_moves_are_harmless():
    assert judged([0.0, 0.0, 0.9e-5]) == ({}, "")
    assert list(judged([0.0, 0.0, 1.1e-5])[0]) == [2]
    # A millionth of the point, and of 1.
    known = {"x": np.asarray([3.0, 0.0])}
    assert judged([3.0, 3.0, 3.0 + 3.9e-5], known=known) == ({}, "")
    assert list(judged([3.0, 3.0, 3.0 + 4.1e-5], known=known)[0]) == [2]


def test_numbers_whose_squares_are_infinite_are_no_reply():
    large = math.sqrt(np.finfo(np.float32).max)
    fine = np.asarray([large * 0.999, 1.0], np.float32)
    assert why_unusable([fine]) == ""
    assert "whose square is infinite" in why_unusable([fine * np.float32(1.01)])
    assert why_unusable([np.asarray([1.0, math.nan])]) == "holds NaN or infinity"
    assert why_unusable([np.asarray([2**62])]) == ""  # whole numbers are counts
    assert why_unusable([np.zeros(0)]) == ""


def test_a_measurement_that_is_not_finite_is_odd_only_among_others():
    good, bad = {"loss": np.asarray(1.0)}, {"loss": np.asarray(math.inf)}
    assert list(not_finite({0: good, 1: bad})) == [1]
    assert not_finite({0: bad, 1: bad}) == {}
    header: Any = SimpleNamespace(round=1, exchange=2, name="phase")
    require_weight([0.0, 0.5], header)
    for weights in ([0.0, 0.0], [1.0, math.nan], [1.0, -2.0]):
        with pytest.raises(Exception, match="the sum of the weights"):
            require_weight(weights, header)
