"""Step sizes over time, and the two ways to write an algorithm's parameters."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import Neumann
from fedbilevel.schedules import (
    Constant,
    CubeRootDecay,
    PowerDecay,
    TheoremThree,
    as_number,
    as_schedule,
    documented,
    number,
    parse_schedule,
)

by_numbers = settings(max_examples=25)
TIMES = [0, 1, 2, 3, *(m * 10**e for e in range(1, 16) for m in (1, 3))]
RULE = Neumann(2, 0.1)
LETTERS = ("alpha", "beta", "rho1", "rho2")
POWERS = {LocalBSGM: 1, LocalBSGVRM: 2}


def printed_theorem_three(t, K, p, rho1, l_hat, l_phi):
    """Return eta_t as Theorem 3 prints it, through the weight w_t."""
    drift = 200**3 * K**2 * p**3
    smooth = 8 * rho1**3 * l_phi**3 * K**2 / l_hat**3
    w = max(2, drift - t, smooth - t)
    return (K ** (2 / 3) / l_hat) / (w + t) ** (1 / 3)


def test_constant_and_decay():
    assert all(float(Constant(0.3)(t)) == 0.3 for t in (0, 7, 10**9))
    np.testing.assert_allclose(PowerDecay(3.0, 1, 0.4)(31), 3 / 32**0.4)
    decay = CubeRootDecay(0.5, 8)
    for t, value in ((0, 0.25), (19, 0.5 / 3), (56, 0.125), (992, 0.05)):
        for time in (t, jnp.asarray(t, jnp.int32)):
            np.testing.assert_allclose(decay(time), value, rtol=1e-15)


@by_numbers
@given(
    K=st.integers(1, 64),
    p=st.integers(1, 50),
    rho1=st.floats(1e-5, 10),
    l_hat=st.floats(0.1, 100),
    l_phi=st.floats(0.1, 1e5),
)
def test_theorem_three_is_the_printed_form(K, p, rho1, l_hat, l_phi):
    found = TheoremThree(K, p, rho1, l_hat, l_phi)(jnp.asarray(TIMES))
    printed = [printed_theorem_three(t, K, p, rho1, l_hat, l_phi) for t in TIMES]
    np.testing.assert_allclose(found, printed, rtol=1e-12)


@pytest.mark.parametrize(
    "t, numbers, value",
    [
        (10**9 - 2, (1, 1, 1e-3, 1, 1), 1e-3),  # K^(2/3) / (Lhat (t+2)^(1/3))
        (10**9 - 2, (8, 1, 1e-3, 1, 1), 4e-3),
        (0, (8, 5, 1e-3, 2, 1), 1 / (200 * 5 * 2)),  # 1 / (200 p Lhat)
        (0, (8, 1, 1, 1, 1e3), 1 / (2 * 1e3)),  # 1 / (2 rho1 L_Phi)
    ],
)
def test_theorem_three_where_each_of_its_bounds_is_the_smallest(t, numbers, value):
    np.testing.assert_allclose(TheoremThree(*numbers)(t), value, rtol=1e-12)
    np.testing.assert_allclose(printed_theorem_three(t, *numbers), value, rtol=1e-12)


def test_theorem_three_regression_number():
    schedule = TheoremThree(8, 4, 2.6618399e-5, np.sqrt(1877.5), 27)
    np.testing.assert_allclose(schedule(0), 2.8848288e-5, rtol=2e-8)


def test_parse_schedule_reads_what_the_command_line_writes():
    for text, schedule in (
        ("0.1", Constant(0.1)),
        ("1e-3", Constant(1e-3)),
        ("decay:0.5:8", CubeRootDecay(0.5, 8)),
        ("decay:0.5:8:0.6", PowerDecay(0.5, 8, 0.6)),
        ("theorem3:43.3:27", TheoremThree(8, 4, 0.25, 43.3, 27)),
    ):
        parsed = parse_schedule(text, clients=8, local_steps=4, rho1=0.25)
        assert type(parsed) is type(schedule)
        assert eqx.tree_equal(parsed, schedule)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "decay", "decay:1", "decay:1:2:3:4", "decay:a:8", "theorem3:1", "1:2"],
)
def test_parse_schedule_names_what_it_cannot_read(text):
    with pytest.raises(InvalidInputError, match=f"eta='{text}' is no schedule"):
        parse_schedule(text, clients=8, local_steps=4, rho1=0.25)


def test_a_number_that_the_precision_does_not_hold_is_refused():
    with jax.enable_x64(False):
        for value in (1e39, -1e308):
            with pytest.raises(InvalidInputError, match="too large for this prec"):
                as_number(value)
        assert np.isinf(as_number(np.inf)) and as_number(3e38).dtype == jnp.float32


def test_numbers_become_array_leaves_that_do_not_recompile():
    for value in (1, 0.5, np.float32(0.5), jnp.asarray(2)):
        number = as_number(value)
        assert isinstance(number, jax.Array) and number.dtype == jnp.float64
        assert not number.weak_type and float(number) == float(value)
    traces = []

    @eqx.filter_jit
    def evaluate(schedule):
        traces.append(schedule)
        return schedule(3)

    for c0 in (1, 0.5, np.float32(0.25)):
        schedule = CubeRootDecay(c0, 5)
        assert len(jax.tree.leaves(schedule)) == 2
        np.testing.assert_allclose(evaluate(schedule), c0 / 2, rtol=1e-15)
    assert len(traces) == 1
    assert eqx.tree_equal(as_schedule(0.5), Constant(0.5))
    assert as_schedule(schedule) is schedule


@pytest.mark.parametrize("algorithm", POWERS)
def test_effective_values_use_the_step_now_and_the_weight_before(algorithm):
    eta, power = CubeRootDecay(0.5, 8), POWERS[algorithm]
    letters = dict(alpha=0.9, beta=0.8, rho1=0.3, rho2=0.7)
    built = algorithm(RULE, eta, **letters, local_steps=3)
    for t in (0, 1, 20):
        now, before = 0.5 / np.cbrt(8 + t), 0.5 / np.cbrt(8 + max(t - 1, 0))
        expected = {
            "upper_step": 0.3 * now,
            "lower_step": 0.7 * now,
            "upper_weight": 0.9 * before**power,
            "lower_weight": 0.8 * before**power,
        }
        found = built.effective_values(t)
        assert found == pytest.approx(expected, rel=1e-14, abs=0)


steps, weights = st.floats(1e-4, 10), st.floats(0.01, 0.99)


@pytest.mark.parametrize("algorithm", POWERS)
@by_numbers
@given(
    eta=st.builds(Constant, st.floats(1e-3, 2))
    | st.builds(CubeRootDecay, st.floats(1e-2, 2), st.floats(1, 100)),
    step=st.tuples(steps, steps),
    weight=st.tuples(weights, weights),
)
def test_letters_and_effective_values_convert_both_ways(algorithm, eta, step, weight):
    values = dict(
        upper_step=step[0],
        lower_step=step[1],
        upper_weight=weight[0],
        lower_weight=weight[1],
    )
    one = algorithm.effective(RULE, **values, eta=eta, local_steps=3)
    assert one.effective_values() == pytest.approx(values, rel=1e-12, abs=0)
    letters = {name: float(getattr(one, name)) for name in LETTERS}
    first = float(eta(0))
    written = dict(
        alpha=weight[0] / first ** POWERS[algorithm],
        beta=weight[1] / first ** POWERS[algorithm],
        rho1=step[0] / first,
        rho2=step[1] / first,
    )
    assert letters == pytest.approx(written, rel=1e-12, abs=0)
    two = algorithm(RULE, eta, **letters, local_steps=3)
    assert two.effective_values() == pytest.approx(values, rel=1e-12, abs=0)
    again = algorithm.effective(RULE, **two.effective_values(), eta=eta, local_steps=3)
    assert {name: float(getattr(again, name)) for name in LETTERS} == pytest.approx(
        letters, rel=1e-12, abs=0
    )


def with_optax():
    eta = optax.exponential_decay(0.5, transition_steps=10, decay_rate=0.9)
    return LocalBSGM(RULE, eta, alpha=0.9, beta=0.8, rho1=0.3, rho2=0.7, local_steps=3)


def test_an_optax_schedule_is_an_eta():
    expected = {
        "upper_step": 0.3 * 0.5 * 0.9**0.5,
        "lower_step": 0.7 * 0.5 * 0.9**0.5,
        "upper_weight": 0.9 * 0.5 * 0.9**0.4,
        "lower_weight": 0.8 * 0.5 * 0.9**0.4,
    }
    assert with_optax().effective_values(5) == pytest.approx(expected, rel=1e-12, abs=0)


def test_an_optax_schedule_is_an_eta_inside_a_program():
    built, t = with_optax(), jnp.asarray(5, jnp.int32)
    found = jax.jit(lambda t: (built.step(t).x, built.weight(t).x))(t)
    np.testing.assert_allclose(found, [0.15 * 0.9**0.5, 0.45 * 0.9**0.4], rtol=1e-6)


def test_an_optax_schedule_can_be_written_down():
    assert json.loads(json.dumps(with_optax().parameters()))["rho1"] == 0.3


def test_a_class_that_says_nothing_of_itself_has_its_name_and_its_fields():
    class Bare:
        length: float = number("how far it goes")

    lines = documented(Bare).splitlines()
    assert lines[0] == "Bare." and "    `length`: how far it goes." in lines
