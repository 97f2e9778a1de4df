"""Optax transformations as steps of the server and of clients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbilevel._types import Pair, Triple
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.algorithms.presets import Scaffold
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.algorithms.wrappers.optimizer import LocalOptimizer, ServerOptimizer
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime import (
    Checkpoints,
    ReferenceRuntime,
    SimulatorRuntime,
    checkpoint,
    count,
    execute,
)
from tests.cases import (
    DX,
    DY,
    case_of,
    quadratic_data,
    quadratic_job,
)
from tests.reference.bent_job import X0, Y0, bent_job, only_rows
from tests.reference.bent_oracles import lower_gradient

NOTHING_NEW = optax.sgd(1.0)


def assert_close(a, b, tolerance=1e-13):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)


def local_ends(y, rows, lr, p):
    ends = []
    for zeta in rows:
        y_k = y
        for _ in range(p):
            y_k = y_k - lr * lower_gradient(X0, y_k, zeta)
        ends.append(y_k)
    return ends


def test_server_momentum_is_its_recursion():
    data, rounds = quadratic_data(3, noise=0.0), 6
    rows = [zeta for _, zeta in only_rows(data)]
    y, trace = Y0, np.zeros_like(Y0)
    for _ in range(rounds):
        change = np.mean(local_ends(y, rows, 0.1, 2), axis=0) - y
        trace = change + 0.8 * trace
        y = y + 0.5 * trace
    algorithm = ServerOptimizer(FedAvg(0.1, local_steps=2), optax.sgd(0.5, 0.8))
    state = execute(SimulatorRuntime(bent_job(algorithm, data)), rounds).state
    assert_close(algorithm.point(state.server), Pair(X0, y), 1e-12)


def test_server_adam_is_its_recursion_and_outlives_a_stop(tmp_path):
    data, rounds = quadratic_data(3, noise=0.0), 6
    rows = [zeta for _, zeta in only_rows(data)]
    y, m, v = Y0, np.zeros_like(Y0), np.zeros_like(Y0)
    for t in range(1, rounds + 1):
        g = y - np.mean(local_ends(y, rows, 0.1, 2), axis=0)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        y = y - 0.05 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
    adam = optax.adam(0.05, b1=0.9, b2=0.99)
    algorithm = ServerOptimizer(FedAvg(0.1, local_steps=2), adam)
    job = bent_job(algorithm, data)
    keep = Checkpoints(tmp_path, every_rounds=1)
    # Optax divides by powers of whole numbers.
    with jax.numpy_dtype_promotion("standard"):
        execute(SimulatorRuntime(job), 3, checkpoints=keep)
        state = execute(SimulatorRuntime(job), rounds, checkpoints=keep).state
    assert_close(algorithm.point(state.server), Pair(X0, y), 1e-12)


@pytest.mark.slow
def test_local_momentum_stays_on_its_client():
    data, rounds, p = quadratic_data(3, noise=0.0), 4, 3
    rows = [zeta for _, zeta in only_rows(data)]
    y, traces = Y0, [np.zeros_like(Y0)] * 3
    for _ in range(rounds):
        ends = []
        for k, zeta in enumerate(rows):
            y_k = y
            for _ in range(p):
                change = -0.1 * lower_gradient(X0, y_k, zeta)
                traces[k] = change + 0.5 * traces[k]
                y_k = y_k + traces[k]
            ends.append(y_k)
        y = np.mean(ends, axis=0)
    one = FedAvg(0.1, local_steps=1)
    algorithm = LocalOptimizer(one, optax.sgd(1.0, 0.5), local_steps=p)
    job = bent_job(algorithm, data)
    for runtime in (SimulatorRuntime, ReferenceRuntime):
        state = execute(runtime(job), rounds, measure_every=rounds).state
        assert_close(algorithm.point(state.server), Pair(X0, y), 1e-12)
    # What travels is what travels without it.
    plain = count(bent_job(FedAvg(0.1, local_steps=p), data), 3)
    assert count(job, 3) == plain


@pytest.mark.slow
def test_blocks_may_step_each_in_its_way():
    one = FedBiO(0.1, 0.2, 0.15, local_steps=1)
    data = quadratic_data(3)
    clipped = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    mixed = Triple(clipped, None, NOTHING_NEW)
    start = quadratic_job(one, data)

    def end(optimizer) -> Any:
        algorithm = LocalOptimizer(one, optimizer, local_steps=1)
        return execute(SimulatorRuntime(quadratic_job(algorithm, data)), 1).state.server

    free, held = end(NOTHING_NEW).point, end(mixed).point
    assert_close((held.y, held.z), (free.y, free.z))
    # Every client's step of x is cut, so their mean is no longer than the cut.
    assert 0 < jnp.linalg.norm(held.x - start.x) <= 0.01 * (1 + 1e-12)
    assert jnp.linalg.norm(free.x - start.x) > 0.1


@pytest.mark.slow
def test_weight_decay_pulls_the_point():
    data = quadratic_data(3, noise=0.0)
    decay = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1.0))
    still = FedAvg(0.0, local_steps=1)
    job = bent_job(ServerOptimizer(still, decay), data)
    state = execute(SimulatorRuntime(job), 3).state.server
    assert_close(state.server.point.y, 0.9**3 * Y0, 1e-12)


def test_a_servers_momentum_travels_where_blocks_are_private():
    """There a message is all of the server's state, and the count says so."""
    case = case_of("fedbioacc-local")
    plain = quadratic_job(case.algorithm, quadratic_data(3))
    momentum = ServerOptimizer(case.algorithm, optax.sgd(1.0, 0.5))
    wrapped = quadratic_job(momentum, quadratic_data(3))
    down = [count(job, 3)["per_client_and_round"] for job in (plain, wrapped)]
    assert down[0]["floats_down"] == 2 * DX
    assert down[1]["floats_down"] == 3 * DX
    assert down[0]["floats_up"] == down[1]["floats_up"] == 2 * DX
    shared = case_of("local-bsgvrm").algorithm
    whole = ServerOptimizer(shared, optax.sgd(1.0, 0.5))
    found = count(quadratic_job(whole, quadratic_data(3)), 3)["per_client_and_round"]
    assert found["floats_down"] == 2 * (DX + DY)


def test_another_transformation_is_another_run():
    data, fedavg = quadratic_data(2), FedAvg(0.1, local_steps=1)

    def fingerprint(rate):
        algorithm = ServerOptimizer(fedavg, optax.adam(rate))
        return checkpoint.fingerprint(quadratic_job(algorithm, data), 1)

    assert fingerprint(0.1) == fingerprint(0.1) != fingerprint(0.2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: ServerOptimizer(
                SimFBO(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, local_steps=1), NOTHING_NEW
            ),
            "no phase of `SimFBO` sends points back",
        ),
        (
            lambda: LocalOptimizer(
                FedAvg(0.1, local_steps=2), NOTHING_NEW, local_steps=3
            ),
            "must be the same, or 1",
        ),
        (
            lambda: LocalOptimizer(
                FedNest(alpha=0.1, beta=0.1, ell=3.0, terms=2, local_steps=1),
                NOTHING_NEW,
                local_steps=2,
            ),
            "of a method of one loop, and `FedNest` is none",
        ),
        (
            # Its server steps by itself: that is a wrapper of the round.
            lambda: LocalOptimizer(
                Scaffold(0.1, local_steps=1), NOTHING_NEW, local_steps=2
            ),
            "of a method of one loop, and `ServerOptimizer` is none",
        ),
    ],
)
def test_methods_whose_steps_cannot_be_changed(make, told):
    with pytest.raises(InvalidInputError, match=told):
        make()
