"""Methods that correct drift and absence repeat their listings, sample by sample.

Two of four clients take part, of different weight: whoever missed rounds has an old
control and no usable point, and the mean of all controls is not that of a cohort.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.algorithms import every_phase
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import ReferenceRuntime, SimulatorRuntime, execute, keys
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data
from tests.reference import auxiliary_listings as lines
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.bent_oracles import hypergradient, lower_gradient
from tests.reference.drift_listings import Walk, moving_average, storm
from tests.reference.replay_phases import (
    bundle_and_zeta_of,
    draw_phase,
    phase_number,
    three_lines,
)

ROUNDS, P, CLIENTS, COHORT, THETA, SEED = 7, 2, 4, 2, 0.3, 2
WEIGHTS = np.asarray([1.0, 2.0, 3.0, 2.5])
STEPS, GAMMA = (0.1, 0.2, 0.15), (0.07, 0.12, 0.09)
FOUNDING: dict[str, Any] = {"alpha": 3.0, "beta": 4.0, "rho1": 0.5, "rho2": 0.8}
STORM: dict[str, Any] = {"eta": 0.4, "gamma": 0.6, "tau": 0.5}
STORM |= {"c_nu": 4.0, "c_omega": 5.0, "c_q": 6.0}
DECAY, ETA = CubeRootDecay(0.5, 8.0), 0.1
THREE = [lines._nu, lines._omega, lines._q]
YZX = [(1,), (2,), (0,)]
TWO = [
    lambda w, bundle: hypergradient(w[0], w[1], bundle, THETA),
    lambda w, zeta: lower_gradient(w[0], w[1], zeta),
]


def decay(t):
    """Return the schedule of `DECAY`."""
    return 0.5 / np.cbrt(8 + t)


def fedbio(drift, **more):
    algorithm = FedBiO(*STEPS, local_steps=P, drift=drift, **more)
    order = YZX if more.get("alternating") else []
    return algorithm, Walk(THREE, P, lambda t: STEPS, drift=drift, order=order)


def fedbioacc(drift=None, absent="keep", **more):
    algorithm = FedBiOAcc(
        DECAY, **STORM, local_steps=P, drift=drift, absent=absent, **more
    )
    walk = Walk(
        THREE,
        P,
        lambda t: [s * decay(t) for s in (0.4, 0.6, 0.5)],
        lambda t: [c * decay(t - 1) ** 2 for c in (4, 5, 6)],
        storm,
        drift,
        absent,
        YZX if more.get("alternating") else [],
    )
    return algorithm, walk


def local_bsgm(drift):
    algorithm = LocalBSGM(
        Neumann(1, THETA), ETA, local_steps=P, drift=drift, **FOUNDING
    )
    steps, weights = (0.5 * ETA, 0.8 * ETA), (3 * ETA, 4 * ETA)
    walk = Walk(TWO, P, lambda t: steps, lambda t: weights, moving_average, drift)
    return algorithm, walk


def local_bsgvrm(drift=None, absent="keep"):
    both: dict[str, Any] = {"drift": drift, "absent": absent}
    algorithm = LocalBSGVRM(Neumann(1, THETA), DECAY, local_steps=P, **both, **FOUNDING)
    walk = Walk(
        TWO,
        P,
        lambda t: (0.5 * decay(t), 0.8 * decay(t)),
        lambda t: (3 * decay(t - 1) ** 2, 4 * decay(t - 1) ** 2),
        storm,
        **both,
    )
    return algorithm, walk


def simfbo(drift):
    algorithm = SimFBO(*STEPS, *GAMMA, local_steps=P, drift=drift)
    return algorithm, Walk(THREE, P, lambda t: STEPS, drift=drift, gamma=GAMMA)


SLOW = pytest.mark.slow
EVERY = {
    "fedbio-controls": partial(fedbio, "controls", alternating=True),
    "fedbio-anchor": partial(fedbio, "anchor"),
    "fedbioacc-controls": partial(fedbioacc, "controls", "keep"),
    "fedbioacc-controls-correct": partial(fedbioacc, "controls", "correct"),
    "fedbioacc-correct": partial(fedbioacc, None, "correct", alternating=True),
    "fedbioacc-forget": partial(fedbioacc, None, "forget"),
    "fedbioacc-anchor": partial(fedbioacc, "anchor"),
    "local-bsgm-controls": partial(local_bsgm, "controls"),
    "local-bsgm-anchor": partial(local_bsgm, "anchor"),
    "local-bsgvrm-controls-forget": partial(local_bsgvrm, "controls", "forget"),
    "local-bsgvrm-correct": partial(local_bsgvrm, None, "correct"),
    "local-bsgvrm-anchor": partial(local_bsgvrm, "anchor"),
    "simfbo-controls": partial(simfbo, "controls"),
    "simfbo-anchor": partial(simfbo, "anchor"),
}
FIRST = {
    "fedbio-controls",
    "fedbio-anchor",
    "fedbioacc-controls-correct",
}


def cohorts_of(job, phase):
    """Return who takes part in a phase, in every round."""
    number = phase_number(job, phase)
    drawn = (
        keys.draw_cohort(job.key, keys.ROUNDS, number, r, CLIENTS, COHORT)
        for r in range(ROUNDS)
    )
    return [[int(client) for client in cohort] for cohort in drawn]


def samples_of(job, phase):
    """Return [client][t] of what is drawn for x, y and maybe z."""
    if not hasattr(job.algorithm, "hypergradient"):
        drawn = draw_phase(job, phase, ROUNDS * P, three_lines)
        return [[(nu, omega, q) for omega, q, nu in one] for one in drawn]
    return draw_phase(job, phase, ROUNDS * P, bundle_and_zeta_of(job))


def anchors_of(job):
    """Return the clients of every round's anchor, each with its samples."""
    if "anchor" not in [phase.name for phase in every_phase(job.algorithm.phases())]:
        return []
    drawn, cohorts = samples_of(job, "anchor"), cohorts_of(job, "anchor")
    return [
        [(k, drawn[k][r * P : (r + 1) * P]) for k in cohort]
        for r, cohort in enumerate(cohorts)
    ]


def weighted_job(algorithm):
    data = replace(quadratic_data(CLIENTS), weights=jnp.asarray(WEIGHTS))
    return bent_job(algorithm, data, seed=SEED, participants=COHORT)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FIRST else SLOW) for n in EVERY]
)
def test_a_corrected_method_is_its_listing(name):
    algorithm, walk = EVERY[name]()
    job = weighted_job(algorithm)
    start = [X0, Y0, np.zeros_like(Y0)][: len(walk.lines)]
    drawn = (samples_of(job, "local"), cohorts_of(job, "local"))
    shares = WEIGHTS / WEIGHTS.sum()
    w, d, c, own = walk.run(start, *drawn, shares, anchors_of(job))
    state = execute(SimulatorRuntime(job), ROUNDS, measure_every=ROUNDS).state
    server, memory = state.server, state.clients.memory
    assert_close(server.point, w)
    if server.direction is not None:
        assert_close(server.direction, d)
    drift = algorithm.settings().get("drift")
    if drift is not None:
        assert_close(server.shared[0], c)
    if drift == "controls":
        assert_close(memory.own[0], [np.stack(one) for one in zip(*own, strict=True)])


def assert_close(blocks, expected):
    for actual, one in zip(vars(blocks).values(), expected, strict=True):
        np.testing.assert_allclose(actual, one, rtol=0, atol=1e-10)


@SLOW
def test_the_slow_runtime_weighs_alike():
    job = weighted_job(simfbo("controls")[0])
    fast, slow = (execute(one(job), 2) for one in (SimulatorRuntime, ReferenceRuntime))
    both = zip(jax.tree.leaves(fast.state), jax.tree.leaves(slow.state), strict=True)
    for left, right in both:
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-12)
