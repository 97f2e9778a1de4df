"""Where the baselines become one another, or a classic, over random numbers.

Shapes stay fixed within a test, so that hypothesis varies inputs of one program.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import algorithms
from fedbilevel._blocks import NOTHING
from fedbilevel._types import Pair
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbio_clientwise import FedBiOClientwise
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.fedbioacc_clientwise import FedBiOAccClientwise
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.algorithms.nested.lfednest import LFedNest
from fedbilevel.algorithms.presets import FedBiOAccLocal, FedNestSGD, Pooled
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.algorithms.single_level.momentum_local_sgd import MomentumLocalSGD
from fedbilevel.experiments.options import algorithm_from
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import Job, SimulatorRuntime, execute
from fedbilevel.schedules import CubeRootDecay
from tests.cases import quadratic_data, quadratic_job
from tests.reference.auxiliary_listings import soba
from tests.reference.bent_job import X0, Y0, bent_job, only_rows
from tests.reference.bent_oracles import (
    cross_product,
    hessian_product,
    lower_gradient,
    upper_gradients,
)
from tests.reference.nest_listings import double_loop
from tests.reference.replay_nest import draw_rounds
from tests.reference.replay_phases import draw_phase, three_lines

few = settings(max_examples=3)
seeds = st.integers(0, 2**31 - 1)
data_seeds = st.integers(0, 1000)
small = st.floats(0.01, 0.2)
weights = st.floats(0.05, 0.9)
curvatures = st.floats(3.5, 6.0)
T_IN, FACTORS, RULE = 2, 3, Neumann(2, 0.3)


def last_state(job: Job, rounds: int) -> Any:
    """Return the server's state, with all clients' own blocks, after some rounds."""
    outcome = execute(SimulatorRuntime(job), rounds, measure_every=rounds)
    return outcome.state.joined()


def assert_close(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-12)


def assert_identical(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(left, right)


def one_step_nest(alpha, beta) -> dict[str, Any]:
    return {"alpha": alpha, "beta": beta, "inner_rounds": T_IN, "local_steps": 1}


def whole_series(x, y, fy, hessians, ell):
    """Return the sum over the factors, each the mean of the Hessians it is given."""
    r, s = fy, fy
    for rows in hessians:
        products = [hessian_product(x, y, r, zeta) for zeta in rows]
        r = r - np.mean(products, axis=0) / ell
        s = s + r
    return s / ell


def aggregated_steps(data, rounds, alpha, beta, ell):
    """Return (x, y) of single steps along clients' means, on noise-free clients."""
    uppers, lowers = zip(*only_rows(data), strict=True)
    x, y = X0, Y0
    for _ in range(rounds):
        for _ in range(T_IN):
            slopes = [lower_gradient(x, y, zeta) for zeta in lowers]
            y = y - beta * np.mean(slopes, axis=0)
        slopes = [upper_gradients(x, y, xi) for xi in uppers]
        fx, fy = (np.mean(level, axis=0) for level in zip(*slopes, strict=True))
        z = whole_series(x, y, fy, [lowers] * FACTORS, ell)
        crossed = [cross_product(x, y, z, zeta) for zeta in lowers]
        x = x - alpha * (fx - np.mean(crossed, axis=0))
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedNest, FedNestSGD])
@few
@given(data_seed=data_seeds, alpha=small, beta=small, ell=curvatures)
def test_one_local_step_is_one_aggregated_step(kind, data_seed, alpha, beta, ell):
    data = quadratic_data(3, noise=0.0, seed=data_seed)
    series = {"ell": ell, "terms": FACTORS, "random_length": False}
    job = bent_job(kind(**one_step_nest(alpha, beta), **series), data)
    expected = Pair(*aggregated_steps(data, 4, alpha, beta, ell))
    assert_close(last_state(job, 4).point, expected)


@pytest.mark.slow
@few
@given(data_seed=data_seeds, alpha=small, beta=small, ell=curvatures)
def test_alike_clients_need_no_federated_series(data_seed, alpha, beta, ell):
    data = quadratic_data(3, noise=0.0, alike=True, seed=data_seed)
    letters = one_step_nest(alpha, beta)
    federated = FedNest(**letters, ell=ell, terms=FACTORS, random_length=False)
    light = LFedNest(Neumann(FACTORS, 1 / ell), **letters)
    ends = [last_state(bent_job(kind, data), 4).point for kind in (federated, light)]
    assert_close(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("terms", [FACTORS, 1])
@few
@given(seed=seeds, alpha=small, beta=small, ell=curvatures)
def test_fednest_of_one_client_is_the_double_loop(terms, seed, alpha, beta, ell):
    # A random length below 1 is none: then z = fy / ell.
    random = terms == 1
    algorithm = FedNest(
        **one_step_nest(alpha, beta), ell=ell, terms=terms, random_length=random
    )
    job = bent_job(algorithm, quadratic_data(1), seed=seed)

    def inverse(x, y, fy, zetas):
        assert len(zetas) == (0 if random else terms)
        return fy / ell if random else whole_series(x, y, fy, zetas, ell)

    # The steps' own samples cancel, so the anchors' are those of the classic.
    rounds = [
        ([clients[0][0] for clients in inner], (first[0], factors), anchors[0])
        for inner, (first, factors, anchors, _) in draw_rounds(job, 4)
    ]
    expected = double_loop(X0, Y0, rounds, alpha=alpha, beta=beta, inverse=inverse)
    assert_close(last_state(job, 4).point, Pair(*expected))


@pytest.mark.slow
@few
@given(seed=seeds, lr_x=small, lr_y=small, lr_z=small)
def test_fedbio_of_one_client_is_soba_whatever_the_period(seed, lr_x, lr_y, lr_z):
    data, ends, samples = quadratic_data(1), [], []
    for p in (1, 3):
        job = bent_job(FedBiO(lr_x, lr_y, lr_z, local_steps=p), data, seed=seed)
        ends.append(last_state(job, 12 // p))
        samples.append(draw_phase(job, "local", 12, three_lines)[0])
    # Two programs of the same sums: a processor may fuse products into some of them.
    for left, right in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-14, atol=1e-14)
    x, y, v = soba(X0, Y0, samples[0], lr_x=lr_x, lr_y=lr_y, lr_v=lr_z)
    point = ends[0].point
    assert_close((point.x, point.y, point.z), (x, y, -v))


@pytest.mark.slow
@few
@given(seed=seeds, lr_x=small, lr_y=small, lr_z=small)
def test_fedbioacc_without_memory_is_fedbio(seed, lr_x, lr_y, lr_z):
    ones: dict[str, Any] = {"c_nu": 1.0, "c_omega": 1.0, "c_q": 1.0}
    storm = FedBiOAcc(1.0, lr_x, lr_y, lr_z, **ones, local_steps=3)
    plain = FedBiO(lr_x, lr_y, lr_z, local_steps=3)
    ends = [
        last_state(bent_job(kind, quadratic_data(3), seed=seed), 4).point
        for kind in (storm, plain)
    ]
    assert_close(*ends)


def storm_letters(kind, upper, lower, weight) -> dict[str, Any]:
    """Return steps and weights under the names of a method."""
    if kind is LocalBSGVRM:
        names = ("eta", "rho1", "rho2", "alpha", "beta")
    else:
        names = ("a", "eta", "gamma", "c_nu", "c_omega")
    values = (CubeRootDecay(2.0, 8.0), upper, lower, weight, 0.7 * weight)
    return dict(zip(names, values, strict=True))


@pytest.mark.slow
@few
@given(seed=seeds, upper=small, lower=small, weight=weights)
def test_own_storm_of_one_client_is_local_bsgvrm(seed, upper, lower, weight):
    ends = []
    for kind in (LocalBSGVRM, FedBiOAccLocal, FedBiOAccClientwise):
        letters = storm_letters(kind, upper, lower, weight)
        job = bent_job(
            kind(RULE, **letters, local_steps=3), quadratic_data(1), seed=seed
        )
        # Blocks of its own are stacked over the one client.
        ends.append(jax.tree.map(np.squeeze, last_state(job, 4)))
    assert_close(ends[1], ends[0])
    assert_close(ends[2], ends[0])


@pytest.mark.slow
@few
@given(seed=seeds, upper=small, lower=small, weight=weights)
def test_period_one_averages_alike_before_and_after_the_move(
    seed, upper, lower, weight
):
    ends = []
    for kind in (FedBiOAccLocal, FedBiOAccClientwise):
        letters = storm_letters(kind, upper, lower, weight)
        job = bent_job(
            kind(RULE, **letters, local_steps=1), quadratic_data(3), seed=seed
        )
        ends.append(last_state(job, 8))
    assert_close(*ends)


@pytest.mark.slow
@few
@given(seed=seeds, upper=small, lower=small, weight=weights)
def test_local_bsgvrm_with_a_private_level_is_fedbioacc_local(
    seed, upper, lower, weight
):
    ends = []
    for kind in (LocalBSGVRM, FedBiOAccLocal):
        algorithm = kind(
            RULE, **storm_letters(kind, upper, lower, weight), local_steps=3
        )
        private = Pair(False, True) if kind is LocalBSGVRM else NOTHING
        job = bent_job(algorithm, quadratic_data(3), seed=seed, private=private)
        ends.append(last_state(job, 4))
    assert_close(*ends)
    assert ends[0].point.y.shape == (3, *Y0.shape)


@pytest.mark.slow
@few
@given(data_seed=data_seeds, upper=small, lower=small)
def test_alike_clients_need_not_share_their_lower_level(data_seed, upper, lower):
    data = quadratic_data(3, noise=0.0, alike=True, seed=data_seed)
    own = FedBiOClientwise(RULE, upper, lower, local_steps=3, alternating=False)
    shared = LocalBSGM(RULE, 1.0, 1.0, 1.0, upper, lower, local_steps=3)
    ends = [last_state(bent_job(kind, data), 4).point for kind in (own, shared)]
    assert_close(ends[0].x, ends[1].x)
    assert_close(ends[0].y, np.stack([ends[1].y] * 3))


@few
@given(seed=seeds, lr=small)
def test_momentum_local_sgd_without_momentum_is_fedavg(seed, lr):
    kinds = (MomentumLocalSGD(lr, 0.0, local_steps=3), FedAvg(lr, local_steps=3))
    ends = [
        last_state(bent_job(kind, quadratic_data(3), seed=seed), 4).point
        for kind in kinds
    ]
    assert_close(*ends)
    for end in ends:
        assert_identical(end.x, X0)


@pytest.mark.slow
@few
@given(data_seed=data_seeds, lr=small)
def test_fedavg_of_period_one_is_descent_on_the_mean(data_seed, lr):
    data = quadratic_data(3, noise=0.0, seed=data_seed)
    y = Y0
    for _ in range(6):
        slopes = [lower_gradient(X0, y, zeta) for _, zeta in only_rows(data)]
        y = y - lr * np.mean(slopes, axis=0)
    job = bent_job(FedAvg(lr, local_steps=1), data)
    assert_close(last_state(job, 6).point, Pair(X0, y))


def auxiliary_storm(kind, upper, lower, weight, p):
    letters = storm_letters(kind, upper, lower, weight)
    return kind(**letters, tau=1.2 * lower, c_q=0.8 * weight, local_steps=p)


@pytest.mark.slow
@few
@given(data_seed=data_seeds, upper=small, lower=small, weight=weights)
def test_alike_clients_pooled_are_one_of_them(data_seed, upper, lower, weight):
    ends = []
    for kind, clients in ((Pooled, 3), (FedBiOAcc, 1)):
        data = quadratic_data(clients, noise=0.0, alike=True, seed=data_seed)
        algorithm = auxiliary_storm(kind, upper, lower, weight, 3)
        held = data.pooled() if kind is Pooled else data
        ends.append(last_state(bent_job(algorithm, held), 4))
    assert_close(*ends)


@pytest.mark.slow
@few
@given(data_seed=data_seeds, upper=small, lower=small, weight=weights)
def test_period_one_over_all_rows_is_as_good_as_pooled(data_seed, upper, lower, weight):
    # Clients of 3, 4 and 5 rows: pooling must not let the largest count for more.
    data = quadratic_data(3, seed=data_seed)
    ends = []
    for kind, p in ((Pooled, 4), (FedBiOAcc, 1)):
        algorithm = auxiliary_storm(kind, upper, lower, weight, p)
        held = data.pooled() if kind is Pooled else data
        ends.append(last_state(bent_job(algorithm, held, batch=None), 8 // p))
    assert_close(*ends)


@pytest.mark.slow
def test_levels_may_have_numbers_of_steps_of_their_own():
    """One part of x beside three of y is one step along the anchored hypergradient."""
    letters = {"alpha": 0.2, "beta": 0.3, "ell": 9.0, "terms": 2, "inner_rounds": 1}
    data = quadratic_data(3, noise=0.0)

    def end(**more: Any) -> Any:
        job = quadratic_job(FedNest(**letters, local_steps=3, **more), data)
        return job.x, execute(SimulatorRuntime(job), 1, measure_every=1).state.server

    (_, usual), (_, same), (x, one) = end(), end(upper_steps=3), end(upper_steps=1)
    assert eqx.tree_equal(usual, same)
    np.testing.assert_array_equal(one.point.y, usual.point.y)
    np.testing.assert_allclose(one.point.x, x - 0.2 * one.h, rtol=0, atol=1e-14)
    assert np.abs(one.point.x - usual.point.x).max() > 1e-6
    entry = algorithms.find("fednest")
    given = {"upper_step": "0.1", "lower_step": "0.1", "theta": "0.1", "q": "2"}
    made: Any = algorithm_from(entry, {**given, "upper_steps": "1"}, 3, 25)
    np.testing.assert_allclose((made.alpha, made.beta), (0.1, 2.5))
