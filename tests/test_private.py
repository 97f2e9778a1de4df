"""Blocks that belong to one client: kept there, and the right problem solved."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import ClientData, Problem, Sampling, run
from fedbilevel._blocks import NOTHING, is_any
from fedbilevel._types import Pair
from fedbilevel.algorithms import every_phase
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbio_clientwise import FedBiOClientwise
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.fedbioacc_clientwise import FedBiOAccClientwise
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.algorithms.presets import FedBiOAccLocal
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import Exact, Neumann
from fedbilevel.runtime import (
    Job,
    ReferenceRuntime,
    SimulatorRuntime,
    count,
    execute,
    keys,
)
from fedbilevel.runtime.exchange import Link, server_turn
from fedbilevel.tasks.quadratic import ClosedForm
from tests.cases import (
    data_for,
    quadratic_data,
    quadratic_job,
    some_of,
    structures_first,
)

pytestmark = pytest.mark.two_devices

STORM: dict[str, Any] = {"eta": 0.3, "gamma": 0.4, "c_nu": 0.5, "c_omega": 0.5}


def own_solution(data):
    """Return the x that is best if every client has its own y_k*(x), in NumPy."""
    A, C, a = (np.asarray(data.lower[name])[:, 0] for name in ("A", "C", "a"))
    b, r = (np.asarray(data.upper[name])[:, 0] for name in ("b", "r"))
    matrix, side = np.zeros((C.shape[1],) * 2), np.zeros(C.shape[1])
    for k in range(len(A)):
        inverse = np.linalg.inv(A[k])
        matrix += r[k] * np.eye(C.shape[1]) + C[k] @ inverse @ inverse @ C[k].T
        side -= C[k] @ inverse @ (inverse @ a[k] + b[k])
    return np.linalg.solve(matrix, side)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        FedBiOClientwise(Exact(), 0.3, 0.4, local_steps=1),
        *some_of(
            [
                FedBiOAccClientwise(Exact(), 1.0, **STORM, local_steps=1),
                FedBiOAccLocal(Exact(), 1.0, **STORM, local_steps=1),
            ],
            0,
        ),
    ],
    ids=["clientwise", "before-the-move", "after-the-move"],
)
def test_own_lower_levels_reach_their_own_optimum(algorithm):
    data = quadratic_data(3, noise=0.0)
    state = execute(SimulatorRuntime(quadratic_job(algorithm, data)), 600).state
    point = state.joined().point
    np.testing.assert_allclose(point.x, own_solution(data), atol=1e-9)
    for k in range(3):
        A, C, a = (np.asarray(data.lower[name])[k, 0] for name in ("A", "C", "a"))
        best = -np.linalg.solve(A, C.T @ np.asarray(point.x) + a)
        np.testing.assert_allclose(point.y[k], best, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        FedBiO(0.3, 0.4, 0.4, local_steps=1),
        FedBiOAcc(1.0, **STORM, tau=0.4, c_q=0.5, local_steps=1),
        FedNest(
            alpha=0.3,
            beta=0.4,
            ell=2.5,
            terms=80,
            inner_rounds=3,
            local_steps=1,
            random_length=False,
        ),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_shared_lower_level_has_another_optimum(algorithm):
    data = quadratic_data(3, noise=0.0)
    point = execute(SimulatorRuntime(quadratic_job(algorithm, data)), 600).state.server
    shared = np.asarray(ClosedForm.of(data).solution())
    np.testing.assert_allclose(point.point.x, shared, atol=1e-8)
    assert np.abs(own_solution(data) - shared).max() > 0.1


@pytest.mark.slow
@structures_first(lambda case: is_any(case.algorithm.private_blocks()))
def test_what_is_private_is_in_no_message(case):
    job = quadratic_job(case.algorithm, data_for(case, 3))
    state = execute(SimulatorRuntime(job), 1).state
    for number, phase in enumerate(every_phase(case.algorithm.phases())):
        where = (keys.ROUNDS, number)
        turn = server_turn(job, where, 0, jnp.arange(3), jnp.ones(3, bool))
        link = Link.of(job, phase, where)
        sent = link.sent(state.server, turn)
        sizes = {leaf.size for leaf in jax.tree.leaves((sent, link.reply_shape()))}
        assert sizes == {job.x.size}
    # And every client has a y of its own.
    y = state.joined().point.y
    assert y.shape == (3, *job.y.shape)
    assert len({tuple(row) for row in np.asarray(y).tolist()}) == 3


def upper(x, y, rows):
    return jnp.mean((y - x["shared"] - rows["b"]) ** 2) + jnp.sum(x["own"] ** 2)


def lower(x, y, rows):
    return jnp.mean((y - rows["a"] * x["own"]) ** 2) + 0.5 * jnp.sum(y**2)


def mixed_job(clients, private=NOTHING, participants=None):
    draw = np.random.default_rng(1)
    rows = [{"a": draw.normal(size=(4, 1))} for _ in range(clients)]
    data = ClientData.from_clients(
        [{"b": draw.normal(size=(4, 1))} for _ in range(clients)], rows
    )
    algorithm = LocalBSGM(Neumann(2, 0.2), 1.0, 0.5, 0.5, 0.1, 0.1, local_steps=2)
    start = ({"own": jnp.ones(1), "shared": jnp.zeros(1)}, jnp.zeros(1))
    problem = Problem(upper, lower, private=private)
    drawing = Sampling(batch=1, participants=participants)
    return Job.of(algorithm, problem, data, *start, sampling=drawing)


PRIVATE = Pair({"own": True, "shared": False}, False)


@pytest.mark.slow
@pytest.mark.parametrize("participants", [3, 2])
def test_one_block_of_x_may_be_private(participants):
    job = mixed_job(3, PRIVATE, participants)
    fast = execute(SimulatorRuntime(job), 3)
    slow = execute(ReferenceRuntime(job), 3)
    for one, other in zip(
        jax.tree.leaves((fast.state, fast.columns)),
        jax.tree.leaves((slow.state, slow.columns)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    x = fast.state.joined().point.x
    assert x["own"].shape == (3, 1) and x["shared"].shape == (1,)
    assert len(set(np.asarray(x["own"]).ravel().tolist())) == 3
    # x.shared, y and their directions travel; x.own and its direction do not.
    assert count(job, 2)["per_client_and_round"]["floats_up"] == 4


@pytest.mark.slow
def test_one_client_has_nothing_to_hide():
    hidden = execute(SimulatorRuntime(mixed_job(1, PRIVATE)), 4)
    plain = execute(SimulatorRuntime(mixed_job(1)), 4)
    for name in ("own", "shared"):
        np.testing.assert_array_equal(
            np.ravel(hidden.state.joined().point.x[name]),
            np.ravel(plain.state.server.point.x[name]),
        )
    np.testing.assert_allclose(
        hidden.columns["upper_loss"], plain.columns["upper_loss"], rtol=1e-14
    )


def test_the_result_holds_every_client_and_measures_its_own():
    data = quadratic_data(3, noise=0.0)
    algorithm = FedBiOClientwise(Exact(), 0.3, 0.4, local_steps=1)
    job = quadratic_job(algorithm, data)
    start = (job.x, job.y)
    result = run(job.problem, data, start, algorithm, rounds=600, metrics=job.metrics)
    assert result.point["y"].shape == (3, 3)
    # Each client's slope is zero at its own y; with any shared y it could not be.
    assert result.final["lower_gradient_norm"] < 1e-9
    losses = []
    for k in range(3):
        oracle, own = job.oracle(k), result.point["y"][k]
        rows = oracle.all_upper()
        losses.append(oracle.upper_loss(result.point["x"], own, rows))
    np.testing.assert_allclose(result.final["upper_loss"], np.mean(losses), rtol=1e-12)


def test_rows_in_one_place_have_no_clients_to_keep_blocks():
    job = quadratic_job(FedBiO(0.1, 0.1, 0.1, local_steps=1), quadratic_data(2))
    own = replace(job.problem, private=Pair(False, True))
    with pytest.raises(InvalidInputError, match="all rows are in one place"):
        Job.of(job.algorithm, own, quadratic_data(2).pooled(), job.x, job.y)


@pytest.mark.parametrize(
    ("algorithm", "private", "told"),
    [
        (
            FedNest(alpha=0.1, beta=0.1, ell=3.0, terms=2, local_steps=1),
            Pair(False, True),
            "`FedNest` needs whole levels in one place",
        ),
        (
            FedBiO(0.1, 0.1, 0.1, local_steps=1),
            Pair({"no": True}, False),
            "a tree of them shaped like the start",
        ),
    ],
)
def test_private_blocks_that_cannot_be(algorithm, private, told):
    job = quadratic_job(FedBiO(0.1, 0.1, 0.1, local_steps=1), quadratic_data(2))
    start = (job.data, job.x, job.y)
    with pytest.raises(InvalidInputError, match=told):
        Job.of(algorithm, replace(job.problem, private=private), *start)
