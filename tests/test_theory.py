"""The theorems' constants, inequalities and bounds, and what they promise of a run."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import ClientData
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, execute
from fedbilevel.tasks.quadratic import PROBLEM, ClosedForm, client_rows
from fedbilevel.theory.constants import Constants, Inputs
from fedbilevel.theory.plan import theory_plan
from fedbilevel.theory.theorems import (
    Condition,
    _variance_weights,
    bound,
    conditions,
    dominating,
    largest_steps,
)

UNIT = Constants(Inputs(1.0, 1.0, 1.0, 1.0, 0.5, 0.1), theta=0.5, q=10)


def digits(value: float, printed: str) -> None:
    """Compare a number with another as it was printed, to all its digits."""
    mantissa = printed.partition("e")[0]
    places = len(mantissa.partition(".")[2])
    unit = 10.0**-places * float("1e" + (printed.partition("e")[2] or "0"))
    assert abs(value - float(printed)) <= 0.5000001 * unit, (value, printed)


def test_the_constants_of_the_regression():
    digits(UNIT.l_phi, "27")
    digits(UNIT.l_hat**2, "1877.5")
    digits(UNIT.l_tilde, "9")
    digits(UNIT.g_squared, "368.63")
    digits(UNIT.delta_q, "0.0844702721")


@pytest.mark.parametrize(
    ("theorem", "alpha", "rho2", "rho1", "eta"),
    [
        (1, "1", "0.0191678170", "3.1946362e-5", "0.0768917313"),
        (2, "234.6875", "0.0466985571", "6.4859107e-5", "2.8848288e-5"),
        (3, "237.1321615", "0.0063884157", "2.6618399e-5", "2.8848288e-5"),
    ],
)
def test_the_largest_steps_of_the_regression(theorem, alpha, rho2, rho1, eta):
    found = largest_steps(theorem, UNIT, clients=8, local_steps=4)
    digits(found.alpha, alpha)
    digits(found.rho2, rho2)
    digits(found.rho1, rho1)
    digits(found.eta, eta)


def test_the_weight_of_the_regression():
    _, v = _variance_weights(UNIT, largest_steps(2, UNIT, clients=8, local_steps=4))
    digits(v, "52035.869")


@pytest.mark.parametrize(("strict", "found"), [(False, 0.25), (True, 0.24)])
def test_a_limit_of_few_digits_is_reached_unless_it_is_strict(
    strict, found, monkeypatch
):
    def alone(theorem, c, s):
        letters = ("rho2", "rho1", "eta")
        return [Condition(theorem, "", one, 0.0, 0.25, strict) for one in letters]

    monkeypatch.setattr("fedbilevel.theory.theorems.conditions", alone)
    steps = largest_steps(1, UNIT, 8, 4, digits=2)
    assert (steps.rho2, steps.rho1, steps.eta) == (found,) * 3


@pytest.mark.parametrize("theorem", [1, 2, 3])
def test_largest_steps_satisfy_their_theorem_and_larger_ones_do_not(theorem):
    s = largest_steps(theorem, UNIT, 8, 4)
    inside = replace(s, eta=0.999 * s.eta) if theorem < 3 else s
    assert all(one.holds for one in conditions(theorem, UNIT, inside))
    for letter in ("rho1", "rho2", "eta"):
        wider = replace(inside, **{letter: 1.01 * getattr(s, letter)})
        broken = [one for one in conditions(theorem, UNIT, wider) if not one.holds]
        assert letter in {one.letter for one in broken}
        for one in broken:
            assert one.slack < 1 and one.letter in one.advice()


def test_theorems_two_and_three_are_separate_regimes():
    third = largest_steps(3, UNIT, 8, 4)
    broken = [one.name for one in conditions(2, UNIT, third) if not one.holds]
    assert "alpha <= Lhat^2/K" in broken


@pytest.mark.parametrize("theorem", [1, 2, 3])
def test_bounds_fall_with_clients_and_iterations(theorem):
    inputs = Inputs(1.0, 1.0, 0.1, 0.1, 0.5, 0.1)
    T = 10**16
    # With theta mu = 1 nothing is truncated: Q stays, and with it all logarithms of it.
    plans = [
        theory_plan(theorem, inputs, K, sizes=(5, 6), iterations=T * more, theta=2.0)
        for K, more in ((1, 1), (8, 1), (1, 8))
    ]
    one, clients, longer = (plan.promise for plan in plans)
    power = 0.5 if theorem == 1 else 2 / 3
    # Theorem 3 has a logarithm of T, and p is a whole number.
    for other in (clients, longer):
        assert abs(math.log(one / other) / math.log(8) - power) < 0.003
    assert plans[0].dominating == dominating(plans[0].terms)


@pytest.mark.slow
@pytest.mark.parametrize("theorem", [1, 2, 3])
def test_a_plan_for_a_target_keeps_its_word(theorem):
    inputs = Inputs(1.0, 1.0, 0.1, 0.1, 0.5, 0.1)
    plan = theory_plan(theorem, inputs, 4, sizes=(5, 6), target=0.05)
    assert 0.9 * 0.05 < plan.promise <= 0.05
    np.testing.assert_allclose(sum(plan.terms.values()), plan.promise)
    assert plan.rounds == math.ceil(plan.iterations / plan.local_steps)
    assert plan.floats_up == plan.rounds * 2 * (5 + 6)
    assert plan.samples_per_client >= plan.iterations * (plan.q + 3)


def test_a_plan_says_when_it_is_outside_the_corollary():
    inputs = Inputs(1.0, 1.0, 0.0, 0.0, 0.5, 0.1)
    short = theory_plan(1, inputs, 8, sizes=(1, 1), iterations=8**3 - 1)
    assert "below K^3 = 512" in short.notes[0]
    assert not theory_plan(1, inputs, 8, sizes=(1, 1), iterations=8**3).notes
    assert theory_plan(2, inputs, 8, sizes=(1, 1), iterations=63).notes
    assert not theory_plan(2, inputs, 8, sizes=(1, 1), iterations=64).notes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mu": 0.0}, "0 < mu <= l1"),
        ({"l1": 0.1}, "0 < mu <= l1"),
        ({"sigma": math.nan}, "finite"),
    ],
)
def test_constants_that_cannot_be(change, told):
    with pytest.raises(InvalidInputError, match=told):
        replace(UNIT.inputs, **change)


@pytest.mark.parametrize(("theta", "q"), [(0.0, 1), (-0.1, 1), (0.1, -1)])
def test_a_series_has_a_step_and_no_less_than_no_factors(theta, q):
    with pytest.raises(InvalidInputError, match="needs theta > 0, q >= 0"):
        replace(UNIT, theta=theta, q=q)
    assert replace(UNIT, q=0).q == 0


few = settings(max_examples=8)


@pytest.mark.slow
@few
@given(
    seed=st.integers(0, 2**16),
    size=st.floats(0.1, 1.0),
    mu=st.floats(0.5, 0.9),
    q=st.just(3),
)
def test_conditions_that_hold_imply_descent(seed, size, mu, q):
    """Without noise, at the largest steps of Theorem 1, Phi falls and M is bounded."""
    draw = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(draw.standard_normal((3, 3)))
    A = basis @ np.diag([mu, 1.0, 1.0]) @ basis.T
    C, a, b = size * draw.standard_normal((2, 3)), *draw.standard_normal((2, 3))
    rows = [client_rows(A, C, a, b, 0.5, 0.0)] * 2
    data = ClientData.from_clients([u for u, _ in rows], [w for _, w in rows])
    closed, x0 = ClosedForm.of(data), jnp.ones(2)
    y0 = closed.lower_solution(x0)
    full = np.block([[np.zeros((2, 2)), C], [C.T, A]])
    l1 = max(float(np.linalg.norm(full, 2)), 1.0)
    # f is not Lipschitz on the whole plane, but it is on a ball the run cannot leave.
    l0 = 2 * float(np.linalg.norm([*(0.5 * x0), *(y0 - b)]))
    c = Constants(Inputs(l0, l1, 0.0, 0.0, mu, 0.0), 0.5 / l1, q)
    s = largest_steps(1, c, 2, 2)
    s = replace(s, eta=0.99 * s.eta)
    assert all(one.holds for one in conditions(1, c, s))
    letters = (s.eta, s.alpha, s.beta, s.rho1, s.rho2)
    algorithm = LocalBSGM(Neumann(q, c.theta), *letters, local_steps=2)
    exact = Sampling(None)
    job = Job.of(algorithm, PROBLEM, data, x0, y0, metrics=closed, sampling=exact)
    outcome = execute(SimulatorRuntime(job), 60)
    x = outcome.state.server.point.x

    def phi(x):
        y = closed.lower_solution(x)
        return float(0.5 * jnp.sum((y - b) ** 2) + 0.25 * jnp.sum(x**2))

    assert phi(x) < phi(x0)
    best = phi(closed.solution())
    measured = outcome.columns["grad_norm_sq"]
    measured = measured + c.l_tilde**2 * outcome.columns["lower_error"] ** 2
    promised = sum(bound(1, c, s, 120, phi(x0) - best, 0.0).values())
    assert float(np.mean(measured)) <= promised
