"""Wrappers nest, each does what its equation says, and a wrong order is refused."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel._types import Pair
from fedbilevel.algorithms import OneLoop, read_wrapper
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.algorithms.nested.fednest import FedNest
from fedbilevel.algorithms.nested.newton_bfgs import NewtonBFGS
from fedbilevel.algorithms.presets import FedBiOControls
from fedbilevel.algorithms.wrappers import (
    WRAPPERS,
    ServerOptimizer,
    absent,
    alternating,
    average,
    ball,
    box,
    controls,
    differences,
    first_batch,
    half_space,
    own_lower,
    simplex,
    steady,
    unequal_steps,
    warm_start,
)
from fedbilevel.algorithms.wrappers.steps import Ball, Box, HalfSpace, Simplex
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import SimulatorRuntime, execute
from fedbilevel.schedules import step
from tests.cases import quadratic_data, quadratic_job

LR: Any = {"lr_x": 0.1, "lr_y": 0.2, "lr_z": 0.15, "local_steps": 2}
STORM: Any = {"a": 0.5, "eta": 0.2, "gamma": 0.4, "tau": 0.3, "local_steps": 2}
STORM |= {"c_nu": 2.0, "c_omega": 2.0, "c_q": 2.0}


def points_of(algorithm, rounds=3, **more):
    """Return the state after every round."""
    job = quadratic_job(algorithm, quadratic_data(3), **more)
    return [
        execute(SimulatorRuntime(job), one, measure_every=one).state.server
        for one in range(1, rounds + 1)
    ]


@pytest.mark.parametrize(
    ("option", "wrapped"),
    [
        ({"drift": "controls"}, controls(FedBiO(**LR))),
        ({"radius": 0.5}, ball(FedBiO(**LR), 0.5)),
        ({"distance": 0.1}, differences(FedBiO(**LR), 0.1)),
        ({"alternating": True}, alternating(FedBiO(**LR))),
        ({"own_lower": True}, own_lower(FedBiO(**LR))),
        ({"warm_start": 3}, warm_start(FedBiO(**LR), 3)),
    ],
)
def test_an_option_is_its_wrapper(option, wrapped):
    assert eqx.tree_equal(FedBiO(**LR, **option), wrapped)
    name, value = next(iter(option.items()))
    assert wrapped.settings()[name] == value


def test_options_that_change_nothing_leave_the_method_as_it_is():
    plain = FedBiOAcc(**STORM)
    kept = FedBiOAcc(**STORM, drift=None, absent="keep", first_batch=1, warm_start=0)
    assert eqx.tree_equal(plain, kept)
    with pytest.raises(TypeError, match=r"has no parameter 'drfit'\. Options are"):
        FedBiOAcc(**STORM, drfit=None)


def test_a_preset_is_its_chain():
    given = (0.1, 0.2, 0.15)
    preset = FedBiOControls(*given, local_steps=2)
    chain = controls(FedBiO(*given, local_steps=2))
    assert eqx.tree_equal(preset, replace(chain, named="FedBiOControls"))


@pytest.mark.slow
def test_wrappers_of_local_steps_nest_in_any_order():
    first = ball(controls(alternating(FedBiO(**LR))), 0.5)
    second = alternating(controls(ball(FedBiO(**LR), 0.5)))
    left, right = (points_of(one, 2)[-1] for one in (first, second))
    pairs = zip(jax.tree.leaves(left.point), jax.tree.leaves(right.point), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("wrap", [controls, alternating, lambda a: ball(a, 1.0)])
@pytest.mark.parametrize(
    "method",
    [
        average(FedBiO(**LR)),
        FedNest(alpha=0.1, beta=0.1, ell=3.0, terms=2, local_steps=1),
    ],
    ids=["average", "fednest"],
)
def test_a_meaningless_order_is_refused(wrap, method):
    with pytest.raises(InvalidInputError, match="of a method of one loop, and .* none"):
        wrap(method)


@pytest.mark.parametrize("name", ["average", "quantize"])
def test_a_wrapper_hides_nothing_that_a_method_says_of_itself(name):
    """Sites refuse to send a Hessian in the clear, and noise, by what it says."""
    method = NewtonBFGS()
    wrapped: Any = WRAPPERS[name].make(method)
    for said in ("sends_hessian", "bears_noise", "finishes", "reference", "answers"):
        assert getattr(wrapped, said) == getattr(method, said), said
    server = wrapped.init_server(jnp.ones(2), jnp.ones(3))
    assert not wrapped.finished(server)
    inner = getattr(server, "server", server)
    over = replace(inner, left=jnp.zeros_like(inner.left))
    assert wrapped.finished(
        replace(server, server=over) if inner is not server else over
    )


@pytest.mark.slow
def test_the_average_of_x_is_reported_and_the_run_continues_from_x():
    """One line: FedBiO with Polyak averaging and server momentum."""
    momentum = ServerOptimizer(FedBiO(**LR), optax.sgd(1.0, 0.9))
    plain = [momentum.point(one) for one in points_of(momentum)]
    averaged = average(momentum)
    state = points_of(averaged)[-1]
    mean = np.mean([one.x for one in plain], axis=0)
    np.testing.assert_allclose(averaged.point(state).x, mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(averaged.point(state).y, plain[-1].y, rtol=0, atol=0)
    inner = averaged.algorithm.point(state.server)
    np.testing.assert_array_equal(inner.x, plain[-1].x)


vectors = st.lists(st.floats(-5, 5), min_size=1, max_size=6).map(np.asarray)
SETS = {
    "ball": (Ball(1.3), lambda w: np.linalg.norm(w) <= 1.3 + 1e-9),
    "box": (Box(-0.5, 2.0), lambda w: (w >= -0.5).all() and (w <= 2).all()),
    "simplex": (
        Simplex(2.0),
        lambda w: (w >= 0).all() and abs(w.sum() - 2) < 1e-9,
    ),
    "half-space": (HalfSpace(1.0), lambda w: w.sum() <= 1 + 1e-9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
@settings(max_examples=40)
@given(v=vectors, other=vectors)
def test_a_projection_is_the_nearest_point(name, v, other):
    """Inside, and at an obtuse angle to every other point of a convex set."""
    onto, inside = SETS[name]
    nearest = np.asarray(onto(jnp.asarray(v)))
    assert inside(nearest)
    z = np.asarray(onto(jnp.asarray(np.resize(other, v.shape))))
    assert (v - nearest) @ (z - nearest) <= 1e-8
    np.testing.assert_allclose(onto(jnp.asarray(nearest)), nearest, atol=1e-12)


@pytest.mark.slow
def test_every_round_ends_inside_of_the_sets():
    free = points_of(FedBiO(**LR))[-1].point
    assert float(jnp.max(jnp.abs(free.x))) > 0.05
    held = box(box(FedBiO(**LR), -0.05, 0.05), -0.02, 0.02, block="y")
    for state in points_of(held):
        assert float(jnp.max(jnp.abs(state.point.x))) <= 0.05
        assert float(jnp.max(jnp.abs(state.point.y))) <= 0.02
    dealt = simplex(FedBiO(**LR))
    total = [float(jnp.sum(one.point.x)) for one in points_of(dealt)]
    np.testing.assert_allclose(total, 1, atol=1e-12)
    for state in points_of(half_space(FedBiO(**LR), -0.1)):
        assert float(jnp.sum(state.point.x)) <= -0.1 + 1e-12


@pytest.mark.slow
def test_unequal_steps_are_those_of_each_client():
    plain = FedBiO(**LR)
    p, data = plain.local_steps, quadratic_data(5)

    def end_of(method):
        return execute(SimulatorRuntime(quadratic_job(method, data)), 3).state.server

    whole, fewer = (end_of(unequal_steps(plain, fewest)) for fewest in (p, 1))
    for one, other in zip(*map(jax.tree.leaves, (whole, end_of(plain))), strict=True):
        np.testing.assert_array_equal(one, other)
    apart = jax.tree.map(lambda a, b: float(abs(a - b).max()), whole, fewer)
    assert max(jax.tree.leaves(apart)) > 1e-3
    with pytest.raises(InvalidInputError, match="at most local_steps"):
        unequal_steps(plain, p + 1)
    with pytest.raises(InvalidInputError, match="for equal numbers of local steps"):
        controls(unequal_steps(plain, 1))


@pytest.mark.slow
def test_steady_steps_go_around_any_chain():
    chain = steady(controls(ball(FedBiO(**LR), 0.5)), safeguard=True)
    plain = controls(ball(FedBiO(**LR), 0.5))
    left, right = (points_of(one, 2)[-1] for one in (chain, plain))
    inner = left.server
    for one, other in zip(
        jax.tree.leaves(inner.point), jax.tree.leaves(right.point), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("controls", controls(FedBiO(**LR))),
        ("warm-start=20", warm_start(FedBiO(**LR), 20)),
        ("ball=0.5", ball(FedBiO(**LR), 0.5)),
        ("box=-1:2", box(FedBiO(**LR), -1.0, 2.0)),
        ("average", average(FedBiO(**LR))),
        ("unequal-steps=1", unequal_steps(FedBiO(**LR), 1)),
    ],
)
def test_a_wrapper_is_read_as_the_command_line_writes_it(text, expected):
    assert eqx.tree_equal(read_wrapper(text)(FedBiO(**LR)), expected)


def test_wrappers_of_storm_are_read_too():
    method = FedBiOAcc(**STORM)
    made = read_wrapper("absent=forget")(read_wrapper("first-batch=4")(method))
    assert eqx.tree_equal(made, absent(first_batch(method, 4), "forget"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("control", "unknown wrapper 'control'. Did you mean 'controls'"),
        ("warm-start", "write it as warm-start=WARM_START"),
        ("warm-start=two", "warm_start is a whole number, got 'two'"),
        ("controls=1", "write it as controls"),
        ("box=1", "write it as box=LOW:HIGH"),
        ("absent=never", "is one of 'keep', 'correct', 'forget', got 'never'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_a_sentence(text, message):
    with pytest.raises(InvalidInputError, match=message):
        read_wrapper(text)(FedBiOAcc(**STORM))


def test_every_wrapper_has_a_sentence_and_builds():
    values = {"ball": "=1", "box": "=-1:1", "clip": "=0.5", "first-batch": "=2"}
    values |= {"half-space": "=1", "unequal-steps": "=1", "warm-start": "=2"}
    for name, one in WRAPPERS.items():
        assert one.summary.endswith("."), name
        made: Any = read_wrapper(name + values.get(name, ""))(FedBiOAcc(**STORM))
        assert made.title == "FedBiOAcc"
        assert {"eta", "gamma"} <= made.settings().keys()
        assert float(made.eta) == 0.2, "parameters of what is wrapped are shown"


def test_a_new_method_of_the_family_is_its_directions_and_steps():
    """A method that states nothing but these two runs, corrected and averaged."""

    class Halves(OneLoop):
        """Steps to half of x and y."""

        local_steps: int = 2

        def directions(self, oracle, key, t):
            return Pair(lambda w: w.x, lambda w: w.y)

        def step(self, t):
            return Pair(jnp.asarray(0.5), jnp.asarray(0.5))

    job = quadratic_job(average(controls(Halves())), quadratic_data(2))
    state = execute(SimulatorRuntime(job), 1, measure_every=1).state
    expected = jax.tree.map(lambda leaf: 0.25 * leaf, (job.x, job.y))
    point = job.algorithm.point(state.server)
    for one, other in zip((point.x, point.y), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-15)


def test_a_method_that_declares_no_step_of_a_block_is_told_so():
    class Still(OneLoop):
        """Moves x alone by a step that it states."""

        lr_x: Any = step("upper", "x moves by lr_x")
        local_steps: int = 1

        def directions(self, oracle, key, t):
            return Pair(lambda w: w.x, lambda w: w.y)

    with pytest.raises(InvalidInputError, match="declares no step for y"):
        Still(0.5).step(0)


def test_founding_methods_take_wrappers_by_effective_values():
    made = LocalBSGVRM.effective(
        Neumann(2, 0.3),
        upper_step=0.1,
        lower_step=0.2,
        upper_weight=0.5,
        lower_weight=0.5,
        local_steps=2,
        warm_start=4,
    )
    assert made.settings()["warm_start"] == 4
