"""Every degenerate case of the methods of one machine, over random numbers.

Shapes stay fixed within a test, so that hypothesis varies inputs of one program.
"""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import tasks
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.one_machine.amigo import AmIGO
from fedbilevel.algorithms.one_machine.asbio_bred import ASBiOBreD
from fedbilevel.algorithms.one_machine.biadam import BiAdam
from fedbilevel.algorithms.one_machine.bio_bred import BiOBreD
from fedbilevel.algorithms.one_machine.fsla import FSLA
from fedbilevel.algorithms.one_machine.ma_soba import MASOBA
from fedbilevel.algorithms.one_machine.s_tfbo import STFBO
from fedbilevel.algorithms.one_machine.saba import SABA
from fedbilevel.algorithms.one_machine.sbio_bred import SBiOBreD
from fedbilevel.algorithms.one_machine.soba import SOBA
from fedbilevel.algorithms.one_machine.spaba import SPABA
from fedbilevel.algorithms.one_machine.srba import SRBA
from fedbilevel.algorithms.one_machine.stocbio import StocBiO
from fedbilevel.algorithms.presets import (
    ALSET,
    MRBO,
    RSVRB,
    SRMBA,
    SVRB,
    TTSA,
    VRBiAdam,
)
from fedbilevel.hypergradient import Neumann, RandomNeumann, Unrolled
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from tests.cases import quadratic_data
from tests.reference.bent_job import bent_job

few = settings(max_examples=3)
seeds = st.integers(0, 2**31 - 1)
small = st.floats(0.01, 0.2)
CLIENTS, ROUNDS = 3, 6


def point_of(algorithm, data, seed=0, rounds=ROUNDS, batch: int | None = 1):
    job = bent_job(algorithm, data, seed=seed, batch=batch)
    state = execute(SimulatorRuntime(job), rounds, measure_every=rounds).state
    return algorithm.point(state.server)


def assert_same(left, right, tolerance=1e-12):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_an_average_that_forgets_all_is_soba(seed, lr):
    data, steps = quadratic_data(CLIENTS), (lr, 2 * lr, lr)
    assert_same(
        point_of(MASOBA(*steps, 1.0), data, seed), point_of(SOBA(*steps), data, seed)
    )


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_recursions_with_nothing_but_single_batches_are_soba(seed, lr):
    """The period 1, and the probability 1; both draw by the keys of the phase 0."""
    data, steps = quadratic_data(CLIENTS), (lr, 2 * lr, lr)
    plain = point_of(SOBA(*steps), data, seed)
    period = SRBA(*steps, period=1, large_batch=1)
    coin = SPABA(*steps, 1.0, large_batch=1, longest=4)
    assert_same(point_of(period, data, seed), plain)
    assert_same(point_of(coin, data, seed), plain)


@pytest.mark.slow
@few
@given(lr=small)
def test_without_noise_all_of_the_family_are_soba(lr):
    data, steps = quadratic_data(CLIENTS, noise=0.0), (lr, 2 * lr, lr)
    plain = point_of(SOBA(*steps, local_steps=4), data, rounds=3)
    for other in (
        SRBA(*steps, period=4, large_batch=1),
        SABA(*steps, parts=1, local_steps=4),
    ):
        assert_same(point_of(other, data, rounds=3), plain)


@pytest.mark.slow
@few
@given(seed=seeds, eta=small, weight=st.floats(0.5, 4.0))
def test_srmba_on_clients_is_fedbioacc(seed, eta, weight):
    data = quadratic_data(CLIENTS)
    letters: dict[str, Any] = {"a": 0.4, "eta": eta, "gamma": 0.3, "tau": 0.2}
    letters |= {"c_nu": weight, "c_omega": weight, "c_q": weight, "local_steps": 2}
    one, other = SRMBA(**letters), FedBiOAcc(**letters)
    assert_same(point_of(one, data, seed), point_of(other, data, seed))


RULE = Neumann(2, 0.25)
LETTERS: dict[str, Any] = {"rho1": 0.1, "rho2": 0.2}
FROZEN: dict[str, Any] = {"tau": 1.0, "start": 1.0, "small": 0.0}


@pytest.mark.slow
@few
@given(seed=seeds, weight=st.floats(0.05, 0.95))
def test_adaptive_steps_of_frozen_moments_are_momentum(seed, weight):
    """With second moments at 1 BiAdam is LocalBSGM, VR-BiAdam LocalBSGVRM, at p = 1."""
    data = quadratic_data(CLIENTS)
    steps: dict[str, Any] = {"hypergradient": RULE, "lr_x": 0.1, "lr_y": 0.2}
    weights: dict[str, Any] = {"alpha": weight, "beta": 0.4}
    letters: dict[str, Any] = {"hypergradient": RULE, "eta": 1.0, **LETTERS, **weights}
    for adaptive, momentum in ((BiAdam, LocalBSGM), (VRBiAdam, LocalBSGVRM)):
        one: Any = adaptive(**steps, **weights, **FROZEN)
        other = momentum(**letters, local_steps=1)
        assert_same(point_of(one, data, seed), point_of(other, data, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_the_paper_form_of_frozen_moments_is_momentum_too(seed, lr):
    data = quadratic_data(CLIENTS)
    shared: dict[str, Any] = {"alpha": 0.3, "beta": 0.4}
    one = BiAdam(RULE, lr, 0.2, **shared, **FROZEN, form="paper")
    other = LocalBSGM(RULE, 1.0, rho1=lr, rho2=0.2, **shared, local_steps=1)
    assert_same(point_of(one, data, seed), point_of(other, data, seed))


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_mirror_steps_of_squares_without_a_norm_are_gradient_steps(seed, lr):
    data = quadratic_data(CLIENTS)
    mirror = point_of(SBiOBreD(RULE, lr, 0.2), data, seed)
    plain = LocalBSGM(RULE, 1.0, 1.0, 1.0, lr, 0.2, local_steps=1)
    assert_same(mirror, point_of(plain, data, seed))
    often = ASBiOBreD(RULE, lr, 0.2, period=1, large_batch=1)
    assert_same(point_of(often, data, seed), mirror)


@pytest.mark.slow
@few
@given(lr=small)
def test_unrolled_mirror_steps_are_gradient_steps_of_the_unrolled_rule(lr):
    """Without noise and without a norm: stocBiO with ITD, from where y stood."""
    data = quadratic_data(1, noise=0.0)
    one = BiOBreD(lr, 0.2, inner_steps=3)
    other = StocBiO(Unrolled(3, 0.2), lr, 0.2, inner_steps=3, upper_first=True)
    ends = [point_of(kind, data, batch=None, rounds=1) for kind in (one, other)]
    # In one step both have the same u; stocBiO then moves y at the new x.
    np.testing.assert_allclose(ends[0].x, ends[1].x, rtol=0, atol=1e-12)


@pytest.mark.slow
@few
@given(seed=seeds, weight=st.floats(0.5, 4.0))
def test_one_block_is_svrb_and_one_client_mrbo(seed, weight):
    letters: dict[str, Any] = {"alpha": weight, "beta": 2.0, **LETTERS, "eta": 0.4}
    blocks = RSVRB(hypergradient=RULE, **letters, local_steps=1)
    one = SVRB(hypergradient=RULE, **letters, local_steps=1)
    mrbo = MRBO(RULE, 0.4, weight, 2.0, 0.1, 0.2, local_steps=1)
    data = quadratic_data(1)
    ends = []
    for algorithm in (blocks, one, mrbo):
        job = bent_job(algorithm, data, seed=seed)
        state = execute(SimulatorRuntime(job), ROUNDS, measure_every=ROUNDS).state
        point = algorithm.point(state.joined())
        ends.append([np.ravel(leaf) for leaf in jax.tree.leaves(point)])
    assert_same(ends[0], ends[1])
    assert_same(ends[1], ends[2])


@pytest.mark.slow
@few
@given(lr=small, alpha=st.floats(0.1, 1.0))
def test_without_noise_methods_in_turn_are_fedbio_in_turn(lr, alpha):
    # With one client: FedBiO's walk through y, z and x before they are averaged.
    data, steps = quadratic_data(1, noise=0.0), (lr, 2 * lr, lr)
    plain = point_of(FedBiO(*steps, local_steps=1, alternating=True), data)
    assert_same(point_of(FSLA(*steps, alpha), data), plain)
    assert_same(point_of(AmIGO(*steps, inner_steps=1, system_steps=1), data), plain)


@pytest.mark.slow
@few
@given(seed=seeds, lr=small)
def test_one_lower_step_makes_alset_ttsa(seed, lr):
    shared: dict[str, Any] = {"lr_x": lr, "lr_y": 0.2}
    rule, data = RandomNeumann(3, 0.25), quadratic_data(CLIENTS)
    single = point_of(ALSET(hypergradient=rule, inner_steps=1, **shared), data, seed)
    assert_same(single, point_of(TTSA(hypergradient=rule, **shared), data, seed))


def two_client_end(algorithm, rounds):
    """Return x after a run on the two clients of T2, whose rows stay apart."""
    task = tasks.find("two-client")()
    job = Job.of(
        algorithm, task.problem, task.data, task.x, task.y, sampling=Sampling(None)
    )
    state = execute(SimulatorRuntime(job), rounds, measure_every=rounds).state
    return float(algorithm.point(state.server).x[0])


T2 = (0.5, 0.3, 0.3)
SAFE = {
    "soba": (SOBA(*T2, local_steps=10), 30),
    "ma-soba": (MASOBA(*T2, 0.9, local_steps=10), 30),
    "saba": (SABA(*T2, parts=1, local_steps=10), 30),
    "srba": (SRBA(*T2, period=10, large_batch=1), 30),
    "spaba": (SPABA(*T2, 0.2, large_batch=1, longest=10), 90),
    "fsla": (FSLA(*T2, 0.9, local_steps=10), 30),
    "amigo": (AmIGO(*T2, local_steps=10), 30),
    "s-tfbo": (STFBO(local_steps=1000), 20),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAFE)
def test_two_clients_that_differ_end_where_one_machine_would(name):
    """T2 without noise, every step averaged: x = 1 for all that keep a z."""
    algorithm, rounds = SAFE[name]
    assert abs(two_client_end(algorithm, rounds) - 1) < 1e-6
