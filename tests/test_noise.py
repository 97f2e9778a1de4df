"""Noise of a deployed site, and the keys of everything that is drawn on the way."""

import itertools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel._types import Pair
from fedbilevel.channels import AbstractCoder, Channel, Privacy
from fedbilevel.channels import discrete_gaussian as discrete_module
from fedbilevel.channels.discrete_gaussian import (
    LARGEST_DEVIATION,
    discrete_gaussian,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.federation import noise as noise_module
from fedbilevel.federation.noise import FINEST, SiteNoise
from fedbilevel.federation.secure.fixed_point import FRACTION_BITS
from fedbilevel.federation.wire import unpack
from fedbilevel.runtime import SimulatorRuntime, execute
from tests.cases import case_of, quadratic_data, quadratic_job, some_of
from tests.federation import Loopback, server_of, site_of
from tests.tampering import renewed

pytestmark = pytest.mark.two_devices

CHEAPEST = case_of("momentum-local-sgd").algorithm  # a message of two blocks a round


def seeded(seed):
    return np.random.default_rng(seed).bytes


# How it is drawn


@pytest.mark.parametrize("deviation", [1, 2, 5])
def test_numbers_have_the_chances_of_the_discrete_gaussian(deviation):
    count = 200_000
    drawn = discrete_gaussian(deviation, count, seeded(deviation))
    assert drawn.dtype == np.int64 and drawn.shape == (count,)
    values = np.arange(-40 * deviation, 40 * deviation + 1)
    chances = np.exp(-(values**2) / (2 * deviation**2))
    expected = count * chances / chances.sum()
    often = expected > 5
    found = np.array([(drawn == value).sum() for value in values[often]])
    statistic = float((np.square(found - expected[often]) / expected[often]).sum())
    # A chi-square of k degrees has mean k and deviation sqrt(2 k).
    degrees = int(often.sum()) - 1
    assert abs(statistic - degrees) < 5 * math.sqrt(2 * degrees)


def test_numbers_of_a_large_deviation_are_normal_and_independent():
    deviation, count = 2**20 + 77, 200_000
    drawn = discrete_gaussian(deviation, count, seeded(0)) / deviation
    moments = [np.mean(drawn**power) for power in (1, 2, 3, 4)]
    scatter = [1.0, math.sqrt(2), math.sqrt(15), math.sqrt(96)]
    for moment, exact, one in zip(moments, (0, 1, 0, 3), scatter, strict=True):
        assert abs(moment - exact) < 5 * one / math.sqrt(count)
    for lag in (1, 2, 7):
        product = np.mean(drawn[lag:] * drawn[:-lag])
        assert abs(product) < 5 / math.sqrt(count)
    # Down to the last bit.
    odd = discrete_gaussian(deviation, count, seeded(1)) % 2
    assert abs(odd.mean() - 0.5) < 5 * 0.5 / math.sqrt(count)


def test_nothing_is_drawn_twice_and_odd_deviations_are_refused():
    first, second = (discrete_gaussian(2**20, 100) for _ in range(2))
    assert not (first == second).any()
    assert discrete_gaussian(3, 0).shape == (0,)
    for deviation in (0, LARGEST_DEVIATION + 1):
        with pytest.raises(InvalidInputError, match="whole deviations from 1"):
            discrete_gaussian(deviation, 1)


def test_there_are_as_many_numbers_however_few_candidates_are_taken(monkeypatch):
    """Nearly always the first candidates are enough, and a short second try is rare."""

    def few(scale, size, bits):
        del bits
        return np.where(np.arange(size) % 7 == 0, scale, 1000 * scale)

    monkeypatch.setattr(discrete_module, "_discrete_laplace", few)
    assert len(discrete_gaussian(5, 100, seeded(0))) == 100


# What leaves a site


def step_of(share):
    """Return the grid that noise of a deviation is on: 20 binary digits below it."""
    return 2.0 ** (math.floor(math.log2(share)) - 20)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_replies_lie_on_the_grid_whatever_the_input(kind):
    """Sums of floating-point normals have low bits that tell the summands."""
    privacy = Privacy(0.3, 5.0, participants=10)
    noise, draw = SiteNoise(privacy), np.random.default_rng(0)
    step = step_of(5.0 * 0.3 / math.sqrt(10))
    assert noise.step == step
    for size in (0.0, 1e-30, 1e-7, 0.1, 1.0, 1e30):
        change = Pair(
            jnp.asarray(size * draw.normal(size=40), kind),
            {"a": jnp.asarray(size * draw.normal(size=(3, 4)), kind)},
        )
        released = jax.tree.leaves(noise.protect(change))
        assert [leaf.dtype for leaf in released] == [kind, kind]
        for leaf in released:
            steps = np.asarray(leaf, np.float64) / step
            assert (steps == np.round(steps)).all()
            # Odd numbers of steps are there, too: the grid is no finer, and no coarser.
            assert (steps % 2 == 1).any()


def test_a_site_releases_steps_of_the_grid_in_its_packets():
    channel = Channel((Privacy(0.3, 5.0),))
    job = quadratic_job(CHEAPEST, quadratic_data(2), channel=channel)
    seen = [np.asarray(leaf) for reply in released_by(job, 2) for leaf in reply]
    steps = np.concatenate(seen) / step_of(5.0 * 0.3 / math.sqrt(2))
    assert len(seen) > 4 and (steps == np.round(steps)).all()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_on_the_grid_no_block_is_longer_than_the_clip(kind, monkeypatch):
    monkeypatch.setattr(
        noise_module, "discrete_gaussian", lambda s, size, bits: np.zeros(size, int)
    )
    noise, draw = (
        SiteNoise(Privacy(0.1, 20.0, participants=4)),
        np.random.default_rng(1),
    )
    most = int(0.1**2 / noise.step**2)
    for size, count in itertools.product((0.001, 0.1, 1.0, 1e4, 1e25), (1, 3, 10_000)):
        change = jnp.asarray(size * draw.normal(size=count), kind)
        arrived = np.asarray(noise.protect(change), np.float64)
        steps = [int(one) for one in arrived / noise.step]
        assert sum(one**2 for one in steps) <= most
        norm = float(np.linalg.norm(np.asarray(change, np.float64)))
        exact = np.asarray(change, np.float64) * min(1, 0.1 / norm)
        # Rounded toward zero, by less than a step, and scaled by hardly anything.
        assert np.abs(arrived - exact).max() <= noise.step + 1e-9
        assert (np.abs(arrived) <= np.abs(exact)).all()


def test_the_noise_is_as_large_as_was_asked_for_and_fits_masks():
    for clip, noise, participants in ((0.3, 5.0, 10), (7.0, 0.1, 3), (1e-3, 1.0, 100)):
        own = SiteNoise(Privacy(clip, noise, participants=participants))
        share = noise * np.float64(np.float32(clip)) / math.sqrt(participants)
        assert share <= own.deviation * own.step * (1 + 1e-7)
        assert own.deviation * own.step <= share * (1 + 2.0**-19)
        assert 2**20 <= own.deviation <= 2**21
        assert own.step >= 2.0**FINEST
    assert -FINEST <= FRACTION_BITS
    for clip, noise in ((1e-7, 1.0), (1.0, 1e-15)):
        with pytest.raises(InvalidInputError, match="too little for the grid"):
            SiteNoise(Privacy(clip, noise))


def restarted(job, node, net):
    """Return a site in another process, which heard the hello."""
    again = site_of(job, node - 10)
    again.handle(next(p for n, p, _ in net.sent if n == node))
    return again


def released_by(job, rounds):
    """Return what sites sent in exchanges, also when asked for the same again."""
    net = Loopback({10 + k: site_of(job, k) for k in range(job.clients)})
    runtime = server_of(job, net)
    execute(runtime, rounds)
    asked = [
        (node, packet)
        for node, packet, _ in net.sent
        if unpack(packet, 1 << 30)[0].kind == "exchange"
    ]
    answers = [answer for node, packet, answer in net.sent if (node, packet) in asked]
    # A site that was started again holds nothing: the first packets have all leaves.
    for node, packet in asked[: job.clients]:
        again = restarted(job, node, net)
        # The very same packet gets the very same reply, which releases nothing more.
        assert again.handle(packet) == again.handle(packet)
        answers.append(again.handle(renewed(packet)))
        # So does the same question under another number.
        same = [again.handle(renewed(packet)), answers[-1]]
        assert len({bytes(unpack(one, 1 << 30)[2]) for one in same}) == 1
        answers.append(restarted(job, node, net).handle(renewed(packet)))
    bodies = [unpack(answer, 1 << 30) for answer in answers if answer is not None]
    assert all(header.kind == "exchange" for header, _, _ in bodies)
    return [_vectors(listed, body) for _, listed, body in bodies]


def _vectors(listed, body):
    ends = np.cumsum([np.dtype(kind).itemsize * shape[0] for kind, shape, _ in listed])
    parts = zip([0, *ends[:-1]], ends, listed, strict=True)
    return [np.frombuffer(body[a:b], kind) for a, b, (kind, _, _) in parts]


def test_no_noise_is_used_twice():
    """Not for another round, client, block or process."""
    clip, noise, clients = 1e-3, 1e4, 2
    job = quadratic_job(
        CHEAPEST, quadratic_data(clients), channel=Channel((Privacy(clip, noise),))
    )
    replies = released_by(job, 2)
    share = noise * clip / math.sqrt(clients)
    blocks = [block for reply in replies for block in reply]
    # In two rounds, and the first one twice again.
    assert len(blocks) == 2 * clients * (2 + 2)
    # Of what was clipped hardly anything is in them: equal noise would show.
    for one, other in itertools.combinations(blocks, 2):
        size = min(one.size, other.size)
        assert np.abs(one[:size] - other[:size]).max() > 1e-3 * share


# Keys of coders


class Spy(AbstractCoder):
    """Writes down the keys that it is given, when it runs."""

    seen: ClassVar[list[tuple[int, ...]]] = []

    def encode(self, vector, memory, key):
        """Return the vector as it is."""
        jax.debug.callback(self._note, jr.key_data(key))
        return vector, memory

    @classmethod
    def _note(cls, data):
        cls.seen.append(tuple(np.asarray(data).ravel().tolist()))


def keys_seen(run):
    Spy.seen.clear()
    run()
    jax.effects_barrier()
    return sorted(Spy.seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks"),
    some_of([("momentum-local-sgd", 2), ("lfednest", 1 + 1 + 1)], 1),
)
def test_keys_of_coders_differ_between_rounds_messages_clients_and_blocks(name, blocks):
    """Messages of two blocks, and three of one block; two coders in a row."""
    clients, rounds = 2, 2
    data, algorithm = quadratic_data(clients), case_of(name).algorithm
    job = quadratic_job(algorithm, data, channel=Channel((Spy(), Spy())))

    def deployed():
        net = Loopback({10 + k: site_of(job, k) for k in range(clients)})
        execute(server_of(job, net), rounds)

    simulated = keys_seen(lambda: execute(SimulatorRuntime(job), rounds))
    assert len(simulated) == 2 * clients * rounds * blocks
    assert len(set(simulated)) == len(simulated)
    # A federation is to make the same numbers.
    assert keys_seen(deployed) == simulated


@pytest.mark.slow
def test_keys_of_what_compresses_noisy_replies_differ_as_well():
    clients, rounds = 2, 2
    channel = Channel((Privacy(1.0, 2.0), Spy()))
    job = quadratic_job(CHEAPEST, quadratic_data(clients), channel=channel)
    net = Loopback({10 + k: site_of(job, k) for k in range(clients)})
    seen = keys_seen(lambda: execute(server_of(job, net), rounds))
    assert len(seen) == len(set(seen)) == clients * 2 * rounds
