"""What is known of methods without a Hessian: limits, degenerate cases, refusals."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import OfCurvature, OfDistance, SteadySteps, algorithms
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.penalty._copies import _SCHEMES
from fedbilevel.algorithms.penalty.f2sa_p import F2SAP
from fedbilevel.algorithms.penalty.f3sa import F3SA
from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA
from fedbilevel.algorithms.penalty.pbgd_free import PBGDFree
from fedbilevel.algorithms.penalty.v_pbgd import VPBGD
from fedbilevel.algorithms.presets import F2BA, F2SA
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.options import algorithm_from
from fedbilevel.problem import ClientData, Problem, opposed_curvatures
from fedbilevel.problem.curvature import _few
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from tests.cases import ROWWISE, quadratic_data
from tests.reference.bent_job import bent_job
from tests.test_known_answers import two_client_job

few = settings(max_examples=3)
seeds = st.integers(0, 2**31 - 1)
small = st.floats(0.01, 0.2)
SLOW = pytest.mark.slow
CLIENTS, ROUNDS = 3, 6


def end_of(job, rounds=ROUNDS):
    state = execute(SimulatorRuntime(job), rounds, measure_every=rounds).state
    return job.algorithm.point(state.server)


def assert_same(ends, tolerance=1e-12):
    left, right = ends
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


# The limits on the task two-client, by the degree of the difference and nu.
LIMITS = {
    (1, 0.1): 0.975610,
    (1, 0.01): 0.997506,
    (2, 0.1): 1.001252,
    (2, 0.01): 1.000013,
    (3, 0.1): 1.000114,
    (3, 0.01): 1.000000,
    (4, 0.1): 0.999987,
    (4, 0.01): 1.000000,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "nu"),
    [pytest.param(*one, marks=SLOW if one[0] > 2 else ()) for one in LIMITS],
)
def test_two_clients_end_a_power_of_nu_from_the_solution(degree, nu):
    """T2, p = 1: to all printed digits."""
    job = two_client_job(FedF2SA(0.5, 0.3, nu, local_steps=1, degree=degree))
    np.testing.assert_allclose(end_of(job, 500).x, LIMITS[degree, nu], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (VPBGD(0.5, 0.3, 0.3, 10.0, local_steps=50), 0.975610),
        *(
            pytest.param(*one, marks=SLOW)
            for one in (
                (F2SA(0.5, 0.3, 0.01, local_steps=5), 0.997506),
                (VPBGD(0.5, 0.3, 0.3, 1.0, local_steps=50), 0.8),
                (VPBGD(0.5, 0.3, 0.3, 100.0, local_steps=200), 0.997506),
                (F2BA(0.5, 0.3, 0.1, inner_steps=60, local_steps=5), 0.975610),
                (F3SA(0.5, 0.3, 0.9, 0.9, 0.1, local_steps=50), 0.975610),
                (F2SAP(0.5, 0.3, 0.1, degree=2, local_steps=5), 1.001252),
                (F2SAP(0.5, 0.3, 0.1, degree=3, local_steps=5), 1.000114),
                (F2SAP(0.5, 0.3, 0.1, degree=4, local_steps=5), 0.999987),
            )
        ),
    ],
    ids=lambda one: type(one).__name__ if hasattr(one, "phases") else str(one),
)
def test_methods_of_one_machine_end_there_too(algorithm, expected):
    """T2 on two clients, whose slopes are averaged at every step."""
    found = end_of(two_client_job(algorithm), 60)
    np.testing.assert_allclose(found.x, expected, atol=1e-6)


@SLOW
@pytest.mark.parametrize(
    ("degree", "nu", "long", "short"),
    [
        (1, 0.1, 0.97264, 0.97558),
        (1, 0.01, 0.99448, 0.99747),
        (2, 0.1, 0.998279, 1.001223),
        (2, 0.01, 0.996985, 0.999979),
    ],
)
def test_ten_local_steps_drift_as_far_as_they_are_long(degree, nu, long, short):
    chosen: dict[str, Any] = {"local_steps": 10, "degree": degree}
    for scale, expected, rounds in ((1.0, long, 4000), (0.1, short, 40000)):
        algorithm = FedF2SA(0.002 * scale, 0.02 * scale, nu, **chosen)
        found = end_of(two_client_job(algorithm), rounds).x
        np.testing.assert_allclose(found, expected, atol=6e-6)


@SLOW
@pytest.mark.parametrize("drift", ["controls", "anchor"])
def test_corrected_steps_do_not_drift(drift):
    algorithm = FedF2SA(0.02, 0.02, 0.1, local_steps=10, degree=2, drift=drift)
    np.testing.assert_allclose(
        end_of(two_client_job(algorithm), 1500).x, LIMITS[2, 0.1], atol=1e-6
    )


@pytest.mark.slow
def test_pbgd_free_answers_another_question():
    """T2 from x = 1, which is right: x goes to 0, as fx = x/4 alone says."""
    job = two_client_job(PBGDFree(0.5, 0.3, flat="yes"))
    there = replace(job, x=jnp.ones(1), y=jnp.full(1, 0.5))
    np.testing.assert_allclose(end_of(there, 200).x, 0, atol=1e-6)


def test_pbgd_free_must_be_asked_for():
    with pytest.raises(InvalidInputError, match=r"along fx alone.*--set flat=yes"):
        PBGDFree(0.5, 0.3)
    entry, steps = algorithms.find("pbgd-free"), {"upper_step": "1", "lower_step": "1"}
    with pytest.raises(InvalidInputError, match="unless the problem is flat"):
        algorithm_from(entry, steps, 2, 1)
    assert algorithm_from(entry, {**steps, "flat": "yes"}, 2, 1)
    with pytest.raises(InvalidInputError, match="flat 'no'"):
        algorithm_from(entry, {**steps, "flat": "no"}, 2, 1)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_weights_are_those_of_a_difference(degree):
    """Of powers of s all but s have the slope 0 at 0, and all but 1 the value 0."""
    scheme = _SCHEMES[degree - 1]
    assert scheme.degree == degree
    j = np.asarray(scheme.offsets, float)
    for m in range(degree + 1):
        slope, value = np.dot(scheme.weights, j**m), np.dot(scheme.at_zero, j**m)
        np.testing.assert_allclose(slope, m == 1, atol=1e-15)
        # With y_0 among the copies, and without, up to the degree less one.
        if m < degree:
            np.testing.assert_allclose(value, m == 0, atol=1e-15)


def _only_x(x, y, rows):
    """Depend on y by nothing that has a slope."""
    return ROWWISE.upper(x, jax.lax.stop_gradient(y), rows)


@pytest.mark.slow
@few
@given(seed=seeds, lr=small, nu=st.floats(0.01, 0.5))
def test_where_f_does_not_depend_on_y_h_is_fx(seed, lr, nu):
    data, problem = quadratic_data(CLIENTS), Problem(_only_x, ROWWISE.lower)
    algorithm = FedF2SA(lr, 0.2, nu, local_steps=2)
    start = (jnp.arange(1.0, 3.0), -jnp.arange(1.0, 4.0))
    job = Job.of(algorithm, problem, data, *start, seed=seed, sampling=Sampling(None))
    # fx = r x + c with r = 0.5 and c = 0: x shrinks by 1 - lr/2 in every step.
    found = end_of(job).x
    np.testing.assert_allclose(found, (1 - lr / 2) ** (2 * ROUNDS) * start[0])


@SLOW
@few
@given(seed=seeds, lr=small, nu=st.floats(0.01, 0.5))
def test_f3sa_that_forgets_all_is_f2sa(seed, lr, nu):
    data = quadratic_data(CLIENTS)
    momentum = F3SA(lr, 0.2, 1.0, 1.0, nu, local_steps=2)
    plain = F2SA(lr, 0.2, nu, inner_steps=1, local_steps=2)
    ends = [end_of(bent_job(one, data, seed=seed)) for one in (momentum, plain)]
    assert_same(ends)


@pytest.mark.slow
@few
@given(lr=small, nu=st.floats(0.01, 0.3), seed=st.integers(0, 3))
def test_one_client_and_step_is_f2sa(lr, nu, seed):
    """K = p = 1 in alternating order, T_in = 1, without noise."""
    data = quadratic_data(1, noise=0.0, seed=seed)
    one = FedF2SA(lr, 0.2, nu, local_steps=1, alternating=True)
    other = F2SA(lr, 0.2, nu, inner_steps=1)
    assert_same([end_of(bent_job(kind, data)) for kind in (one, other)])


@SLOW
@few
@given(lr=small, nu=st.floats(0.01, 0.05), seed=st.integers(0, 3))
def test_controls_of_clients_that_are_alike_change_nothing(lr, nu, seed):
    data = quadratic_data(3, noise=0.0, alike=True, seed=seed)
    plain = FedF2SA(lr, 0.2, nu, local_steps=4, degree=2)
    ends = [
        end_of(bent_job(one, data)) for one in (plain, replace(plain, drift="controls"))
    ]
    assert_same(ends)


@SLOW
@few
@given(lr=small, seed=st.integers(0, 3))
def test_a_small_nu_is_fedbio(lr, seed):
    """As nu -> 0, (y_l - y_s)/nu is -z of FedBiO, which starts at 0, too."""
    data = quadratic_data(3, noise=0.0, seed=seed)
    nu = 1e-5
    penalty = FedF2SA(lr, 0.2, nu, local_steps=3, degree=2)
    ends = [
        end_of(bent_job(one, data))
        for one in (penalty, FedBiO(lr, 0.2, 0.2, local_steps=3))
    ]
    assert_same(ends, 1e-6)


@pytest.mark.parametrize(
    ("nu", "degree", "largest"), [(2.1, 2, "2"), (1.1, 4, "1"), (2.1, 3, "2")]
)
def test_a_nu_that_leaves_no_minimum_is_refused(nu, degree, largest):
    """T2: f curves by 1 and g by 2, in the mean over the clients."""
    algorithm = FedF2SA(0.5, 0.3, nu, local_steps=1, degree=degree)
    told = rf"nu={nu}, degree={degree}.*L_f = 1 where g curves by 2 only. Use nu below "
    with pytest.raises(
        InvalidInputError, match=rf"{told}{largest}, or degree 1 \(fed-"
    ):
        two_client_job(algorithm)
    two_client_job(replace(algorithm, nu=jnp.asarray(0.9 * float(largest))))
    two_client_job(replace(algorithm, degree=1))


@pytest.mark.parametrize(
    ("bend", "outcome"),
    [
        (-0.02, pytest.raises(InvalidInputError, match="by -0.0.* Use degree 1")),
        (-0.3, nullcontext()),
    ],
)
def test_nu_is_not_judged_by_a_lower_level_that_is_no_valley(bend, outcome):
    """Two wells: g curves by `bend` at y = 0, and f by 1, of which nu takes 0.1."""

    def upper(x, y, rows):
        return jnp.mean(rows) * jnp.sum((y - x) ** 2) / 2

    def lower(x, y, rows):
        return jnp.mean(rows) * jnp.sum(bend * y**2 / 2 + y**4 / 4) + jnp.sum(x * y)

    data = ClientData.from_clients([np.ones(3)] * 2, [np.ones(3)] * 2)
    algorithm = FedF2SA(0.1, 0.1, 0.1, local_steps=1, degree=2)
    with outcome:
        Job.of(algorithm, Problem(upper, lower), data, jnp.zeros(2), jnp.zeros(2))


def test_nu_is_weighed_where_a_run_measures_steps_too():
    steps = (OfDistance(1.0), OfCurvature(0.25))
    for algorithm in (
        F2SAP(*steps, 2.1),
        SteadySteps(FedF2SA(*steps, 2.1, local_steps=1, degree=2)),
    ):
        with pytest.raises(InvalidInputError, match="needs a minimum of g - 2.1 f"):
            two_client_job(algorithm)


def test_a_safeguard_looks_at_the_copies():
    """T2 begins where g is least: (y_+ + y_-)/2 stands still, then goes its way."""
    algorithm = SteadySteps(FedF2SA(0.5, 0.3, 0.01, local_steps=1, degree=2))
    state = execute(SimulatorRuntime(two_client_job(algorithm)), 100).state
    assert algorithm.events(state.server) == []
    np.testing.assert_allclose(algorithm.point(state.server).x, 1, atol=1e-3)


def test_the_two_levels_are_weighed_in_the_mean_over_clients():
    """One client's f curves, and another one's g, along the first of three axes."""

    def upper(x, y, rows):
        return jnp.mean(jnp.sum(rows["f"] * y**2, axis=1)) / 2 + jnp.sum(x * y)

    def lower(x, y, rows):
        return jnp.mean(jnp.sum(rows["g"] * y**2, axis=1)) / 2 + jnp.sum(x * y)

    # Of few rows all are looked at: draws of rows that differ have other means.
    f = [np.asarray([[16.0, 1, 2], [0, 7, 0]]), np.asarray([[0.0, 0, 5]])]
    g = [np.asarray([[2.0, 4, 16], [2, 0, 16]]), np.asarray([[10.0, 0, 16]])]
    uppers, lowers = [{"f": one} for one in f], [{"g": one} for one in g]
    data = ClientData.from_clients(uppers, lowers, weights=[1.0, 3.0])
    start = (jnp.ones(3), jnp.ones(3))
    algorithm = FedBiO(0.1, 0.1, 0.1, local_steps=1)
    job = Job.of(algorithm, Problem(upper, lower), data, *start)
    oracle = job.oracle(jnp.asarray(0))
    above, below = opposed_curvatures(oracle, *start, jnp.asarray(1.0), job.key)
    # In the mean f curves by (2, 1, 4), g by (8, 0.5, 16): least is left along the 2nd.
    np.testing.assert_allclose((above, below), (1, 0.5), atol=1e-3)


@jax.custom_vjp
def _foreign(y):
    return jnp.sum(y**2)


def _slope(y, upstream):
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    own = jax.pure_callback(lambda at: 2 * at, shape, y, vmap_method="sequential")
    return (upstream * own,)


_foreign.defvjp(lambda y: (_foreign(y), y), _slope)


def test_gradients_are_all_that_is_asked_for():
    """The slope of this loss is made elsewhere, where nobody differentiates it."""

    def lower(x, y, rows):
        return ROWWISE.lower(x, y, rows) + _foreign(y)

    data, start = quadratic_data(2), (jnp.ones(2), jnp.ones(3))
    problem = Problem(ROWWISE.upper, lower)
    algorithm = FedF2SA(0.1, 0.1, 0.1, local_steps=2, degree=2)
    found = end_of(Job.of(algorithm, problem, data, *start), 3)
    assert np.isfinite(found.x).all() and np.isfinite(found.y).all()
    with pytest.raises(ValueError, match="do not support JVP"):
        end_of(Job.of(FedBiO(0.1, 0.1, 0.1, local_steps=2), problem, data, *start), 1)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"degree=...\)` is one of 1, 2, 3, 4"):
        FedF2SA(1, 1, local_steps=1, degree=5)
    with pytest.raises(InvalidInputError, match=r"FedF2SA\(nu=...\)` must be above 0"):
        FedF2SA(1, 1, 0.0, local_steps=1)
    with pytest.raises(InvalidInputError, match=r"F2SAP\(nu=...\)` must be above 0"):
        F2SA(1, 1, -1.0)
    with pytest.raises(InvalidInputError, match=r"gam=...\)` must be above 0"):
        VPBGD(1, 1, 1, 0.0)
    with pytest.raises(
        InvalidInputError, match="begin=.* is one of 'own', 'sides', 'o"
    ):
        F2SAP(1, 1, begin="there")


@pytest.mark.parametrize(
    ("clients", "width", "batch", "drawn"),
    [
        (4, 1024, None, None),
        (4, 1025, None, 1024),
        (2, 10**6, 8, 2048),
        (100, 100, 64, 64),
        (10**4, 2, None, 1),
    ],
)
def test_curvatures_of_many_rows_are_those_of_some(clients, width, batch, drawn):
    rows = {"a": jax.ShapeDtypeStruct((clients, width, 3), jnp.float32)}
    assert _few(rows, batch) == drawn
