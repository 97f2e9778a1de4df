"""The baselines repeat their listings, sample by sample, on clients that differ."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbio_clientwise import FedBiOClientwise
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.fedbioacc_clientwise import FedBiOAccClientwise
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.algorithms.nested.lfednest import LFedNest
from fedbilevel.algorithms.presets import FedBiOAccLocal, FedNestSGD, LFedNestSVRG
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.algorithms.single_level.momentum_local_sgd import MomentumLocalSGD
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import Job, ReferenceRuntime, SimulatorRuntime, execute
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data
from tests.reference import auxiliary_listings, nest_listings, single_loop_listings
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.replay_nest import draw_rounds, lengths
from tests.reference.replay_phases import (
    bundle_and_zeta_of,
    draw_phase,
    three_lines,
    zeta,
)

ROUNDS, P, CLIENTS, THETA, ELL = 10, 3, 3, 0.3, 4.0
BOTH_RUNTIMES = pytest.mark.parametrize(
    ("runtime", "rounds"),
    [
        (SimulatorRuntime, ROUNDS),
        pytest.param(ReferenceRuntime, 2, marks=pytest.mark.slow),
    ],
)
NEST: dict[str, Any] = {"alpha": 0.3, "beta": 0.4, "inner_rounds": 2, "local_steps": P}
STEPS: dict[str, Any] = {"lr_x": 0.1, "lr_y": 0.2, "lr_z": 0.15}
OWN: dict[str, Any] = {"eta": 0.4, "gamma": 0.6, "c_nu": 4.0, "c_omega": 5.0}
ORDERS = pytest.mark.parametrize("alternating", [False, True])


def a(t):
    """Return the schedule of `DECAY`."""
    return 0.8 / np.cbrt(8 + t)


DECAY = CubeRootDecay(0.8, 8.0)


def job_of(algorithm, *, seed: int = 3) -> Job:
    return bent_job(algorithm, quadratic_data(CLIENTS), seed=seed)


def end_of(job: Job, runtime: Any = SimulatorRuntime, rounds: int = ROUNDS) -> Any:
    """Return the server's state, with all clients' own blocks, after some rounds."""
    return execute(runtime(job), rounds, measure_every=rounds).state.joined()


def assert_shared(actual, over_clients):
    """Compare with a list over clients that were just averaged."""
    for one in over_clients:
        np.testing.assert_allclose(actual, one, rtol=0, atol=1e-10)


def assert_own(actual, over_clients):
    """Compare every client's own block, and see that they differ."""
    np.testing.assert_allclose(actual, np.stack(over_clients), rtol=0, atol=1e-10)
    assert not np.allclose(over_clients[0], over_clients[1], atol=1e-3)


def assert_nest(job: Job, inner, outer, runtime: Any = SimulatorRuntime, rounds=ROUNDS):
    samples = draw_rounds(job, rounds)
    x, y = nest_listings.nest(X0, Y0, samples, inner, outer)
    point = end_of(job, runtime, rounds).point
    np.testing.assert_allclose(point.x, x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(point.y, y, rtol=0, atol=1e-10)


fed_inn = partial(nest_listings.fed_inn, beta=NEST["beta"])
light_fed_inn = partial(nest_listings.light_fed_inn, beta=NEST["beta"])
full_ihgp = partial(nest_listings.full_ihgp, ell=ELL)
fed_out = partial(nest_listings.fed_out, alpha=NEST["alpha"], inverse=full_ihgp)
light_fed_out = partial(nest_listings.light_fed_out, alpha=NEST["alpha"], theta=THETA)


@pytest.mark.slow
def test_fednest_with_the_full_sum_is_its_listing():
    algorithm = FedNest(**NEST, ell=ELL, terms=2, random_length=False)
    assert_nest(job_of(algorithm), fed_inn, fed_out)


@BOTH_RUNTIMES
def test_fednest_with_a_random_length_is_its_listing(runtime, rounds):
    job = job_of(FedNest(**NEST, ell=ELL, terms=4), seed=6)
    assert len(set(lengths(job, rounds))) > 1
    inverse = partial(nest_listings.random_ihgp, ell=ELL, terms=4)
    outer = partial(fed_out, inverse=inverse)
    assert_nest(job, fed_inn, outer, runtime, rounds)


def test_fednest_sgd_is_its_listing():
    algorithm = FedNestSGD(**NEST, ell=ELL, terms=2, random_length=False)
    assert_nest(job_of(algorithm), light_fed_inn, fed_out)


def test_lfednest_is_its_listing():
    job = job_of(LFedNest(Neumann(2, THETA), **NEST))
    assert_nest(job, light_fed_inn, light_fed_out)


def test_lfednest_svrg_is_its_listing():
    job = job_of(LFedNestSVRG(Neumann(2, THETA), **NEST))
    assert_nest(job, fed_inn, light_fed_out)


@pytest.mark.parametrize(
    ("radius", "alternating"), [(None, False), (0.4, False), (None, True)]
)
def test_fedbio_is_its_listing(radius, alternating):
    job = job_of(FedBiO(**STEPS, local_steps=P, radius=radius, alternating=alternating))
    samples = draw_phase(job, "local", ROUNDS * P, three_lines)
    listing = partial(
        auxiliary_listings.fedbio,
        X0,
        Y0,
        samples,
        p=P,
        **STEPS,
        alternating=alternating,
    )
    x, y, z = listing() if radius is None else listing(radius=radius)
    point = end_of(job).point
    assert_shared(point.x, x)
    assert_shared(point.y, y)
    assert_shared(point.z, z)
    # The ball holds z back: without it z would end elsewhere.
    assert radius is None or np.linalg.norm(listing()[2][0]) > 2 * radius


@ORDERS
def test_fedbioacc_is_its_listing(alternating):
    job = job_of(
        FedBiOAcc(
            DECAY, **OWN, tau=0.5, c_q=6.0, local_steps=P, alternating=alternating
        )
    )
    samples = draw_phase(job, "local", ROUNDS * P, three_lines)
    x, y, z, nu, omega, q = auxiliary_listings.fedbioacc(
        X0,
        Y0,
        samples,
        p=P,
        a=a,
        steps=(OWN["eta"], OWN["gamma"], 0.5),
        factors=(OWN["c_nu"], OWN["c_omega"], 6.0),
        alternating=alternating,
    )
    end = end_of(job)
    for block, values in (("x", x), ("y", y), ("z", z)):
        assert_shared(getattr(end.point, block), values)
    for block, values in (("x", nu), ("y", omega), ("z", q)):
        assert_shared(getattr(end.direction, block), values)


@BOTH_RUNTIMES
def test_fedbio_clientwise_is_its_listing(runtime, rounds):
    steps: dict[str, Any] = {"lr_x": 0.1, "lr_y": 0.2}
    job = job_of(FedBiOClientwise(Neumann(2, THETA), **steps, local_steps=P))
    samples = draw_phase(job, "local", rounds * P, bundle_and_zeta_of(job))
    x, y = single_loop_listings.fedbio_clientwise(
        X0, Y0, samples, p=P, **steps, theta=THETA
    )
    point = end_of(job, runtime, rounds).point
    assert_shared(point.x, x)
    assert_own(point.y, y)


def assert_own_storm(end, expected):
    x, y, nu, omega = expected
    assert_shared(end.point.x, x)
    assert_own(end.point.y, y)
    assert_shared(end.direction.x, nu)
    assert_own(end.direction.y, omega)


def test_fedbioacc_clientwise_is_its_listing():
    job = job_of(FedBiOAccClientwise(Neumann(2, THETA), DECAY, **OWN, local_steps=P))
    samples = draw_phase(job, "local", ROUNDS * P, bundle_and_zeta_of(job))
    listing = single_loop_listings.fedbioacc_clientwise
    expected = listing(X0, Y0, samples, p=P, a=a, **OWN, theta=THETA)
    assert_own_storm(end_of(job), expected)


def test_fedbioacc_local_is_its_listing():
    job = job_of(FedBiOAccLocal(Neumann(2, THETA), DECAY, **OWN, local_steps=P))
    samples = draw_phase(job, "local", ROUNDS * P, bundle_and_zeta_of(job))
    listing = single_loop_listings.fedbioacc_local
    expected = listing(X0, Y0, samples, p=P, a=a, **OWN, theta=THETA)
    assert_own_storm(end_of(job), expected)


def test_fedavg_is_its_listing():
    job = job_of(FedAvg(0.2, local_steps=P))
    samples = draw_phase(job, "local", ROUNDS * P, zeta)
    y = single_loop_listings.fedavg(X0, Y0, samples, p=P, lr=0.2)
    assert_shared(end_of(job).point.y, y)


@BOTH_RUNTIMES
def test_momentum_local_sgd_is_its_listing(runtime, rounds):
    job = job_of(MomentumLocalSGD(0.1, 0.6, local_steps=P))
    samples = draw_phase(job, "local", rounds * P, zeta)
    listing = single_loop_listings.momentum_local_sgd
    y, m = listing(X0, Y0, samples, p=P, lr=0.1, beta=0.6)
    end = end_of(job, runtime, rounds)
    assert_shared(end.point.y, y)
    assert_shared(end.direction.y, m)
