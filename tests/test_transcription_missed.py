"""Listings with a warm start and missed rounds, repeated sample by sample.

Clients that missed a round have an old point: to correct from it would be a mistake
that no run with everybody shows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.fedbioacc_clientwise import FedBiOAccClientwise
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.presets import FedBiOAccLocal
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import SimulatorRuntime, execute, keys
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data
from tests.reference import auxiliary_listings, cohort_listings
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.replay_phases import (
    _plain,
    bundle_and_zeta_of,
    draw_phase,
    three_lines,
)

ROUNDS, P, CLIENTS, COHORT, WARM, THETA, SEED = 7, 2, 4, 2, 3, 0.3, 2
LETTERS: dict[str, Any] = {"alpha": 3.0, "beta": 4.0, "rho1": 0.5, "rho2": 0.8}
OWN: dict[str, Any] = {"eta": 0.4, "gamma": 0.6, "c_nu": 4.0, "c_omega": 5.0}
DECAY = CubeRootDecay(0.5, 8.0)


def decay(t):
    """Return the schedule of `DECAY`."""
    return 0.5 / np.cbrt(8 + t)


def job_of(algorithm):
    return bent_job(algorithm, quadratic_data(CLIENTS), seed=SEED, participants=COHORT)


def cohorts_of(root, stage=keys.ROUNDS, rounds=ROUNDS):
    """Return who takes part in every round."""
    drawn = (
        keys.draw_cohort(root, stage, 0, r, CLIENTS, COHORT) for r in range(rounds)
    )
    return [[int(client) for client in cohort] for cohort in drawn]


def later_draws(job, draw, turn_keys, stage=keys.ROUNDS):
    """Return [client][i] of what is drawn with other keys than those of the loop."""

    def of_client(client):
        turn = keys.client_turn(job.key, (stage, 0), client, 0)
        return jax.vmap(lambda key: draw(job.oracle(client), key))(turn_keys(turn))

    drawn = jax.tree.map(np.asarray, jax.vmap(of_client)(jnp.arange(CLIENTS)))
    count = jax.tree.leaves(drawn)[0].shape[1]

    def one(client, i):
        return _plain(jax.tree.map(lambda leaf: leaf[client, i], drawn))

    return [[one(k, i) for i in range(count)] for k in range(CLIENTS)]


def warm_y(job, step):
    warm = later_draws(
        job,
        lambda oracle, key: oracle.draw_lower(key),
        lambda turn: turn.keys(WARM),
        keys.SETUP,
    )
    (cohort,) = cohorts_of(job.key, keys.SETUP, 1)
    return cohort_listings.warm_started(X0, Y0, cohort, warm, step=step)


def state_of(job):
    return execute(SimulatorRuntime(job), ROUNDS, measure_every=ROUNDS).state


def assert_close(*pairs):
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


def test_the_cohorts_have_who_stays_who_returns_and_who_comes_late():
    cohorts = [set(one) for one in cohorts_of(jr.key(SEED))]
    pairs = list(zip(cohorts, cohorts[1:], strict=False))
    assert any(before & now for before, now in pairs)
    before, missed = set(), False
    for last, now in pairs:
        before |= last
        missed |= bool((now & before) - last)
    assert missed and cohorts[0] != set().union(*cohorts)


def test_local_bsgm_with_a_warm_start_and_missed_rounds():
    algorithm = LocalBSGM(
        Neumann(1, THETA), 0.1, local_steps=P, warm_start=WARM, **LETTERS
    )
    job = job_of(algorithm)
    samples = draw_phase(job, "local", ROUNDS * P, bundle_and_zeta_of(job))
    y = warm_y(job, LETTERS["rho2"] * 0.1)
    letters = {"p": P, "eta": 0.1, "theta": THETA, **LETTERS}
    x, y, u, v = cohort_listings.local_bsgm(
        X0, y, samples, cohorts_of(job.key), **letters
    )
    server = state_of(job).server
    assert_close(
        (server.point.x, x),
        (server.point.y, y),
        (server.direction.x, u),
        (server.direction.y, v),
    )


def test_local_bsgvrm_with_a_warm_start_a_first_batch_and_missed_rounds():
    algorithm = LocalBSGVRM(
        Neumann(1, THETA),
        DECAY,
        local_steps=P,
        warm_start=WARM,
        first_batch=3,
        **LETTERS,
    )
    job = job_of(algorithm)
    draw = bundle_and_zeta_of(job)
    samples = draw_phase(job, "local", ROUNDS * P, draw)
    firsts = later_draws(job, draw, lambda turn: turn.spare_keys(2))
    y = warm_y(job, LETTERS["rho2"] * decay(0))
    letters = {"p": P, "eta": decay, "theta": THETA, **LETTERS}
    x, y, u, v = cohort_listings.local_bsgvrm(
        X0, y, samples, firsts, cohorts_of(job.key), **letters
    )
    server = state_of(job).server
    assert_close(
        (server.point.x, x),
        (server.point.y, y),
        (server.direction.x, u),
        (server.direction.y, v),
    )


@pytest.mark.parametrize(
    ("kind", "averaged_before_the_move"),
    [
        (FedBiOAccClientwise, True),
        pytest.param(FedBiOAccLocal, False, marks=pytest.mark.slow),
    ],
)
def test_an_own_lower_level_with_missed_rounds(kind, averaged_before_the_move):
    job = job_of(kind(Neumann(1, THETA), DECAY, **OWN, local_steps=P))
    samples = draw_phase(job, "local", ROUNDS * P, bundle_and_zeta_of(job))
    x, nu, y, omega = cohort_listings.own_lower(
        X0,
        Y0,
        samples,
        cohorts_of(job.key),
        p=P,
        a=decay,
        theta=THETA,
        averaged_before_the_move=averaged_before_the_move,
        **OWN,
    )
    end = state_of(job).joined()
    assert_close(
        (end.point.x, x),
        (end.point.y, np.stack(y)),
        (end.direction.x, nu),
        (end.direction.y, np.stack(omega)),
    )


def test_fedbioacc_with_missed_rounds():
    algorithm = FedBiOAcc(DECAY, **OWN, tau=0.5, c_q=6.0, local_steps=P)
    job = job_of(algorithm)
    samples = draw_phase(job, "local", ROUNDS * P, three_lines)
    point, direction = auxiliary_listings.fedbioacc_in_cohorts(
        X0,
        Y0,
        samples,
        cohorts_of(job.key),
        p=P,
        a=decay,
        steps=(OWN["eta"], OWN["gamma"], 0.5),
        factors=(OWN["c_nu"], OWN["c_omega"], 6.0),
    )
    server = state_of(job).server
    assert_close(
        *zip(vars(server.point).values(), point, strict=True),
        *zip(vars(server.direction).values(), direction, strict=True),
    )
