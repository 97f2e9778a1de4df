"""Later federated methods repeat their listings, sample by sample."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.algorithms.local.br_fedbim import BRFedBiM
from fedbilevel.algorithms.local.fedbio_momentum import FedBiOMomentum
from fedbilevel.algorithms.local.fedmsa import FedMSA
from fedbilevel.algorithms.nested.aggitd import AggITD
from fedbilevel.algorithms.nested.e_aipod import EAiPOD
from fedbilevel.algorithms.presets import EFSOBA, FedBiODifferences, MemFBO, ShroFBO
from fedbilevel.runtime import SimulatorRuntime, execute, keys
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data
from tests.reference import federated_listings
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.replay_nest import (
    draw_fed_out,
    draw_outer_steps,
    draw_walks,
)
from tests.reference.replay_phases import (
    draw_phase,
    draw_setup,
    one_of_each,
    phase_number,
    three_lines,
    xi,
    zeta,
)

ROUNDS, P, CLIENTS = 6, 3, 3
LR = (0.1, 0.2, 0.15)


def end_of(job, rounds=ROUNDS):
    return execute(SimulatorRuntime(job), rounds, measure_every=rounds).state


def assert_close(found, expected):
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-10)


def blocks(tree) -> list[Any]:
    return list(vars(tree).values())


def test_fedbio_momentum_is_its_listing():
    algorithm = FedBiOMomentum(*LR, 0.4, CubeRootDecay(2.0, 8.0), local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=3)
    samples = draw_phase(job, "local", ROUNDS * P, three_lines)
    expected = federated_listings.fedbio_momentum(
        X0, Y0, samples, p=P, lr=LR, alpha=0.4, a=lambda t: 2 / np.cbrt(8 + t)
    )
    server = end_of(job).server
    assert_close([*blocks(server.point), server.direction.x], expected)


def steps_before_heads(job, exchanges, chance, most):
    """Return how many lower steps each exchange comes after."""
    where = (keys.ROUNDS, phase_number(job, "lower"))
    taken = []
    for turn in range(exchanges):
        coins = jr.bernoulli(keys.shared_key(job.key, *where, turn), chance, (most,))
        heads = np.flatnonzero(np.asarray(coins))
        taken.append(int(heads[0]) + 1 if heads.size else most)
    return taken


def test_e_aipod_is_its_listing():
    rounds, T_in, S = 4, 2, 3
    steps: dict[str, Any] = {"alpha": 0.2, "lr_y": 0.15, "ell": 4.0}
    counts: dict[str, Any] = {"inner_rounds": T_in, "longest": S, "local_steps": 2}
    counts |= {"terms": 2, "random_length": False}
    algorithm = EAiPOD(**steps, **counts, probability=0.4)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=4)
    drawn = draw_phase(job, "lower", rounds * T_in * S, zeta)
    taken = steps_before_heads(job, rounds * T_in, 0.4, S)
    assert {1, 2, S} <= set(taken)

    def lower(exchange):
        first, many = exchange * S, taken[exchange]
        return [client[first : first + many] for client in drawn]

    given = [
        ([lower(r * T_in + i) for i in range(T_in)], *above)
        for r, above in enumerate(draw_fed_out(job, rounds))
    ]
    x, y, c = federated_listings.e_aipod(X0, Y0, given, **steps, pr=0.4)
    state = end_of(job, rounds)
    assert_close(blocks(state.server.point), (x, y))
    # A client renews its control when the next y arrives.
    held = state.clients.memory
    change = np.asarray(state.server.point.y) - np.asarray(held.evaluated)
    assert_close(np.asarray(held.control) + 0.4 / 0.15 * change, c)
    np.testing.assert_allclose(np.sum(c, axis=0), 0, atol=1e-12)


def pairs_of(job, phase):
    """Return which two of three clients take part in each round."""
    where = (keys.ROUNDS, phase_number(job, phase))
    drawn = [keys.draw_cohort(job.key, *where, r, CLIENTS, 2) for r in range(ROUNDS)]
    return [np.asarray(cohort).tolist() for cohort in drawn]


def test_fedmsa_is_its_listing():
    """Two of three clients walk in a round, all tell their directions."""
    steps: dict[str, Any] = {"alpha": 0.1, "beta": 0.15, "rho": 0.4}
    job = bent_job(
        FedMSA(**steps, terms=2, local_steps=P),
        quadratic_data(CLIENTS),
        seed=5,
        participants=2,
    )
    cohorts = pairs_of(job, "local")
    # Here exchanges before the first round ask cohorts, too.
    asked = [
        np.asarray(keys.draw_cohort(job.key, keys.SETUP, 0, m, CLIENTS, 2)).tolist()
        for m in range(2)
    ]
    drawn = draw_setup(job, 2, one_of_each)
    starts = [[drawn[asked[m][place]][m] for m in range(2)] for place in range(2)]
    firsts = draw_phase(job, "directions", ROUNDS, three_lines)
    walks = draw_phase(job, "local", ROUNDS * (P - 1), three_lines)
    expected = federated_listings.fedmsa(
        X0, Y0, starts, firsts, walks, cohorts, **steps, tau=P
    )
    server = end_of(job).server
    assert_close([*blocks(server.point), *blocks(server.direction)], expected)


GAMMA = (0.07, 0.12, 0.09)


def own_numbers(job, fewest, most):
    """Return how many local steps each client makes."""
    where = (keys.ROUNDS, phase_number(job, "local"))
    turns = [keys.client_turn(job.key, where, k, 0) for k in range(CLIENTS)]
    spare, among = [turn.spare_keys(1)[0] for turn in turns], (fewest, most + 1)
    return [int(jr.randint(key, (), *among, jnp.int32)) for key in spare]


def test_shrofbo_is_its_listing():
    algorithm = ShroFBO(*LR, *GAMMA, fewest_steps=1, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=3)
    samples = draw_phase(job, "local", ROUNDS * P, three_lines)
    taus = own_numbers(job, 1, P)
    assert len(set(taus)) > 1
    given: dict[str, Any] = {"most": P, "lr": LR, "gamma": GAMMA}
    expected = federated_listings.shrofbo(X0, Y0, samples, taus, **given)
    assert_close(blocks(end_of(job).server.point), expected)
    # Sums that are not divided would lead elsewhere.
    other = federated_listings.shrofbo(X0, Y0, samples, taus, **given, normalized=False)
    assert np.linalg.norm(other[0] - expected[0]) > 1e-3


def test_fedbio_differences_is_its_listing():
    """The lower level is no quadratic: a distance of 0.5 tells from a product."""
    algorithm = FedBiODifferences(*LR, 0.5, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=3)
    samples = draw_phase(job, "local", ROUNDS * P, three_lines)
    products = federated_listings.differences(0.5)
    expected = federated_listings.fedbio(X0, Y0, samples, p=P, lr=LR, products=products)
    assert_close(blocks(end_of(job).server.point), expected)


def test_memfbo_is_its_listing():
    algorithm = MemFBO(*LR, *GAMMA, 0.5, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=3)
    expected = federated_listings.shrofbo(
        X0,
        Y0,
        draw_phase(job, "local", ROUNDS * P, three_lines),
        [P] * CLIENTS,
        most=P,
        lr=LR,
        gamma=GAMMA,
        normalized=False,
        products=federated_listings.differences(0.5),
    )
    assert_close(blocks(end_of(job).server.point), expected)


def beginnings(job, rounds, N):
    """Return with which lower update the series of each round begins."""
    where = (keys.ROUNDS, phase_number(job, "inner_anchor"))
    drawn = [keys.shared_key(job.key, *where, r * N) for r in range(rounds)]
    return [int(jr.randint(key, (), 1, N + 1, jnp.int32)) for key in drawn]


def drawn_with_lower_updates(job, rounds, N):
    """Return what AggITD draws, as its listing takes it."""
    begins = beginnings(job, rounds, N)
    zetas = draw_phase(job, "inner_anchor", 3 * N * rounds, zeta)
    xis = draw_phase(job, "inner_anchor", 3 * N * rounds, xi)
    # Of three keys the first is for y, the others are for z.
    last_xis = draw_phase(job, "series_end", 2 * rounds, xi)
    last_zetas = draw_phase(job, "series_end", 2 * rounds, zeta)
    walks = draw_walks(job, "inner_correct", N * rounds, zeta)
    every = range(CLIENTS)
    given = []
    for r, outer in enumerate(draw_outer_steps(job, rounds)):
        calls = range(r * N, (r + 1) * N)
        lowers = [[(zetas[k][3 * c], walks[c][k]) for k in every] for c in calls]
        series = [
            [(xis[k][3 * c + 1], zetas[k][3 * c + 2]) for k in every] for c in calls
        ][1:]
        series.append([(last_xis[k][2 * r], last_zetas[k][2 * r + 1]) for k in every])
        given.append((lowers, begins[r], series, *outer))
    return given


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_aggitd_is_its_listing(whole):
    rounds, N = 5, 4
    steps: dict[str, Any] = {"alpha": 0.2, "beta": 0.3, "lam": 0.25}
    algorithm = AggITD(**steps, terms=N, local_steps=2, random_length=not whole)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=4)
    given = drawn_with_lower_updates(job, rounds, N)
    assert len({begins for _, begins, *_ in given}) > 2
    expected = federated_listings.aggitd(X0, Y0, given, **steps, whole=whole)
    assert_close(blocks(end_of(job, rounds).server.point), expected)


def test_br_fedbim_is_its_listing():
    """With two of three clients at a time, who go on from their own momentum."""
    data = quadratic_data(CLIENTS)
    job = bent_job(BRFedBiM(*LR, 0.4, robust="mean"), data, seed=3, participants=2)
    samples = draw_phase(job, "step", ROUNDS, three_lines)
    expected = federated_listings.br_fedbim(
        X0,
        Y0,
        samples,
        pairs_of(job, "step"),
        lr=LR,
        alpha=0.4,
        rule=lambda many: np.mean(many, axis=0),
    )
    assert_close(blocks(end_of(job).server.point), expected)


@pytest.mark.slow
def test_br_fedbim_with_a_median_is_its_listing():
    job = bent_job(BRFedBiM(*LR, 0.4), quadratic_data(CLIENTS), seed=3)
    samples = draw_phase(job, "step", ROUNDS, three_lines)
    everyone = [list(range(CLIENTS))] * ROUNDS
    expected = federated_listings.br_fedbim(
        X0,
        Y0,
        samples,
        everyone,
        lr=LR,
        alpha=0.4,
        rule=lambda many: np.median(many, axis=0),
    )
    assert_close(blocks(end_of(job).server.point), expected)


def test_ef_soba_is_its_listing():
    """The largest of 2 and of 3 entries travel, the rest with the next ones."""
    job = bent_job(EFSOBA(*LR, fraction=0.3), quadratic_data(CLIENTS), seed=3)
    rounds = 4 * ROUNDS
    samples = draw_phase(job, "step", rounds, one_of_each)
    expected = federated_listings.ef_soba(X0, Y0, samples, lr=LR, largest=1)
    assert_close(blocks(end_of(job, rounds).server.point), expected)
