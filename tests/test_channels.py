"""Channels: each wrapper alone, then inside runs, on both runtimes."""

import dataclasses
import math
import sys

import dp_accounting
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import run
from fedbilevel._types import Pair
from fedbilevel.algorithms import every_phase
from fedbilevel.channels import (
    BFloat16,
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
    count_blocks,
)
from fedbilevel.channels.accountant import epsilon, epsilon_of_events
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.clients import read_channel
from fedbilevel.runtime import (
    Checkpoints,
    Job,
    Ledger,
    Outcome,
    ReferenceRuntime,
    SimulatorRuntime,
    Stopping,
    SweepRuntime,
    checkpoint,
    compilation,
    count,
    execute,
    keys,
)
from fedbilevel.runtime.exchange import (
    Link,
    for_place,
    server_turn,
    start_kept,
    start_state,
)
from fedbilevel.runtime.job import ABSENT, PRESENT, RENEWED, start_server
from fedbilevel.runtime.privacy import privacy_spent
from fedbilevel.runtime.sweeping import single_outcomes
from tests.cases import (
    DX,
    DY,
    EVERY,
    ROWWISE,
    case_of,
    data_for,
    quadratic_data,
    quadratic_job,
)

pytestmark = pytest.mark.two_devices

BSGVRM = case_of("local-bsgvrm").algorithm
MOMENTUM = case_of("momentum-local-sgd").algorithm  # the cheapest: y, its direction
DELTA = 1e-6  # other than the default
ROBUST = (Median(), TrimmedMean(0.2), GeometricMedian(), Krum(1))


def assert_close(a, b, tolerance=1e-12):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def a_change(seed=0, size=7):
    """Return a change of three blocks; that of x has two leaves."""
    one, two, three, four = jr.split(jr.key(seed), 4)
    x = {"a": jr.normal(one, (size,)), "b": jr.normal(two, (2, 3))}
    point = Pair(x, jr.normal(three, (size, 2)))
    return point, Pair(None, jr.normal(four, (size,)))


def norm(*leaves):
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in leaves))


def blocks_of(change):
    point, direction = change
    return [(point.x["a"], point.x["b"]), (point.y,), (direction.y,)]


def sent_through(channel, change, key, memory=None):
    """Return what arrives of a change, and what the client remembers then."""
    memory = channel.start(change) if memory is None else memory
    coded, memory = channel.encode(change, memory, key)
    return channel.decode(coded, jax.eval_shape(lambda: change)), memory


def test_a_block_is_a_field_of_a_pair_or_the_rest():
    change = a_change()
    assert count_blocks(change) == 3
    assert count_blocks({"w": jnp.ones(2), "b": jnp.ones(1)}) == 1
    assert count_blocks(Pair(None, {"w": jnp.ones(2), "b": None})) == 1
    assert count_blocks((Pair(jnp.ones(1), None), jnp.ones(2), jnp.ones(3))) == 2
    assert count_blocks((jnp.ones(2), jnp.ones(()), jnp.ones(()))) == 2


@pytest.mark.parametrize("coder", [TopK(0.1), Quantize(2), BFloat16()])
def test_numbers_told_beside_a_direction_arrive_as_they_are(coder):
    direction = jnp.asarray([300.0, -7.0, 1e-3])
    for beside in [(jnp.asarray(16.1), jnp.asarray(200.0)), (jnp.asarray(0.4),)]:
        for change in [(direction, *beside), (Pair(direction, None), *beside)]:
            arrived, memory = sent_through(Channel((coder,)), change, jr.key(1))
            assert arrived[1:] == beside
            assert not np.allclose(jax.tree.leaves(arrived[0])[0], direction)
            again, _ = sent_through(Channel((coder,)), change, jr.key(2), memory)
            assert again[1:] == beside  # nothing of them was left to send


def test_clipping_is_exact_and_by_block():
    change = a_change()
    small, large = 0.5, 1e3
    arrived, _ = sent_through(Channel((Privacy(small),)), change, jr.key(1))
    for before, after in zip(blocks_of(change), blocks_of(arrived), strict=True):
        assert norm(*before) > small
        np.testing.assert_allclose(norm(*after), small, rtol=1e-14)
        factor = small / norm(*before)
        assert_close(after, [factor * leaf for leaf in before])
    arrived, _ = sent_through(Channel((Privacy(large),)), change, jr.key(1))
    assert_close(arrived, change, 0)
    nothing = jax.tree.map(jnp.zeros_like, change)
    arrived, _ = sent_through(Channel((Privacy(small),)), nothing, jr.key(1))
    assert_close(arrived, nothing, 0)


def test_noise_of_all_participants_adds_up_to_the_multiplier():
    participants, clip, noise, size, keys = 4, 0.5, 3.0, 200, 64
    channel = Channel((Privacy(clip, noise),)).shared_by(participants)
    change = jnp.zeros(size)
    draws = jax.vmap(lambda key: sent_through(channel, change, key)[0])(
        jr.split(jr.key(0), participants * keys)
    )
    one = noise * clip / np.sqrt(participants)
    sums = np.asarray(draws).reshape(participants, keys, size).sum(axis=0)
    for sample, deviation in ((draws, one), (sums, noise * clip)):
        # A variance from m normal numbers scatters by sqrt(2 / m) of itself.
        scatter = np.sqrt(2 / sample.size)
        assert abs(np.var(sample) / deviation**2 - 1) < 5 * scatter
        assert abs(np.mean(sample)) < 5 * deviation / np.sqrt(sample.size)


def test_error_feedback_sends_everything_in_the_end():
    channel, size, rounds = Channel((TopK(0.1),)), 25, 12
    changes = [a_change(seed, size) for seed in range(rounds)]
    # Then nothing new: the memory of 50 entries, 5 a time, is empty ten rounds later.
    changes += [jax.tree.map(jnp.zeros_like, changes[0])] * 10
    total = sent = jax.tree.map(jnp.zeros_like, changes[0])
    memory, left = channel.start(total), []
    for index, change in enumerate(changes):
        coded, _ = channel.encode(change, memory, jr.key(index))
        assert [one.values.size for one in coded] == [4, 5, 3]
        assert all(one.indices.dtype == jnp.int32 for one in coded)
        arrived, memory = sent_through(channel, change, jr.key(index), memory)
        total = jax.tree.map(jnp.add, total, change)
        sent = jax.tree.map(jnp.add, sent, arrived)
        left = [held for (held,) in memory]
        due = [
            np.concatenate([np.ravel(leaf) for leaf in block])
            for block in blocks_of(jax.tree.map(jnp.subtract, total, sent))
        ]
        assert_close(left, due)
        if index == rounds - 1:
            assert norm(*left) > 1
    assert_close(left, [np.zeros_like(one) for one in left], 0)
    assert_close(sent, total)


@pytest.mark.parametrize("bits, kind", [(2, jnp.int8), (8, jnp.int8), (12, jnp.int16)])
def test_quantizing_is_unbiased_and_off_by_less_than_a_level(bits, kind):
    channel, keys = Channel((Quantize(bits),)), 256
    change = a_change()
    coded, _ = channel.encode(change, channel.start(change), jr.key(0))
    assert all(one.levels.dtype == kind for one in coded)
    many = jax.vmap(lambda key: sent_through(channel, change, key)[0])(
        jr.split(jr.key(7), keys)
    )
    for before, after in zip(blocks_of(change), blocks_of(many), strict=True):
        level = max(np.abs(leaf).max() for leaf in before) / (2 ** (bits - 1) - 1)
        for exact, drawn in zip(before, after, strict=True):
            assert np.abs(drawn - exact[None]).max() < level * (1 + 1e-12)
            # Rounding up or down has a deviation of half a level at most.
            limit = 5 * level / 2 / np.sqrt(keys)
            assert np.abs(drawn.mean(axis=0) - exact).max() < limit
    nothing = jax.tree.map(jnp.zeros_like, change)
    assert_close(sent_through(channel, nothing, jr.key(0))[0], nothing, 0)


@eqx.filter_jit
def apply_rule(rule, replies, weights):
    return rule(replies, weights)


def plain_krum(replies, faulty):
    squares = np.square(replies[:, None] - replies[None]).sum(axis=-1)
    near = np.sort(squares, axis=1)[:, 1 : len(replies) - faulty - 1]
    return replies[np.argmin(near.sum(axis=1))]


def plain_trimmed(replies, fraction):
    cut = int(np.ceil(round(fraction * len(replies), 9)))
    return np.sort(replies, axis=0)[cut : len(replies) - cut].mean(axis=0)


@given(
    seed=st.integers(0, 2**20),
    present=st.lists(st.booleans(), min_size=8, max_size=8).filter(
        lambda flags: sum(flags) >= 5
    ),
)
@settings(max_examples=20)
def test_reductions_are_those_of_plain_numpy_on_who_is_present(seed, present):
    draw, there = np.random.default_rng(seed), np.asarray(present)
    replies = draw.standard_normal((len(present), 4))
    weights = draw.uniform(0.5, 2, len(present)) * there
    # Whatever lies in the other places does not matter.
    held = np.where(there[:, None], replies, draw.choice([np.nan, np.inf, 1e9]))
    tree = {"a": jnp.asarray(held[:, :1, None]), "b": jnp.asarray(held[:, 1:])}
    some, heavy = replies[there], weights[there]

    def reduced(rule):
        found = apply_rule(rule, tree, jnp.asarray(weights))
        assert found["a"].shape == (1, 1)
        return np.concatenate([np.ravel(found["a"]), found["b"]])

    def cost(point):
        return np.sum(heavy * np.linalg.norm(some - point, axis=1))

    mean = np.average(some, axis=0, weights=heavy)
    np.testing.assert_allclose(reduced(Mean()), mean, rtol=1e-12)
    np.testing.assert_allclose(reduced(SecureMean()), mean, rtol=1e-12)
    np.testing.assert_allclose(reduced(Median()), np.median(some, axis=0), rtol=1e-12)
    for fraction in (0.0, 0.2, 0.3):
        expected = plain_trimmed(some, fraction)
        np.testing.assert_allclose(reduced(TrimmedMean(fraction)), expected, rtol=1e-10)
    for faulty in (0, 1):
        expected = plain_krum(some, faulty)
        np.testing.assert_array_equal(reduced(Krum(faulty)), expected)
    # No step of any size in any direction costs less.
    best = reduced(GeometricMedian(iterations=400))
    for size in (1e-3, 1e-1):
        steps = size * draw.standard_normal((20, 4))
        assert cost(best) <= min(cost(best + step) for step in steps) + 1e-6
    assert cost(reduced(GeometricMedian())) <= 1.01 * cost(best)


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: type(rule).__name__)
def test_one_faulty_client_ruins_the_mean_only(rule):
    clients, weights = 7, jnp.ones(7)
    honest = {"x": 1 + 0.1 * jr.normal(jr.key(0), (clients, 10))}
    center = honest["x"][1:].mean(axis=0)
    reach = np.linalg.norm(honest["x"][1:] - center, axis=1).max()
    for factor in (1e6, -1e6):
        replies = {"x": honest["x"].at[0].multiply(factor)}
        ruined = Mean()(replies, weights)["x"]
        assert np.linalg.norm(ruined - center) > 1e5
        assert np.linalg.norm(rule(replies, weights)["x"] - center) < reach
    same = {"x": jnp.broadcast_to(honest["x"][0], (clients, 10))}
    np.testing.assert_allclose(rule(same, weights)["x"], honest["x"][0], rtol=1e-12)


def links(job):
    """Return every phase of a job, with what the server knows of its first exchange."""
    for where, phase in job.every_phase().items():
        cohort = job.cohort(phase)
        ids, present = jnp.arange(cohort, dtype=jnp.int32), jnp.ones(cohort, bool)
        yield Link.of(job, phase, where), server_turn(job, where, 1, ids, present)


@EVERY
def test_what_both_sides_know_is_shaped_like_the_reply(case):
    job = quadratic_job(case.algorithm, data_for(case, 2))
    unknown = []
    for link, turn in links(job):

        def known(link=link, turn=turn):
            return link.known(for_place(link.sent(start_server(job), turn), 0), turn)

        if link.phase.about is None:
            unknown.append(link.phase.name)
            continue
        about, reply = jax.eval_shape(known), link.reply_shape()
        assert jax.tree.structure(about) == jax.tree.structure(reply), link.phase.name
        for left, right in paired(about, reply):
            assert (left.shape, left.dtype) == (right.shape, right.dtype)
    assert sorted(unknown) == sorted(case.slopes)


@pytest.mark.parametrize(
    "name",
    [
        "momentum-local-sgd",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("fednest", "lfednest")),
    ],
)
def test_a_tiny_clip_leaves_what_both_sides_know(name):
    clip, algorithm = 1e-9, case_of(name).algorithm
    channel = Channel((Privacy(clip),))
    job = quadratic_job(algorithm, quadratic_data(2), channel=channel)
    # A server somewhere on its way, not at zeros.
    leaves, structure = jax.tree.flatten(start_server(job))
    drawn = [
        jr.normal(key, leaf.shape)
        for key, leaf in zip(jr.split(jr.key(3), len(leaves)), leaves, strict=True)
    ]
    server = jax.tree.unflatten(structure, drawn)
    for link, server_side in links(job):
        sent = for_place(link.sent(server, server_side), 0)
        turn = keys.client_turn(job.key, link.where, 0, 1)
        answer = jax.jit(lambda *given, link=link: link.answer(*given, 0)[1])
        reply = answer(sent, start_kept(job), turn)
        known = link.known(sent, turn)
        known = jax.tree.map(jnp.zeros_like, reply) if known is None else known
        far = [jnp.abs(a - b).max() for a, b in paired(reply, known)]
        assert 0 < max(far) <= clip * (1 + 1e-6), link.phase.name


def paired(a, b):
    return list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# Every coder and every reduction, with methods whose clients keep nothing, that keep
# blocks, and that have several phases. Three participants do not fill two devices.
COMBINED = {
    "noise-secure": ("lfednest", (Privacy(0.5, 0.1),), SecureMean(), (2, 3), 1),
    "topk-median": ("momentum-local-sgd", (TopK(0.5),), Median(), (3, 3), 2),
    "quantize-krum": ("fedbio-clientwise", (Quantize(8),), Krum(0), (3, 3), 1),
    "trimmed": ("momentum-local-sgd", (), TrimmedMean(0.2), (3, 4), 1),
    "geometric": ("momentum-local-sgd", (), GeometricMedian(), (3, 3), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_simulator_is_reference_through_a_channel(name):
    algorithm, coders, rule, (participants, clients), rounds = COMBINED[name]
    job = quadratic_job(
        case_of(algorithm).algorithm,
        quadratic_data(clients),
        participants=participants,
        channel=Channel(coders, rule),
    )
    fast = execute(SimulatorRuntime(job), rounds)
    slow = execute(ReferenceRuntime(job), rounds)
    assert_close(fast.state, slow.state)
    assert_close(fast.columns, slow.columns)


@pytest.mark.slow
def test_a_record_replays_a_channel_with_its_own_shares_of_noise():
    channel, data = Channel((Privacy(2.0, 0.1), TopK(0.5)), Median()), quadratic_data(3)
    job = quadratic_job(MOMENTUM, data, participants=2, channel=channel)
    record = np.full((3, 3), PRESENT, np.uint8)
    record[1:, 0] = (ABSENT, RENEWED)
    replay = job.replaying(record)
    assert replay.participants == 3
    assert replay.channel.coders[0] == Privacy(2.0, 0.1, participants=2)
    fast = execute(SimulatorRuntime(replay), 3)
    slow = execute(ReferenceRuntime(replay), 3)
    assert_close(fast.state, slow.state)
    krum = quadratic_job(MOMENTUM, data, channel=Channel((), Krum(0)))
    with pytest.raises(InvalidInputError, match="at least 2 . faulty . 3 = 3"):
        krum.replaying(record)


@pytest.mark.slow
def test_a_sweep_through_a_channel_equals_single_runs():
    channel = Channel((Privacy(2.0, 0.1), TopK(0.5)), Median())
    job = quadratic_job(MOMENTUM, quadratic_data(3), channel=channel)
    runtime = SweepRuntime(job, seeds=(0, 7))
    found = single_outcomes(runtime, execute(runtime, 2), Stopping(), 2, 1)
    for seed, outcome in zip((0, 7), found, strict=True):
        assert isinstance(outcome, Outcome)
        single = dataclasses.replace(job, key=jr.key(seed))
        assert_close(execute(SimulatorRuntime(single), 2).state, outcome.state)


@pytest.mark.slow
def test_sending_all_entries_is_the_run_without_a_channel():
    data = quadratic_data(3)
    plain = execute(SimulatorRuntime(quadratic_job(MOMENTUM, data)), 3)
    channel = Channel((TopK(1.0),))
    through = quadratic_job(MOMENTUM, data, channel=channel)
    found = execute(SimulatorRuntime(through), 3)
    assert_close(plain.columns, found.columns)
    assert_close(plain.state.server, found.state.server)
    left = jax.tree.leaves(found.state.clients.channel)
    assert left and not any(np.any(leaf) for leaf in left)


def test_the_default_channel_changes_nothing():
    data = quadratic_data(3)
    default = quadratic_job(MOMENTUM, data)
    explicit = quadratic_job(MOMENTUM, data, channel=Channel((), Mean()))
    assert default.channel.is_plain
    assert start_state(default).clients.channel is None
    marks = [checkpoint.fingerprint(job, 1) for job in (default, explicit)]
    assert marks[0] == marks[1]
    first = execute(SimulatorRuntime(default), 2)
    programs = len(compilation._programs)
    second = execute(SimulatorRuntime(explicit), 2)
    assert len(compilation._programs) == programs
    assert_close((first.state, first.columns), (second.state, second.columns), 0)
    assert count(default, 3) == count(explicit, 3)


@pytest.mark.slow
def test_traffic_is_what_is_coded():
    x, y = jnp.zeros(40, jnp.float32), jnp.zeros((30, 2), jnp.float32)
    nest = case_of("fednest").algorithm
    job = quadratic_job(nest, quadratic_data(3), precision="float32")
    single = quadratic_job(BSGVRM, quadratic_data(3), precision="float32")

    def up(base, *arguments, **given):
        channel = read_channel(*arguments, **given).shared_by(3)
        found = count(dataclasses.replace(base, channel=channel), 2)
        every = found["per_client_and_round"]
        return every["floats_up"], every["bytes_up"]

    floats = 2 * (DX + DY)
    assert up(single) == (floats, 4 * floats)
    assert up(single, clip=1.0, noise=1.0) == (floats, 4 * floats)
    assert up(single, aggregate="median") == (floats, 4 * floats)
    assert up(single, aggregate="secure") == (floats, 8 * floats)
    # Of 2 and 3 entries 0.5 are 1 and 2: an index and a value each, for two vectors.
    assert up(single, compress="topk:0.5") == (2 * (1 + 2), 2 * (1 + 2) * 8)
    # A scale of 4 bytes for each of four blocks, and a byte per entry.
    assert up(single, compress="quantize:8") == (4, 4 * 4 + floats)
    assert up(single, compress="quantize:12") == (4, 4 * 4 + 2 * floats)
    # Nine replies of one block each, seven of y and two of x.
    assert up(job, compress="topk:0.1") == (9, 9 * 8)
    channel = read_channel(compress="topk:0.1")
    coded = channel.coded_shape(Pair(x, y))
    assert sum(leaf.size * 4 for leaf in jax.tree.leaves(coded)) == (4 + 6) * 8


def test_what_a_client_returns_is_what_is_counted():
    channel = read_channel(clip=1.0, compress="topk:0.5")
    job = quadratic_job(MOMENTUM, quadratic_data(2), channel=channel)
    (phase,) = every_phase(job.algorithm.phases())
    where, everybody = (keys.ROUNDS, 0), jnp.ones(2, bool)
    link = Link.of(job, phase, where)
    ids = jnp.arange(2, dtype=jnp.int32)
    message = link.sent(start_server(job), server_turn(job, where, 0, ids, everybody))
    turn = keys.client_turn(job.key, where, 0, 0)
    kept, coded, _ = link.work(message, start_kept(job), turn, 0)
    # Only leaves travel; the server knows the rest from the shapes.
    structure = jax.tree.structure(channel.coded_shape(link.like))
    travelled = jax.tree.unflatten(
        structure, [np.asarray(leaf) for leaf in jax.tree.leaves(coded)]
    )
    again, reply, _ = link.answer(message, start_kept(job), turn, 0)
    assert_close(link.received(message, travelled, turn), reply, 0)
    assert_close(kept, again, 0)
    sent = sum(leaf.nbytes for leaf in jax.tree.leaves(travelled))
    assert sent == count(job, 2)["per_client_and_round"]["bytes_up"]


def direct_epsilon(*events):
    """Return epsilon of (multiplier, times): the root of Balle and Wang's formula."""
    mu = np.sqrt(sum(times / multiplier**2 for multiplier, times in events))

    def normal(z):
        return math.erfc(-z / math.sqrt(2)) / 2

    def delta(one):
        return normal(mu / 2 - one / mu) - np.exp(one) * normal(-mu / 2 - one / mu)

    least, most = 0.0, 50.0
    assert delta(most) < DELTA < delta(least)
    for _ in range(60):
        middle = (least + most) / 2
        least, most = (middle, most) if delta(middle) > DELTA else (least, middle)
    return pytest.approx(most, rel=1e-6)


def test_noise_out_of_all_proportion_has_an_epsilon():
    """A ledger may hold any number, and squares of some have none."""
    for multiplier in (1e-320, 1e-160):
        assert epsilon_of_events([(multiplier, 1), (2.0, 3)], DELTA) == math.inf
    for multiplier in (1e160, 1e308):
        assert epsilon_of_events([(multiplier, 1)], DELTA) == 0
        found = epsilon_of_events([(multiplier, 1), (2.0, 3)], DELTA)
        assert found == direct_epsilon((2.0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("multiplier, times", [(1.5, 50), (20.0, 10), (5.0, 1)])
def test_epsilon_is_at_most_that_of_both_accountants(multiplier, times):
    found = epsilon(multiplier, 1, times, 4, 4, DELTA)
    told = []
    for accountant in (PLDAccountant(), RdpAccountant()):
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), times)
        told.append(accountant.get_epsilon(DELTA))
    exact, renyi = told
    assert found <= exact and found == pytest.approx(exact, rel=1e-4)
    assert found < 0.97 * renyi


def test_epsilon_of_all_exchanges_adds_up():
    alone = direct_epsilon((3.0 / 2, 50))  # four blocks
    assert epsilon(3.0, 4, 50, 8, 8, DELTA) == alone
    # Two of eight shares of the noise are a quarter of its variance.
    assert epsilon(6.0, 4, 50, 8, 8, DELTA, present=2) == alone
    both, events = [1] * 25 + [4] * 25, ((3.0, 25), (1.5, 25))
    assert epsilon(3.0, both, 50, 8, 8, DELTA) == direct_epsilon(*events)
    assert epsilon(3.0, 0, 25, 8, 8, DELTA) == 0
    accountant = RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    event = dp_accounting.GaussianDpEvent(3.0 / 2)
    accountant.compose(
        dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, event), 50
    )
    drawn = epsilon(3.0, 1, 50, 10, 1000, DELTA)
    assert drawn == accountant.get_epsilon(DELTA)
    assert drawn < 0.2 * epsilon(3.0, 1, 50, 10, 10, DELTA)
    # Nearly all are drawn: to be replaced is worse than to be left out.
    assert epsilon(3.0, 1, 50, 9, 10, DELTA) == direct_epsilon((3.0, 50))
    for noise, delta in ((0.0, DELTA), (1.0, 0.0)):
        with pytest.raises(InvalidInputError, match="noise above 0"):
            epsilon(noise, 1, 1, 1, 1, delta)


def run_noisy(channel):
    start = (jnp.ones(DX), jnp.ones(DY))
    return run(ROWWISE, quadratic_data(3), start, MOMENTUM, rounds=2, channel=channel)


@pytest.mark.slow
def test_a_result_tells_what_was_spent():
    result = run_noisy(Channel((Privacy(1.0, 2.0, delta=DELTA),), SecureMean()))
    # Two rounds, with y and its direction in each.
    assert result.counts["epsilon"] == direct_epsilon((2.0 / np.sqrt(2), 2))
    assert result.counts["delta"] == DELTA
    privacy = {"clip": 1, "noise": 2, "participants": 3, "delta": DELTA}
    assert result.config["channel"] == {
        "coders": [{"kind": "Privacy", **privacy}],
        "reduction": {"kind": "SecureMean"},
    }


def spent(name, coders=(), rule=None, rounds=3, cohort=(3, 3), record=None):
    channel = Channel((Privacy(1.0, 2.0, delta=DELTA), *coders), rule or Mean())
    participants, clients = cohort
    data = quadratic_data(clients, noise=0.0)
    job = quadratic_job(
        case_of(name).algorithm, data, participants=participants, channel=channel
    )
    job = job if record is None else job.replaying(record)
    found = privacy_spent(job, Ledger(job), rounds)
    assert found["delta"] == DELTA
    return found["epsilon"]


def test_every_exchange_is_accounted_for():
    half = 2.0 / np.sqrt(2)
    assert spent("momentum-local-sgd") == direct_epsilon((half, 3))
    assert spent("momentum-local-sgd", rounds=30) == direct_epsilon((half, 30))
    # Nine exchanges of one block a round.
    assert spent("fednest") == direct_epsilon((2.0, 27))
    # One of y before; then two points and two directions.
    assert spent("local-bsgvrm") == direct_epsilon((2.0, 1), (1.0, 3))


def test_replies_that_are_not_added_up_have_their_own_noise_only():
    own = direct_epsilon((2.0 / np.sqrt(2) / np.sqrt(3), 3))
    assert spent("momentum-local-sgd", rule=Median()) == own
    assert spent("momentum-local-sgd", coders=(Quantize(8),)) == own
    # Who stays away takes its share along.
    record = np.asarray([[PRESENT] * 3, [PRESENT, ABSENT, ABSENT]], np.uint8)
    found = spent("momentum-local-sgd", rounds=2, record=record)
    assert found == direct_epsilon(
        *((2.0 / np.sqrt(2) * np.sqrt(share), 1) for share in (1, 1 / 3))
    )


@pytest.mark.slow
def test_drawing_a_cohort_helps_clients_that_keep_nothing():
    expected = epsilon(2.0, 1, 27, 1, 40, DELTA)
    assert expected < 0.5 * epsilon(2.0, 1, 27, 1, 1, DELTA)
    assert spent("fednest", cohort=(1, 40)) == pytest.approx(expected)
    kept = spent("fedbioacc", cohort=(1, 40))  # points from earlier rounds
    assert kept == direct_epsilon((2.0 / np.sqrt(6), 3))


def test_without_the_library_noise_is_refused_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'fedbilevel\[privacy\]'"):
        run_noisy(Channel((Privacy(1.0, 2.0),)))


@pytest.mark.slow
def test_error_feedback_survives_a_stop_and_another_clip_is_refused(tmp_path):
    def job(clip):
        channel = Channel((Privacy(clip), TopK(0.5)))
        return quadratic_job(MOMENTUM, quadratic_data(3), channel=channel)

    whole = execute(SimulatorRuntime(job(0.1)), 4)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(whole.state.clients.channel))
    keep = Checkpoints(tmp_path, every_rounds=1)
    execute(SimulatorRuntime(job(0.1)), 2, checkpoints=keep)
    with pytest.raises(CheckpointError, match="channel"):
        execute(SimulatorRuntime(job(0.2)), 4, checkpoints=keep)
    resumed = execute(SimulatorRuntime(job(0.1)), 4, checkpoints=keep)
    assert_close((whole.state, whole.columns), (resumed.state, resumed.columns), 0)
    # Numbers that shape the program count as well.
    base = job(0.1)
    marks = {
        checkpoint.fingerprint(dataclasses.replace(base, channel=channel), 1)
        for channel in (
            Channel(),
            Channel((TopK(0.5),)),
            Channel((TopK(0.4),)),
            Channel((Quantize(8),)),
            Channel((), Median()),
            Channel((), Krum(0)),
            Channel((), Krum(1)),
        )
    }
    assert len(marks) == 7


REFUSED = {
    "krum-few": (lambda: job_with(Channel((), Krum(1))), "at least 2 . faulty . 3 = 5"),
    "trimmed-all": (lambda: job_with(Channel((), TrimmedMean(0.4))), "all of them"),
    "pooled": (lambda: job_with(Channel((), Median()), "pooled"), "nothing travels"),
    "weights": (
        lambda: job_with(Channel((Privacy(1.0),)), weights=(1.0, 2.0, 1.0)),
        "weights are 1 to 2. Make them equal",
    ),
    "privacy-second": (
        lambda: Channel((Quantize(8), Privacy(1.0))),
        "Privacy must come first",
    ),
    "two-compressions": (lambda: Channel((TopK(0.1), Quantize(8))), "only the last"),
    "secure-compressed": (
        lambda: read_channel(compress="topk:0.1", aggregate="secure"),
        "cannot be compressed",
    ),
    "noise-alone": (lambda: read_channel(noise=1.0), "without a clip"),
    "no-clip": (lambda: Privacy(0.0), "clip must be above 0"),
    "fraction": (lambda: read_channel(compress="topk:0"), "above 0, at most 1"),
    "bits": (lambda: read_channel(compress="quantize:1"), "between 2 and 16"),
    "trimmed-half": (lambda: TrimmedMean(0.5), "below 0.5"),
    "no-steps": (lambda: GeometricMedian(0), "at least 1"),
    "faulty": (lambda: Krum(-1), "must not be negative"),
    "unread": (lambda: read_channel(compress="quantize:x"), "like quantize:8"),
    "no-number": (lambda: read_channel(aggregate="krum"), "like krum:1"),
    "a-number": (lambda: read_channel(aggregate="median:1"), "like median"),
    "unknown": (lambda: read_channel(aggregate="medain"), "Did you mean 'median'"),
    "unknown-coder": (lambda: read_channel(compress="zip"), "Known: bfloat16, quant"),
}


def job_with(channel, name="local-bsgvrm", weights=(1.0, 1.0, 1.0)):
    data = quadratic_data(3)
    data = eqx.tree_at(lambda one: one.weights, data, jnp.asarray(weights))
    case, start = case_of(name), (jnp.ones(DX), jnp.ones(DY))
    rows = data.pooled() if case.pools else data
    return Job.of(case.algorithm, ROWWISE, rows, *start, channel=channel)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(InvalidInputError, match=message):
        make()


@pytest.mark.slow
def test_an_experiment_reads_and_records_its_channel(tmp_path):
    experiment = Experiment(
        "two-client",
        "fedavg",
        rounds=2,
        local_steps=1,
        clip=0.5,
        noise=1.0,
        compress="quantize:8",
        aggregate="median",
    )
    result = experiment.run(tmp_path / "run")
    assert Experiment.load(tmp_path / "run") == experiment
    named = ("clip", "noise", "delta", "compress", "aggregate")
    values = [result.config[name] for name in named]
    assert values == [0.5, 1.0, 1e-5, "quantize:8", "median"]
    assert result.counts["epsilon"] > 0
    built = Experiment("two-client", "fedavg", clip=0.5).build()
    participants = built.task.data.clients
    assert built.job().channel.coders == (Privacy(0.5, participants=participants),)
    assert not {"noise", "delta", "compress", "aggregate"} & set(built.config)
