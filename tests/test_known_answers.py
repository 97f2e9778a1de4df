"""Problems whose answers are known: T2's biased limit and T4's invariant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import algorithms, tasks
from fedbilevel.algorithms import Turn
from fedbilevel.algorithms._local_steps import Iterate, local_steps
from fedbilevel.algorithms.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local_bsgvrm import LocalBSGVRM
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import Job, SimulatorRuntime, execute
from fedbilevel.tasks._quadratics import ClosedForm
from tests.cases import NAMES, quadratic_data, quadratic_job


def two_client_job(algorithm) -> Job:
    task = tasks.find("two-client")()
    return Job.of(
        algorithm, task.problem, task.data, task.x, task.y, metrics=task.metrics
    )


@pytest.mark.parametrize("name", NAMES)
def test_two_clients_end_where_averaged_inverses_lead(name):
    task = tasks.find("two-client")()
    options = {**task.recommended, "warm_start": "0"}
    algorithm = algorithms.find(name).from_options(options, 2, 1)
    outcome = execute(SimulatorRuntime(two_client_job(algorithm)), 1500)
    point = outcome.state.server.point
    np.testing.assert_allclose(point.x, 8 / 7, atol=1e-6)
    np.testing.assert_allclose(point.y, 4 / 7, atol=1e-6)
    # The true solution is x = 1: the exact gradient of Phi says so, and is not zero.
    np.testing.assert_allclose(outcome.columns["grad_norm_sq"][-1], (1 / 14) ** 2, 1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"), [(LocalBSGM, 1.1004), (LocalBSGVRM, 1.1364)]
)
def test_two_clients_drift_with_the_period(kind, expected):
    algorithm = kind(Neumann(60, 0.3), 0.05, 2.0, 2.0, 0.5, 1.0, local_steps=10)
    point = execute(
        SimulatorRuntime(two_client_job(algorithm)), 1500
    ).state.server.point
    np.testing.assert_allclose(point.x, expected, atol=1e-4)


def test_the_closed_form_is_the_closed_form():
    task = tasks.find("two-client")()
    closed = ClosedForm.of(task.data)
    np.testing.assert_allclose(closed.solution(), 1.0, atol=1e-12)
    np.testing.assert_allclose(closed.lower_solution(jnp.ones(1)), 0.5, atol=1e-12)
    closed = ClosedForm.of(quadratic_data(3))

    def phi(x):
        y = closed.lower_solution(x)
        return 0.5 * jnp.sum((y - closed.b) ** 2) + 0.5 * closed.r * jnp.sum(x**2)

    x = jnp.asarray([0.3, -2.0])
    np.testing.assert_allclose(closed.gradient(x), jax.grad(phi)(x), atol=1e-12)
    np.testing.assert_allclose(closed.gradient(closed.solution()), 0, atol=1e-12)


@pytest.mark.parametrize("keeps_own_previous", [True, False])
def test_mean_direction_tracks_mean_gradient(keeps_own_previous):
    """T4: mean_k u_t = mean_k h_k at every step, also right after a sync.

    With the averaged previous point in place of the client's own it breaks, which shows
    that the test can fail.
    """
    algorithm = LocalBSGVRM(Neumann(3, 0.3), 0.5, 0.9, 0.7, 0.2, 0.4, local_steps=4)
    job = quadratic_job(algorithm, quadratic_data(3, noise=0.0))
    errors = _invariant_errors(job, keeps_own_previous)
    after_sync = errors[4::4]
    if keeps_own_previous:
        assert max(errors) < 1e-12
    else:
        assert max(after_sync) > 1e-3


def _invariant_errors(job: Job, keeps_own_previous: bool) -> list[float]:
    algorithm: LocalBSGVRM = job.algorithm  # pyright: ignore[reportAssignmentType]
    server = algorithm.init_server(job.x, job.y)
    clients = [server] * 3
    previous = [server.point] * 3

    @jax.jit
    def one_step(iterate, before, t, client):
        oracle, turn = job.oracle(client), Turn(job.key, t)

        def sample(key):
            return algorithm._sampled_directions(oracle, key)

        times = (turn.steps(1), turn.keys(1))
        parts = (sample, algorithm.estimator(), algorithm.weight, algorithm.step)
        iterate, at = local_steps(iterate, before, times, *parts)
        return iterate, at, sample(job.key)(at)

    errors = []
    for t in range(20):
        steps = [one_step(clients[k], previous[k], t, k) for k in range(3)]
        clients = [iterate for iterate, _, _ in steps]
        previous = [at for _, at, _ in steps]
        mean_direction = np.mean([one.direction.x for one in clients], axis=0)
        mean_gradient = np.mean([exact.x for _, _, exact in steps], axis=0)
        errors.append(float(np.abs(mean_direction - mean_gradient).max()))
        if (t + 1) % algorithm.local_steps == 0:
            clients = [_mean(clients)] * 3
            previous = previous if keeps_own_previous else [_mean(previous)] * 3
    return errors


def _mean(trees: list) -> Iterate:
    return jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), axis=0), *trees)
