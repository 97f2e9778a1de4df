"""What corrections for drift and absence leave true: limits, means, and plain paths."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import algorithms
from fedbilevel._types import Pair
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbio_momentum import FedBiOMomentum
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.algorithms.penalty.fed_f2sa import FedF2SA
from fedbilevel.algorithms.presets import Scaffold, ShroFBO
from fedbilevel.algorithms.wrappers import alternating, anchor, controls
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments.options import algorithm_from, as_options, options_of
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import Problem
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from fedbilevel.tasks.quadratic import ClosedForm
from tests.cases import ROWWISE, quadratic_data, quadratic_job
from tests.test_known_answers import two_client_job

STORM: dict[str, Any] = {"eta": 0.02, "gamma": 0.02, "tau": 0.02}
STORM |= {"c_nu": 0.5, "c_omega": 0.5, "c_q": 0.5}
FOUNDING = (Neumann(60, 0.3), 0.05, 2.0, 2.0, 0.5, 1.0)
MOMENTUM = (0.02, 0.02, 0.02, 0.3)
SLOW = pytest.mark.slow


def end_of(job, rounds):
    return execute(SimulatorRuntime(job), rounds, measure_every=rounds).state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "limit"),
    [
        (FedBiO(0.02, 0.02, 0.02, local_steps=10, drift="controls"), 1),
        *(
            pytest.param(algorithm, limit, marks=SLOW)
            for algorithm, limit in (
                (FedBiO(0.02, 0.02, 0.02, local_steps=10, drift="anchor"), 1),
                (FedBiOAcc(1.0, **STORM, local_steps=10, drift="controls"), 1),
                (LocalBSGM(*FOUNDING, local_steps=10, drift="controls"), 8 / 7),
                (FedBiOAcc(1.0, **STORM, local_steps=10, drift="anchor"), 1),
                (SimFBO(*[0.02] * 6, local_steps=10, drift="controls"), 1),
                (SimFBO(*[0.02] * 6, local_steps=10, drift="anchor"), 1),
                (FedBiOMomentum(*MOMENTUM, local_steps=10, drift="controls"), 1),
                (FedBiOMomentum(*MOMENTUM, local_steps=10, drift="anchor"), 1),
                (LocalBSGM(*FOUNDING, local_steps=10, drift="anchor"), 8 / 7),
                (LocalBSGVRM(*FOUNDING, local_steps=10, drift="controls"), 8 / 7),
                (LocalBSGVRM(*FOUNDING, local_steps=10, drift="anchor"), 8 / 7),
            )
        ),
    ],
    ids=lambda one: type(one).__name__ + str(getattr(one, "drift", "")),
)
def test_two_clients_with_ten_local_steps_end_where_one_step_does(algorithm, limit):
    """T2: at 1, where FedBiO stops at 0.99695; a local inverse stays biased."""
    server = end_of(two_client_job(algorithm), 1500).server
    np.testing.assert_allclose(server.point.x, limit, atol=1e-6)
    np.testing.assert_allclose(server.point.y, limit / 2, atol=1e-6)


@pytest.mark.slow
def test_one_of_two_clients_at_a_time_ends_there_too():
    controlled = FedBiO(0.02, 0.02, 0.02, local_steps=10, drift="controls")

    def end(algorithm):
        job = replace(two_client_job(algorithm), participants=1)
        return np.asarray(end_of(job, 3000).server.point.x)

    np.testing.assert_allclose(end(controlled), 1, atol=1e-6)
    # Without controls it follows whoever came last.
    assert np.abs(end(controlled.algorithm) - 1) > 1e-2


ONE_STEP = {
    "fedbio": (FedBiO(0.1, 0.2, 0.2, local_steps=1), 1e-9),
    "fedbioacc": (
        FedBiOAcc(1.0, 0.1, 0.2, 0.2, c_nu=0.5, c_omega=0.5, c_q=0.5, local_steps=1),
        1e-9,
    ),
    # Its own bias is O(nu^2).
    "fed-f2sa-2": (FedF2SA(0.1, 0.2, 0.02, local_steps=1, degree=2), 1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedbio", *(pytest.param(one, marks=SLOW) for one in [*ONE_STEP][1:])]
)
def test_fresh_values_of_a_client_bias_a_single_step_unless_corrected(name):
    """Blocks in turn: each client moves x at its own fresh y and z, not at the mean."""
    data = quadratic_data(3, noise=0.0)
    solution = ClosedForm.of(data).solution()

    def off(algorithm):
        x = end_of(quadratic_job(algorithm, data), 1000).server.point.x
        return float(np.linalg.norm(x - solution))

    plain, tolerance = ONE_STEP[name]
    assert off(plain) < tolerance
    assert off(alternating(plain)) > 0.05
    assert off(controls(alternating(plain))) < tolerance
    assert off(anchor(alternating(plain))) < tolerance


steps = st.floats(0.01, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("drift", ["controls", pytest.param("anchor", marks=SLOW)])
@settings(max_examples=4)
@given(lr=st.tuples(steps, steps, steps), seed=st.integers(0, 3))
def test_clients_alike_walk_as_without_a_correction(drift, lr, seed):
    data = quadratic_data(3, noise=0.0, alike=True, seed=seed)
    plain = FedBiO(*lr, local_steps=4)
    ends = [
        end_of(quadratic_job(one, data), 5).server.point
        for one in (plain, replace(plain, drift=drift))
    ]
    assert_same(*ends)


@pytest.mark.slow
@settings(max_examples=4)
@given(
    scale=st.floats(0.1, 1.0),
    weights=st.tuples(*[st.floats(0.1, 10.0)] * 3),
    seed=st.integers(0, 3),
)
def test_one_local_step_of_all_clients_is_as_without_controls(scale, weights, seed):
    """The corrections add up to nothing, whatever the samples and the weights are."""
    data = replace(quadratic_data(3, seed=seed), weights=jnp.asarray(weights))
    plain = FedBiOAcc(
        0.5, 0.4 * scale, 0.6, 0.5, c_nu=0.8, c_omega=1.0, c_q=1.2, local_steps=1
    )
    ends = [
        end_of(quadratic_job(one, data, seed=seed), 6).server
        for one in (plain, replace(plain, drift="controls"))
    ]
    assert_same(*((end.point, end.direction) for end in ends))


def assert_same(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


LETTERS: dict[str, Any] = {"local_steps": 2, "drift": "controls"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        FedBiO(0.1, 0.2, 0.15, **LETTERS),
        pytest.param(SimFBO(0.1, 0.2, 0.15, 0.08, 0.15, 0.1, **LETTERS), marks=SLOW),
        pytest.param(Scaffold(0.2, 0.7, local_steps=2), marks=SLOW),
        pytest.param(
            FedBiOAcc(0.5, 0.4, 0.6, 0.5, 2.0, 2.0, 2.0, **LETTERS), marks=SLOW
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_server_has_the_mean_of_all_controls(algorithm):
    """With cohorts, too, and by the weights: else there is a pull that never ends."""
    weights = np.asarray([1.0, 2.0, 3.0, 2.5, 0.5])
    data = replace(quadratic_data(5), weights=jnp.asarray(weights))
    state = end_of(quadratic_job(algorithm, data, participants=2), 9)
    every = jax.tree.leaves(state.clients.memory.own[0])
    # One that the server steps by itself carries it inside.
    server = getattr(state.server, "server", state.server)
    for c, own in zip(jax.tree.leaves(server.shared[0]), every, strict=True):
        mean = np.average(own, axis=0, weights=weights)
        np.testing.assert_allclose(c, mean, rtol=0, atol=1e-12)
        assert np.abs(own - mean).max() > 1e-3


@pytest.mark.slow
def test_a_private_block_is_not_corrected():
    """Of a block that never leaves its client, the mean over clients is its own."""
    bare = quadratic_job(FedBiO(0.1, 0.2, 0.15, **LETTERS), quadratic_data(4))
    problem = Problem(ROWWISE.upper, ROWWISE.lower, private=Pair(False, True))
    start = (bare.data, bare.x, bare.y)
    job = Job.of(bare.algorithm, problem, *start, sampling=Sampling(1, 2))
    state = end_of(job, 7)
    own, c = state.clients.memory.own[0], state.joined().shared[0]
    np.testing.assert_allclose(c.y, own.y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(c.z, own.z, rtol=0, atol=1e-12)
    np.testing.assert_allclose(c.x, np.mean(own.x, axis=0), rtol=0, atol=1e-12)
    assert c.x.shape == bare.x.shape


@SLOW
@pytest.mark.parametrize("in_turn", [False, True])
def test_where_all_take_part_nobody_is_absent(in_turn):
    letters: dict[str, Any] = {"local_steps": 2, "alternating": in_turn}
    keep = FedBiOAcc(0.5, 0.4, 0.6, 0.5, 2.0, 2.0, 2.0, **letters)
    data = quadratic_data(3)
    ends = [
        end_of(quadratic_job(replace(keep, absent=absent), data), 4)
        for absent in ("keep", "correct", "forget")
    ]
    for other in ends[1:]:
        assert eqx.tree_equal(*map(jax.tree.leaves, (ends[0], other)))


def test_without_a_correction_nothing_more_is_kept_or_sent():
    x, y = jnp.ones(2), jnp.ones(3)
    for algorithm in (FedBiO(1, 1, 1, local_steps=1), SimFBO(*[1] * 6, local_steps=1)):
        assert jax.tree.leaves(algorithm.init_client(x, y)) == []
        assert len(jax.tree.leaves(algorithm.init_server(x, y))) == 3
    anchored = FedBiO(1, 1, 1, local_steps=1, drift="anchor")
    assert jax.tree.leaves(anchored.init_client(x, y)) == []


def test_words_are_read_and_written_as_options():
    entry = algorithms.find("fedbioacc")
    kinds = {name: one.kind for name, one in options_of(entry).items()}
    assert kinds["drift"] == "none or controls or anchor"
    assert kinds["absent"] == "keep or correct or forget"
    steps = {"upper_step": "1", "lower_step": "1"}
    given = {**steps, "upper_weight": "1", "lower_weight": "1"}
    words = {"drift": "anchor", "absent": "forget"}
    made: Any = algorithm_from(entry, {**given, **words}, 2, 1)
    assert (made.drift, made.absent) == ("anchor", "forget")
    again = algorithm_from(entry, as_options(entry, made), 2, 1)
    assert eqx.tree_equal(made, again)
    off: Any = algorithm_from(entry, {**given, "drift": "none"}, 2, 1)
    assert "drift" not in off.settings()
    with pytest.raises(InvalidInputError, match="drift 'control'. Did you mean 'contr"):
        algorithm_from(entry, {**given, "drift": "control"}, 2, 1)


def test_what_cannot_be_is_refused_by_name():
    told = r"FedBiO\(drift=...\)` is one of None, 'controls', 'anchor', got 'scaffold'"
    with pytest.raises(InvalidInputError, match=told):
        FedBiO(1, 1, 1, local_steps=1, drift="scaffold")
    told = r"absent=...\)` is one of 'keep', 'correct', 'forget', got None"
    with pytest.raises(InvalidInputError, match=told):
        FedBiOAcc(1, 1, 1, 1, 1, 1, 1, local_steps=1, absent=None)  # pyright: ignore[reportArgumentType]
    unequal = ShroFBO(*[0.1] * 6, local_steps=2)
    with pytest.raises(InvalidInputError, match="is for equal numbers of local steps"):
        controls(unequal)
