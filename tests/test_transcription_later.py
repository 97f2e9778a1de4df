"""Methods after the founding paper repeat their listings, sample by sample."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.algorithms.base import Gathered, ServerTurn
from fedbilevel.algorithms.local.adafbio import AdaFBiO
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.algorithms.nested.fedmbo import FedMBO
from fedbilevel.algorithms.presets import Scaffold
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import ReferenceRuntime, SimulatorRuntime, execute, keys
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data
from tests.reference import later_listings
from tests.reference.bent_job import X0, Y0, bent_job, only_rows
from tests.reference.bent_oracles import lower_gradient
from tests.reference.replay_phases import (
    bundle_and_zeta_of,
    draw_phase,
    draw_setup,
    phase_number,
    three_lines,
    xi,
    zeta,
)

ROUNDS, P, CLIENTS = 8, 3, 3
BOTH = pytest.mark.parametrize(
    ("runtime", "rounds"),
    [
        (SimulatorRuntime, ROUNDS),
        pytest.param(ReferenceRuntime, 2, marks=pytest.mark.slow),
    ],
)


def end_of(job, rounds=ROUNDS, runtime: Any = SimulatorRuntime):
    return execute(runtime(job), rounds, measure_every=rounds).state


def assert_close(left, right, tolerance=1e-10):
    np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("radius", [None, 0.3])
def test_simfbo_is_its_listing(radius):
    lr, gamma = (0.1, 0.2, 0.15), (0.07, 0.12, 0.09)
    algorithm = SimFBO(*lr, *gamma, local_steps=P, radius=radius)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=3)
    samples = draw_phase(job, "local", ROUNDS * P, three_lines)
    steps: dict[str, Any] = {"tau": P, "lr": lr, "gamma": gamma}
    ball = {} if radius is None else {"radius": radius}
    expected = later_listings.simfbo(X0, Y0, samples, **steps, **ball)
    server = end_of(job).server
    for block, value in zip(vars(server.point).values(), expected, strict=True):
        assert_close(block, value)
    # The ball holds z back: without it z would end elsewhere.
    free = later_listings.simfbo(X0, Y0, samples, **steps)[2]
    assert radius is None or np.linalg.norm(free) > 2 * radius


def test_simfbo_whose_server_steps_like_its_clients_is_fedbio():
    lr, data = (0.1, 0.2, 0.15), quadratic_data(CLIENTS)
    kinds = (SimFBO(*lr, *lr, local_steps=P), FedBiO(*lr, local_steps=P))
    ends = [end_of(bent_job(kind, data, seed=4)).server for kind in kinds]
    points = [vars(end.point).values() for end in ends]
    for left, right in zip(*points, strict=True):
        assert_close(left, right, 1e-12)


def cohorts_of(job, rounds):
    """Return who takes part in every round."""
    drawn = (
        keys.draw_cohort(job.key, keys.ROUNDS, 0, r, job.clients, job.participants)
        for r in range(rounds)
    )
    return [[int(client) for client in cohort] for cohort in drawn]


@BOTH
@pytest.mark.parametrize("participants", [CLIENTS, 2])
def test_scaffold_is_its_listing(participants, runtime, rounds):
    algorithm = Scaffold(0.1, 0.6, local_steps=P)
    data = quadratic_data(CLIENTS)
    job = bent_job(algorithm, data, seed=5, participants=participants)
    samples = draw_phase(job, "local", rounds * P, zeta)
    everyone = [list(range(CLIENTS))] * rounds
    cohorts = everyone if participants == CLIENTS else cohorts_of(job, rounds)
    steps = {"p": P, "lr": 0.1, "lr_server": 0.6}
    y, c, own = later_listings.scaffold(X0, Y0, samples, cohorts, **steps)
    state = end_of(job, rounds, runtime)
    server = state.server.server
    assert_close(server.point.y, y)
    assert_close(server.shared[0].y, c)
    assert_close(state.clients.memory.own[0].y, np.stack(own))


@pytest.mark.slow
def test_scaffold_ends_at_the_minimizer_where_fedavg_does_not():
    data = quadratic_data(CLIENTS, noise=0.0)
    rows = [zeta for _, zeta in only_rows(data)]

    def slope(algorithm):
        server = end_of(bent_job(algorithm, data), 400).server
        y = np.asarray(algorithm.point(server).y)
        return np.linalg.norm(np.mean([lower_gradient(X0, y, z) for z in rows], axis=0))

    assert slope(Scaffold(0.1, local_steps=5)) < 1e-10
    assert slope(FedAvg(0.1, local_steps=5)) > 1e-3


def chains_of(job, phase, turns):
    """Return which chain each client gets in every turn of a phase."""
    where = (keys.ROUNDS, phase_number(job, phase))
    shared = [keys.shared_key(job.key, *where, turn) for turn in range(turns)]
    return [np.asarray(jr.permutation(key, CLIENTS)).tolist() for key in shared]


def drawn_rounds(job, rounds, lengths, T_in):
    """Return the samples and the order of the chains, as the listing takes them."""
    most = (
        job.algorithm.terms - 1 if job.algorithm.random_length else job.algorithm.terms
    )
    lowers = draw_phase(job, "lower", rounds * T_in, zeta)
    firsts = draw_phase(job, "chain_start", rounds, xi)
    hops = draw_phase(job, "hop", rounds * most, zeta)
    lasts = draw_phase(job, "last_hop", rounds, zeta)
    dealt = chains_of(job, "hop", rounds * most)
    ends = chains_of(job, "last_hop", rounds)

    def every(drawn, t):
        return [client[t] for client in drawn]

    return [
        (
            [every(lowers, r * T_in + i) for i in range(T_in)],
            every(firsts, r),
            [
                (dealt[r * most + m], every(hops, r * most + m))
                for m in range(lengths[r])
            ],
            (ends[r], every(lasts, r)),
        )
        for r in range(rounds)
    ]


@pytest.mark.parametrize("random_length", [False, True])
@BOTH
def test_fedmbo_is_its_listing(random_length, runtime, rounds):
    terms, T_in, theta = 3, 2, 0.25
    steps: dict[str, Any] = {"lr_x": 0.1, "lr_y": 0.2, "theta": theta}
    algorithm = FedMBO(
        **steps,
        terms=terms,
        chains=CLIENTS,
        inner_rounds=T_in,
        random_length=random_length,
    )
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=6)
    where = (job.key, keys.ROUNDS, phase_number(job, "hop"))
    lengths = [int(keys.draw_length(*where, r, terms - 1)) for r in range(rounds)]
    lengths = lengths if random_length else [terms] * rounds

    def scale(many):
        return terms * theta * many[-1] if random_length else theta * np.sum(many, 0)

    drawn = drawn_rounds(job, rounds, lengths, T_in)
    x, y = later_listings.fedmbo(X0, Y0, drawn, **steps, scale=scale)
    point = end_of(job, rounds, runtime).server.point
    assert_close(point.x, x)
    assert_close(point.y, y)
    # Chains are handed on: not every client works on its own.
    assert any(order != sorted(order) for order in chains_of(job, "last_hop", ROUNDS))


def test_a_chain_without_a_reply_keeps_its_sum():
    """The place of client 1 is empty: neither r nor the sum of its chain may change."""
    algorithm = FedMBO(
        lr_x=0.1, lr_y=0.2, theta=0.25, terms=3, chains=3, random_length=False
    )
    draw = np.random.default_rng(3)
    r, total, replies = (jnp.asarray(draw.standard_normal((3, 2))) for _ in range(3))
    start = replace(algorithm.init_server(jnp.zeros(1), jnp.zeros(2)), r=r, total=total)
    present, key = jnp.asarray([True, False, True]), jr.key(5)
    turn = ServerTurn(0, key, jnp.arange(3), present, 3)
    after = algorithm.longer(start, Gathered(replies, present.astype(float)), turn)
    expected = np.asarray(total).copy(), np.asarray(r).copy()
    for place, chain in enumerate(np.asarray(jr.permutation(key, 3))):
        if place != 1:
            expected[0][chain] += np.asarray(replies)[place]
            expected[1][chain] = np.asarray(replies)[place]
    assert_close(after.total, expected[0])
    assert_close(after.r, expected[1])


SCALED: dict[str, Any] = {
    "gamma": 0.1,
    "lam": 0.3,
    "c1": 3.0,
    "c2": 4.0,
    "tau": 0.7,
    "r": 0.2,
}


def adafbio_and_its_listing(runtime, rounds, coordinatewise):
    algorithm = AdaFBiO(
        Neumann(1, 0.3),
        CubeRootDecay(0.4, 8),
        local_steps=P,
        coordinatewise=coordinatewise,
        **SCALED,
    )
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=6)
    draw = bundle_and_zeta_of(job)
    firsts = [client[0] for client in draw_setup(job, 1, draw)]
    expected = later_listings.adafbio(
        X0,
        Y0,
        firsts,
        draw_phase(job, "local", rounds * P, draw),
        p=P,
        eta=lambda t: 0.4 / np.cbrt(8 + t),
        theta=0.3,
        coordinatewise=coordinatewise,
        **SCALED,
    )
    server = end_of(job, rounds, runtime).server
    pairs = (server.point, server.direction, *server.shared)
    found = [block for pair in pairs for block in vars(pair).values()]
    for left, right in zip(found, expected, strict=True):
        assert_close(left, right)


@BOTH
def test_adafbio_is_its_listing(runtime, rounds):
    adafbio_and_its_listing(runtime, rounds, False)


@pytest.mark.slow
def test_adafbio_with_coordinates_is_its_listing():
    adafbio_and_its_listing(SimulatorRuntime, ROUNDS, True)
