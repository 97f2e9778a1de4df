"""Methods that bring the gap of g down repeat their listings, sample by sample.

And they end where linear algebra says, on the two clients that differ.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import tasks
from fedbilevel.algorithms.penalty.bome import BOME
from fedbilevel.algorithms.penalty.meha import MEHA
from fedbilevel.errors import InvalidInputError
from fedbilevel.problem import Oracle
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from tests.cases import quadratic_data
from tests.reference import envelope_listings
from tests.reference.bent_job import X0, Y0, bent_job
from tests.reference.replay_phases import draw_phase, one_of_each, zeta

ROUNDS, P, CLIENTS = 4, 3, 3


def end_of(job, rounds=ROUNDS):
    return execute(SimulatorRuntime(job), rounds, measure_every=rounds).state.server


def assert_close(blocks, expected, tolerance=1e-10):
    for block, value in zip(blocks, expected, strict=True):
        np.testing.assert_allclose(block, value, rtol=0, atol=tolerance)


def test_bome_is_its_listing():
    T = 2
    algorithm = BOME(0.1, 0.2, 0.15, T, eta=0.7, small=1e-3, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=3)
    lowers = draw_phase(job, "lower", ROUNDS * P * T, zeta)
    steps = draw_phase(job, "step", ROUNDS * P, one_of_each)
    numbers = {"lr": (0.1, 0.2), "alpha": 0.15, "T": T, "eta": 0.7, "small": 1e-3}
    expected = envelope_listings.bome(X0, Y0, lowers, steps, **numbers)
    w = end_of(job).point
    assert_close((w.x, w.y, w.z), (*expected, expected[1]))


def two_of_each(oracle: Oracle, key):
    """Draw xi of y and of x, then zeta of th and y, and of x."""
    first, second, *lowers = jr.split(key, 4)
    uppers = (oracle.draw_upper(first), oracle.draw_upper(second))
    return (*uppers, *(oracle.draw_lower(one) for one in lowers))


@pytest.mark.parametrize("in_turn", [pytest.param(False, marks=pytest.mark.slow), True])
def test_meha_is_its_listing(in_turn):
    algorithm = MEHA(0.3, 0.2, 0.15, 3.0, 0.3, 0.8, alternating=in_turn, local_steps=P)
    job = bent_job(algorithm, quadratic_data(CLIENTS), seed=4)
    samples = draw_phase(job, "local", ROUNDS * P, two_of_each)
    expected = envelope_listings.meha(
        X0,
        Y0,
        samples,
        p=P,
        lr=(0.3, 0.2),
        eta=0.15,
        gamma=0.8,
        c=lambda t: 3.0 * (t + 1) ** 0.3,
        in_turn=in_turn,
    )
    server = end_of(job)
    w = server.point
    assert_close((w.x, w.y, w.z), expected)
    # What is reported is the copy that f does not hold up.
    assert algorithm.point(server).y is w.z


def two_clients(algorithm) -> Job:
    task = tasks.find("two-client")()
    return Job.of(
        algorithm, task.problem, task.data, task.x, task.y, sampling=Sampling(None)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner_steps", "printed"),
    [
        (10, 0.943),
        pytest.param(1, 0.33, marks=pytest.mark.slow),
        pytest.param(30, 0.9993, marks=pytest.mark.slow),
        pytest.param(100, 0.9999, marks=pytest.mark.slow),
    ],
)
def test_bome_ends_as_far_off_as_its_copy_is(inner_steps, printed):
    """T2, where y_s leaves c = 0.8^T of the way: x = 2 (1 - c) / (2 - c)."""
    algorithm = BOME(0.1, 0.1, 0.1, inner_steps, small=1e-11, local_steps=10)
    w = end_of(two_clients(algorithm), 300).point
    left = 0.8**inner_steps
    # m ends at about 2,500 here, and x is off by its inverse.
    np.testing.assert_allclose(w.x, 2 * (1 - left) / (2 - left), atol=2e-4)
    np.testing.assert_allclose(w.x, printed, atol=4e-3 if printed < 0.5 else 3e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("small", "eta"), [(1e-3, 0.5), (1e-4, 0.2)])
def test_bome_raises_m_as_far_as_small_lets_it(small, eta):
    """T2 at the limit: F + m q = 0 with m = (eta ||F||^2 / small)^(1/3)."""
    algorithm = BOME(0.02, 0.02, 0.1, 30, eta=eta, small=small, local_steps=10)
    w = end_of(two_clients(algorithm), 600).point
    x, y = float(w.x[0]), float(w.y[0])
    copy = x / 2 + 0.8**30 * (y - x / 2)
    # Means over the clients: f = 0.5 (y - 1)^2 + x^2 / 8 and g = y^2 - x y.
    F, q = np.array([x / 4, y - 1]), np.array([copy - y, 2 * y - x])
    m = np.cbrt(eta * F @ F / small)
    np.testing.assert_allclose(F + m * q, 0, atol=1e-4)


def envelope_limit(c):
    """Return where all three directions vanish on T2: g = y^2 - x y, gamma = 1."""
    of_th = [-1.0, -1.0, 3.0]
    of_y = [-1.0, 1 + 1 / c, 1.0]
    of_x = [0.25 / c, -1.0, 1.0]
    return np.linalg.solve([of_th, of_y, of_x], [0, 1 / c, 0])


@pytest.mark.slow
def test_meha_ends_as_far_off_as_its_penalty_says():
    """One program for all c; the gradients of the two clients differ, not the limit."""
    for c, printed in ((1.0, 0.727273), (10.0, 0.963855), (100.0, 0.996264)):
        algorithm = MEHA(0.1 * c, 0.3, 0.3, c, power=0.0, local_steps=1)
        w = end_of(two_clients(algorithm), 2000).point
        assert_close(w.x, [printed], 1e-6)
        assert_close((w.x[0], w.y[0], w.z[0]), envelope_limit(c), 1e-7)


def test_what_cannot_be_is_refused():
    with pytest.raises(InvalidInputError, match=r"`BOME\(small=...\)` must be above 0"):
        BOME(0.1, 0.1, 0.1, small=0.0)
    with pytest.raises(InvalidInputError, match=r"`BOME\(inner_steps=...\)` must be"):
        BOME(0.1, 0.1, 0.1, inner_steps=0)
    with pytest.raises(InvalidInputError, match=r"`MEHA\(c0=...\)` must be above 0"):
        MEHA(0.1, 0.1, 0.1, 0.0, local_steps=1)


def test_the_hand_made_gradient_is_that_of_the_problem():
    job = bent_job(BOME(0.1, 0.1, 0.1), quadratic_data(1))
    oracle = job.oracle(jnp.asarray(0))
    batch = oracle.draw_lower(jr.key(0))
    gx, _ = oracle.lower_gradients(job.x, job.y, batch)
    rows = {name: np.asarray(leaf) for name, leaf in batch.rows.items()}
    assert_close([gx], [envelope_listings.upper_part(X0, Y0, rows)], 1e-12)
