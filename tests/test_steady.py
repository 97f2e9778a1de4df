"""Steps in units that a run measures, and a run that survives steps too long."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel.algorithms import AbstractAlgorithm, SteadySteps, steadied
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedmsa import FedMSA
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.algorithms.one_machine.soba import SOBA
from fedbilevel.algorithms.wrappers.measured_steps.curvature import (
    first_vector,
    found,
)
from fedbilevel.algorithms.wrappers.measured_steps.safeguard import MOST
from fedbilevel.errors import InvalidInputError, NonFiniteError
from fedbilevel.experiments import Experiment
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData, Problem
from fedbilevel.problem.curvature import _unit
from fedbilevel.runtime import (
    Checkpoints,
    Job,
    ReferenceRuntime,
    SimulatorRuntime,
    execute,
)
from fedbilevel.units import OfCurvature, OfDistance, read_relative
from tests.cases import (
    STRUCTURES,
    cohort_of,
    data_for,
    quadratic_data,
    quadratic_job,
)
from tests.reference.bent_job import X0, Y0, bent_job, only_rows
from tests.reference.bent_oracles import (
    cross_product,
    hessian_product,
    lower_gradient,
    upper_gradients,
)

P = 2
SHARES = st.floats(1e-6, 1e6)


@given(SHARES, st.sampled_from(["/L", "*L", "*auto"]))
def test_what_is_written_is_read_back(share, ending):
    auto = OfDistance(1.0)
    made = read_relative(f"{share!r}{ending}", auto)
    assert made is not None
    again = read_relative(str(made), auto)
    assert str(again) == str(made)
    np.testing.assert_allclose(float(made.share), share, rtol=1e-6)


@pytest.mark.parametrize("text", ["", "L", "0.5", "-1/L", "nan/L", "inf/L", "0/L"])
def test_what_is_no_share_is_not_read(text):
    assert read_relative(text, OfDistance(1.0)) is None


def fedbio_directions(w, xi, zeta):
    """Return nu, omega and q on one client's only rows."""
    x, y, z = w
    fx, fy = upper_gradients(x, y, xi)
    omega = lower_gradient(x, y, zeta)
    q = hessian_product(x, y, z, zeta) - fy
    return fx - cross_product(x, y, z, zeta), omega, q


def multiplied(v, x, y, zeta):
    """Return the product with v by a difference over a hundredth of y, and its size."""
    reach = 1e-2 * np.linalg.norm(y)
    ahead, behind = (lower_gradient(x, y + s * reach * v, zeta) for s in (1, -1))
    product = (ahead - behind) / (2 * reach)
    size = np.linalg.norm(product)
    return product / size, size


def first_slope(x, y, xi, zeta, theta):
    """Return the norm of a hypergradient with five factors."""
    fx, r = upper_gradients(x, y, xi)
    s = r
    for _ in range(5):
        r = r - theta * hessian_product(x, y, r, zeta)
        s = s + r
    return np.linalg.norm(fx - theta * cross_product(x, y, s, zeta))


def followed_fedbio(rows, rounds, shares, p):
    """FedBiO by its listing, with y and z by 1/L and x by DoG's stride."""
    x, y, z = X0, Y0, np.zeros_like(Y0)
    vectors, sizes, slopes = [], [], []
    for xi, zeta in rows:
        v = np.asarray(first_vector(jnp.asarray(Y0)))
        size = 0.0
        for _ in range(10):
            v, size = multiplied(v, x, y, zeta)
        vectors.append(v)
        sizes.append(size)
        slopes.append(first_slope(x, y, xi, zeta, 0.5 / size))
    L = np.mean(np.power(sizes, 4)) ** 0.25
    farthest, squares = 1e-3 * np.linalg.norm(X0), np.mean(slopes) ** 2
    for _ in range(rounds):
        stride = farthest / np.sqrt(squares)
        steps = (shares[0] * stride, shares[1] / L, shares[2] / L)
        ends, ratios = [], []
        for k, (xi, zeta) in enumerate(rows):
            w = (x, y, z)
            for _ in range(p):
                d = fedbio_directions(w, xi, zeta)
                w = tuple(a - s * b for a, s, b in zip(w, steps, d, strict=True))
            ends.append(w)
            vectors[k], size = multiplied(vectors[k], x, y, zeta)
            ratios.append((size / L) ** 4)
        before = x
        x, y, z = (np.mean(block, axis=0) for block in zip(*ends, strict=True))
        factor = np.clip(np.mean(ratios), 0, 16) ** 0.25
        L *= factor if factor > 1 else 1 + 0.1 * (factor - 1)
        squares += (np.linalg.norm(x - before) / (stride * shares[0])) ** 2
        farthest = max(farthest, np.linalg.norm(x - X0))
    return x, y, L


def test_a_direction_that_was_lost_is_another_of_length_1():
    v = {"a": jnp.ones((5, 3)), "b": jnp.ones(()), "c": jnp.ones(1)}
    none = jax.tree.map(jnp.zeros_like, v)
    assert eqx.tree_equal(found(v, jnp.ones(())), v)
    fresh = found(none, jnp.zeros(()))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, v)
    numbers = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(fresh)])
    assert np.linalg.norm(numbers) == pytest.approx(1, abs=1e-12)
    assert np.ptp(numbers) > 0.5


@pytest.mark.parametrize(
    "runtime",
    [SimulatorRuntime, pytest.param(ReferenceRuntime, marks=pytest.mark.slow)],
)
def test_steps_follow_the_curvature_and_the_way_as_written(runtime):
    data, rounds = quadratic_data(3, noise=0.0), 3
    shares = (0.7, 0.4, 0.3)
    algorithm = FedBiO(
        OfDistance(0.7), OfCurvature(0.4), OfCurvature(0.3), local_steps=P
    )
    job = bent_job(algorithm, data)
    state = execute(runtime(job), rounds, measure_every=rounds).state.server
    x, y, L = followed_fedbio(only_rows(data), rounds, shares, P)
    np.testing.assert_allclose(state.server.point.x, x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.server.point.y, y, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.curvature, L, rtol=1e-10)


@pytest.mark.slow
def test_a_bound_of_the_curvature_is_its_multiple():
    nest = FedNest(
        alpha=0.1,
        beta=OfCurvature(0.3),
        local_steps=2,
        ell=1 / OfCurvature(0.5),
        terms=2,
    )
    assert str(nest.ell) == "2.0*L"
    job = quadratic_job(nest, quadratic_data(3))
    state = execute(SimulatorRuntime(job), 3, measure_every=3).state.server
    assert np.isfinite(np.asarray(state.server.point.y)).all()
    # Rows scatter around curvatures of 0.5 to 2.
    assert 1.5 < float(state.curvature) < 3


@pytest.mark.slow
def test_a_series_is_short_enough_for_its_own_client():
    """One client curves a hundred times as much as the other 19 together."""
    flat = quadratic_data(20, noise=0.0)
    A = np.array(flat.lower["A"])
    A[7] *= 300.0
    curved = replace(flat, lower={**flat.lower, "A": jnp.asarray(A)})
    algorithm = LocalBSGVRM.effective(
        Neumann(30, OfCurvature(0.5)),
        upper_step=1e-3,
        lower_step=OfCurvature(0.25),
        upper_weight=0.5,
        lower_weight=0.5,
        local_steps=3,
    )
    state = execute(SimulatorRuntime(quadratic_job(algorithm, curved)), 30).state
    assert np.isfinite(np.asarray(state.server.server.point.x)).all()
    largest = float(np.linalg.norm(A[7, 0], 2))
    np.testing.assert_allclose(state.clients.memory.curvature[7], largest, rtol=1e-6)


@pytest.mark.slow
@STRUCTURES
def test_with_plain_numbers_a_safeguard_changes_nothing(case):
    data = data_for(case, 3)

    def end(algorithm: AbstractAlgorithm):
        job = quadratic_job(algorithm, data, participants=cohort_of(case, 2))
        state = execute(SimulatorRuntime(job), 5, measure_every=5).state
        return algorithm.point(state.joined())

    guarded, bare = end(steadied(case.algorithm, True)), end(case.algorithm)
    for left, right in zip(
        jax.tree.leaves(guarded), jax.tree.leaves(bare), strict=True
    ):
        np.testing.assert_array_max_ulp(np.asarray(left), np.asarray(right))


STEPS = (0.1, 0.2, 0.2)
TOO_LONG = FedBiO(0.1, 2.5, 0.2, local_steps=2)


def guarded_end(runtime: Any = SimulatorRuntime, rounds=7, **more):
    job = quadratic_job(SteadySteps(TOO_LONG), quadratic_data(3, noise=0.0))
    return job, execute(runtime(job), rounds, **more)


@pytest.mark.slow
def test_a_run_that_explodes_goes_back_and_converges():
    data = quadratic_data(3, noise=0.0)
    with pytest.raises(NonFiniteError):
        execute(SimulatorRuntime(quadratic_job(TOO_LONG, data)), 1000)
    job, outcome = guarded_end(rounds=6000, measure_every=6000)
    told = job.algorithm.events(outcome.state.server)
    assert len(told) == 2 and all("diverged" in event for event in told)
    # Where the steps that it ended with lead to from the start.
    short = FedBiO(0.1 / 16, 2.5 / 4, 0.2 / 4, local_steps=2)
    plain = execute(SimulatorRuntime(quadratic_job(short, data)), 6000).state.server
    ends = (outcome.state.server.server.point, plain.point)
    np.testing.assert_allclose(ends[0].x, ends[1].x, atol=1e-6)
    np.testing.assert_allclose(ends[0].y, ends[1].y, atol=1e-6)


@pytest.mark.slow
def test_what_is_told_has_the_number_of_a_round():
    """Iterations are rounds of FedBiO with one local step, and a third of SOBA's."""
    data, steps = quadratic_data(2, noise=0.0), (0.1, 2.5, 0.2)

    def told(algorithm: AbstractAlgorithm, rounds: int) -> list[int]:
        job = quadratic_job(SteadySteps(algorithm), data)
        server = execute(SimulatorRuntime(job), rounds).state.server
        words = " ".join(job.algorithm.events(server)).split()
        return [
            int(words[k + 1].strip(":,")) for k, w in enumerate(words) if w == "round"
        ]

    iterations = told(FedBiO(*steps, local_steps=1), 24)
    assert iterations and max(iterations) > 8
    now, back = iterations[::2], iterations[1::2]
    expected = [[-(-a // 3), b // 3] for a, b in zip(now, back, strict=True)]
    assert told(SOBA(*steps, local_steps=3), 8) == sum(expected, [])


def guarded_ends(**more):
    """Return the leaves of a run that goes back, each with that of another end."""
    _, whole = guarded_end()
    assert int(whole.state.server.guard.halvings) > 0
    _, other = guarded_end(**more)
    both = (jax.tree.leaves(one.state.server) for one in (whole, other))
    return zip(*both, strict=True)


@pytest.mark.slow
def test_a_stop_changes_nothing_of_a_run_that_goes_back(tmp_path):
    kept = Checkpoints(tmp_path / "run", every_rounds=2)
    guarded_end(rounds=5, checkpoints=kept)
    for left, again in guarded_ends(checkpoints=kept):
        np.testing.assert_array_equal(left, again)


@pytest.mark.slow
def test_both_runtimes_go_back_alike():
    for left, right in guarded_ends(runtime=ReferenceRuntime):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_less_than_half_of_the_clients_cannot_turn_a_run_back():
    """One client of five has a Hessian that makes its own steps explode."""
    calm = quadratic_data(5, noise=0.0)
    A = np.array(calm.lower["A"])
    A[2] *= 1e200
    data = replace(calm, lower={**calm.lower, "A": jnp.asarray(A)})
    job = bent_job(SteadySteps(FedBiO(*STEPS, local_steps=2)), data)
    outcome = execute(SimulatorRuntime(job), 12, measure_every=12)
    guard = outcome.state.server.guard
    assert (int(guard.halvings), int(guard.replaced)) == (0, 12)
    (told,) = job.algorithm.events(outcome.state.server)
    assert told == "in 12 rounds replies that were not finite were left out"
    # The others go on; what it would have sent counts as no change.
    rows = [pair for k, pair in enumerate(only_rows(calm)) if k != 2]
    x, y, z = X0, Y0, np.zeros_like(Y0)
    for _ in range(12):
        ends = [(x, y, z)]
        for xi, zeta in rows:
            w = (x, y, z)
            for _ in range(2):
                d = fedbio_directions(w, xi, zeta)
                w = tuple(a - s * b for a, s, b in zip(w, STEPS, d, strict=True))
            ends.append(w)
        x, y, z = (np.mean(block, axis=0) for block in zip(*ends, strict=True))
    np.testing.assert_allclose(outcome.state.server.server.point.x, x, atol=1e-10)


@pytest.mark.slow
def test_a_run_that_cannot_be_saved_fails_in_the_end():
    calm = quadratic_data(2, noise=0.0)
    A = np.asarray(calm.lower["A"]) * 1e200
    data = replace(calm, lower={**calm.lower, "A": jnp.asarray(A)})
    job = bent_job(SteadySteps(FedBiO(*STEPS, local_steps=2)), data)
    with pytest.raises(NonFiniteError):
        execute(SimulatorRuntime(job), MOST + 30)


def test_noise_and_a_safeguard_exclude_each_other():
    noisy = Experiment(
        "quadratic", clip=1.0, noise=1.0, options={"lower_step": "0.1/L"}
    )
    with pytest.raises(InvalidInputError, match="hide what a safeguard"):
        noisy.build().job()


@pytest.mark.slow
def test_the_round_is_told_in_which_a_theta_stops_to_fit():
    """g curves by 1 + x^2, f draws x from 0 to 3, and y stays at 0."""
    rows = {"none": jnp.zeros(1)}
    problem = Problem(
        lambda x, y, batch: 0.5 * (x - 3.0) ** 2 + 0.0 * y,
        lambda x, y, batch: 0.5 * (1.0 + x**2) * y**2,
    )
    data = ClientData.from_clients([rows, rows], [rows, rows])
    theta, step, p = 0.3, 0.02, 2
    algorithm = LocalBSGM.effective(
        Neumann(2, theta),
        upper_step=step,
        lower_step=0.05,
        upper_weight=1.0,
        lower_weight=1.0,
        local_steps=p,
    )
    start = (jnp.asarray(0.0), jnp.asarray(0.0))
    job = Job.of(steadied(algorithm, True), problem, data, *start)
    outcome = execute(SimulatorRuntime(job), 60, measure_every=60)
    x, rounds = 0.0, 0
    while theta * (1 + x**2) <= 1:
        for _ in range(p):
            x -= step * (x - 3)
        rounds += 1
    (told,) = job.algorithm.events(outcome.state.server)
    # L is measured at the point that a round begins with.
    assert f"did not fit any more in round {rounds + 1}:" in told
    short = execute(SimulatorRuntime(job), rounds, measure_every=rounds)
    assert job.algorithm.events(short.state.server) == []


def test_a_run_may_roll_back_to_where_its_setup_ended():
    method = FedMSA(0.05, 0.05, 0.5, 3, local_steps=1)
    runtime = SimulatorRuntime(quadratic_job(steadied(method, True), quadratic_data(2)))
    server = runtime.start()[0].server
    (kept, _), moved = server.guard.kept, server.server.point
    assert float(jnp.abs(moved.z).max()) > 0
    for here, there in zip(*map(jax.tree.leaves, (kept, server.server)), strict=True):
        np.testing.assert_array_equal(here, there)


def test_a_hessian_of_zeros_leaves_no_direction_and_no_nan():
    v, size = _unit({"a": jnp.zeros(3)})
    assert size == 0
    np.testing.assert_array_equal(v["a"], np.zeros(3))
    v, size = _unit({"a": jnp.asarray([0.0, -4.0])})
    assert size == 4
    np.testing.assert_array_equal(v["a"], [0, -1])
