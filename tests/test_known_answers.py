"""Problems whose answers are known: the limits of T2 and T3, T4's invariant."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import algorithms, tasks
from fedbilevel._blocks import is_any
from fedbilevel.algorithms import Iterate
from fedbilevel.algorithms.directions import hypergradient_and_slope
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.algorithms.nested.lfednest import LFedNest
from fedbilevel.algorithms.parts import Memory
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.options import algorithm_from
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute, keys
from fedbilevel.tasks.quadratic import PROBLEM, ClosedForm, client_rows
from tests.cases import CASES, quadratic_data, quadratic_job, structures_first


def two_client_job(algorithm, *, pools: bool = False) -> Job:
    task = tasks.find("two-client")()
    return Job.of(
        algorithm,
        task.problem,
        task.data.pooled() if pools else task.data,
        task.x,
        task.y,
        metrics=task.metrics,
        sampling=Sampling(None),
    )


@pytest.mark.slow
@structures_first()
def test_two_clients_end_where_their_question_leads(case):
    """The shared y has x = 1, own y have 24/29, averaged inverses end at 8/7."""
    task = tasks.find("two-client")()
    options = {
        **task.recommended,
        "warm_start": "0",
        "length": "full",
        "inner_rounds": "3",
    }
    options |= case.choices
    algorithm = algorithm_from(algorithms.find(case.method), options, 2, 1)
    job = two_client_job(algorithm, pools=case.pools)
    outcome = execute(SimulatorRuntime(job), 1500)
    point = algorithm.point(outcome.state.joined())
    x = 0.0 if case.two_client is None else case.two_client
    np.testing.assert_allclose(point.x, x, atol=case.wanders)
    own = is_any(algorithm.private_blocks())
    y = [[x], [x / 3]] if own else [x / 2]
    np.testing.assert_allclose(point.y, y, atol=case.wanders)
    # The exact gradient of Phi for a shared y is (x - 1) / 2.
    np.testing.assert_allclose(
        outcome.columns["grad_norm_sq"][-1], (x - 1) ** 2 / 4, atol=case.wanders
    )


@pytest.mark.slow
@pytest.mark.parametrize("coordinatewise", ["false", "true"])
def test_adafbio_with_a_y_per_client_answers_their_question(coordinatewise):
    options = {**tasks.find("two-client")().recommended, "own_lower": "true"}
    options["coordinatewise"] = coordinatewise
    algorithm = algorithm_from(algorithms.find("adafbio"), options, 2, 1)
    state = execute(SimulatorRuntime(two_client_job(algorithm)), 1500).state
    point = algorithm.point(state.joined())
    np.testing.assert_allclose(point.x, 24 / 29, atol=1e-6)
    np.testing.assert_allclose(point.y, [[24 / 29], [8 / 29]], atol=1e-6)


@pytest.mark.slow
def test_light_and_full_nests_drift_apart():
    """T2 with tau = 5: LFedNest ends at 1.1164, FedNest does not drift."""
    nest: dict[str, Any] = {
        "alpha": 0.1,
        "beta": 0.2,
        "inner_rounds": 5,
        "local_steps": 5,
    }
    # ell = 3 is the curvature itself, which the check of a new job refuses.
    light = LFedNest(Neumann(60, 1 / 3.0001), **nest)
    full = FedNest(**nest, ell=3.0001, terms=60, random_length=False)
    for algorithm, expected, tolerance in ((light, 1.1164, 1e-3), (full, 1.0, 1e-6)):
        state = execute(SimulatorRuntime(two_client_job(algorithm)), 1500).state
        np.testing.assert_allclose(state.server.point.x, expected, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("accelerated", [False, True])
def test_the_auxiliary_variable_drifts_little(accelerated):
    """T2 with p = 10 and steps of 0.02: within 4e-3 of 1, and not exactly there."""
    if accelerated:
        steps: dict[str, Any] = {"eta": 0.02, "gamma": 0.02, "tau": 0.02}
        steps |= {"c_nu": 0.5, "c_omega": 0.5, "c_q": 0.5}
        algorithm = FedBiOAcc(1.0, **steps, local_steps=10)
    else:
        algorithm = FedBiO(0.02, 0.02, 0.02, local_steps=10)
    state = execute(SimulatorRuntime(two_client_job(algorithm)), 4000).state
    error = abs(float(state.server.point.x[0]) - 1)
    assert 1e-3 < error < 4e-3


def test_fedavg_stops_where_the_formula_says():
    """T3: p = 10 local steps of 0.05 on (h_k/2)(y - m_k)^2 end at 0.353557."""
    h, m = np.asarray([1.0, 4.0, 10.0]), np.asarray([3.0, -1.0, 0.5])
    rows = [
        client_rows(
            np.full((1, 1), hk), np.zeros((1, 1)), np.full(1, -hk * mk), m[:1], 0.5, 0.0
        )
        for hk, mk in zip(h, m, strict=True)
    ]
    data = ClientData.from_clients([up for up, _ in rows], [low for _, low in rows])
    algorithm = FedAvg(0.05, local_steps=10)
    job = Job.of(algorithm, PROBLEM, data, jnp.zeros(1), jnp.zeros(1))
    point = execute(SimulatorRuntime(job), 100).state.server.point
    a = 1 - (1 - 0.05 * h) ** 10
    np.testing.assert_allclose(point.y, np.sum(a * m) / np.sum(a), atol=1e-12)
    np.testing.assert_allclose(point.y, 0.353557, atol=5e-7)


@pytest.mark.slow
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


@pytest.mark.slow
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
    single = replace(algorithm, local_steps=1)
    clients = [server] * 3
    previous = [server.point] * 3

    @jax.jit
    def one_step(iterate, before, t, client):
        oracle, turn = job.oracle(client), keys.client_turn(job.key, (0, 0), client, t)
        memory, after = single.local(iterate, Memory((before,), t - 1), oracle, turn)
        (at,), rule = memory.evaluated, single.hypergradient
        exact = hypergradient_and_slope(rule, oracle, job.key).x(at)
        return after, at, exact

    errors = []
    for t in range(20):
        steps = [one_step(clients[k], previous[k], t, k) for k in range(3)]
        clients = [iterate for iterate, _, _ in steps]
        previous = [at for _, at, _ in steps]
        mean_direction = np.mean([one.direction.x for one in clients], axis=0)
        mean_gradient = np.mean([exact for _, _, exact in steps], axis=0)
        errors.append(float(np.abs(mean_direction - mean_gradient).max()))
        if (t + 1) % algorithm.local_steps == 0:
            clients = [_mean(clients)] * 3
            previous = previous if keeps_own_previous else [_mean(previous)] * 3
    return errors


def _mean(trees: list) -> Iterate:
    return jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), axis=0), *trees)


_BY_NAME = {
    case.method: case.two_client
    for case in reversed(CASES)
    if case.two_client is not None
}
_QUICK = ("biadam", "fednest", "soba", "v-pbgd")  # the others take minutes


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(one, marks=[] if one in _QUICK else pytest.mark.exhaustive)
        for one in _BY_NAME
    ],
)
def test_two_clients_with_nothing_but_a_name(method):
    """Within 0.02 of the method's own fixed point; methods of one machine, too."""
    result = Experiment("two-client", method).run()
    np.testing.assert_allclose(result.point["x"], _BY_NAME[method], atol=0.02)


@pytest.mark.parametrize(("noise", "same"), [("0", True), ("0.1", False)])
def test_one_machine_with_both_rows_draws_neither(noise, same):
    """It has their mean: no seed matters, and samples count; noise is drawn."""

    def ended(seed):
        options = {"noise": noise}
        plan = Experiment("two-client", "soba", rounds=3, seed=seed, options=options)
        return plan.run()

    one, other = ended(0), ended(1)
    assert (one.point["x"] == other.point["x"]).all() == same
    assert one.counts["samples"]["lower_samples"] == 3


@pytest.mark.parametrize("weights", [(3.0, 1.0), (0.2, 0.7)])
def test_weights_of_clients_are_in_the_closed_form(weights):
    """The problem that is solved is the one that is measured."""
    share = np.asarray(weights) / sum(weights)
    h = share @ np.asarray([1.0, 3.0])
    # y = x / h, and F = 0.5 (x / h - 1)^2 + 0.125 x^2.
    x = np.asarray([0.7])
    slope = (x / h - 1) / h + 0.25 * x
    task, *_ = Experiment("two-client", weights=weights).build_task()
    assert task.metrics is not None
    found = task.metrics(jnp.asarray(x), jnp.asarray(x / h))
    assert found["grad_norm_sq"] == pytest.approx(slope.item() ** 2, rel=1e-10)
    assert found["lower_error"] == pytest.approx(0, abs=1e-10)
