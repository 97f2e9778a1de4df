"""Steps that a run measures, on random quadratics: scales, conditions, clients, steps.

    g_k(x, y) = 0.5 y'A_k y + x'C_k y + a_k'y
    f_k(x, y) = 0.5 |y - b_k|^2 + 0.05 |x|^2

in units of one's own: x = s_x x', y = s_y y', g = s_g g'.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.algorithms import SteadySteps
from fedbilevel.algorithms.presets import FedBiOControls
from fedbilevel.problem import ClientData
from fedbilevel.runtime import Job, SimulatorRuntime, execute
from fedbilevel.tasks.quadratic import PROBLEM, client_rows
from fedbilevel.units import OfCurvature, OfDistance

DX, DY = 3, 4
SCALES = st.tuples(*[st.sampled_from([1e-3, 1.0, 1e3])] * 3)


def drawn(seed, clients, condition):
    """Return (A, C, a, b) of every client, all of A with this condition number."""
    draw = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(draw.normal(size=(DY, DY)))
    between = np.exp(draw.uniform(-np.log(condition), 0, DY - 2))
    A = basis @ np.diag([1 / condition, *between, 1.0]) @ basis.T
    C, a, b = (draw.normal(size=size) for size in ((DX, DY), DY, DY))
    return [
        (
            A * draw.uniform(0.5, 1.5),
            C + 0.5 * draw.normal(size=C.shape),
            a + draw.normal(size=DY),
            b + draw.normal(size=DY),
        )
        for _ in range(clients)
    ]


def ended(problem, rounds, p, scales=(1.0, 1.0, 1.0)):
    """Return x in the units of the problem after some rounds, with steps measured."""
    s_x, s_y, s_g = scales
    rows = [
        client_rows(
            s_g * A / s_y**2, s_g * C / (s_x * s_y), s_g * a / s_y, b * s_y, 0.0, 0.0
        )
        for A, C, a, b in problem
    ]
    for upper, _ in rows:
        upper["r"] = np.asarray([0.1 * (s_y / s_x) ** 2])
    data = ClientData.from_clients([up for up, _ in rows], [low for _, low in rows])
    steps = OfDistance(1.0), OfCurvature(0.25), OfCurvature(0.25)
    method = SteadySteps(FedBiOControls(*steps, local_steps=p))
    start = s_x * jnp.arange(1.0, DX + 1), -s_y * jnp.arange(1.0, DY + 1)
    job = Job.of(method, PROBLEM, data, *start, seed=0)
    outcome = execute(SimulatorRuntime(job), rounds, measure_every=rounds)
    return np.asarray(outcome.state.server.server.point.x) / s_x


def gap(problem, x):
    """Return Phi(x) - min Phi of the mean problem, by NumPy."""
    A, C, a, b = (np.mean(block, axis=0) for block in zip(*problem, strict=True))
    spread = np.mean([0.5 * np.sum((one[3] - b) ** 2) for one in problem])

    def value(x):
        y = -np.linalg.solve(A, C.T @ x + a)
        return 0.5 * np.sum((y - b) ** 2) + spread + 0.05 * np.sum(x**2)

    inverse = np.linalg.inv(A)
    matrix = 0.1 * np.eye(DX) + C @ inverse @ inverse @ C.T
    best = np.linalg.solve(matrix, -C @ inverse @ (inverse @ a + b))
    return value(x) - value(best)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clients", "p", "condition", "rounds"),
    [(1, 1, 30.0, 10_000)],
)
@settings(max_examples=3)
@given(seed=st.integers(0, 99), share=st.floats(0, 1), scales=SCALES)
def test_steps_that_are_measured_converge(
    clients, p, condition, rounds, seed, share, scales
):
    """However a problem is scaled, up to the condition number: the value falls."""
    problem = drawn(seed, clients, condition**share)
    x = ended(problem, rounds, p, scales)
    assert gap(problem, x) < 0.5 * gap(problem, np.arange(1.0, DX + 1))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@settings(max_examples=5)
@given(
    seed=st.integers(0, 10**6),
    condition=st.floats(0.1, 4).map(lambda power: 10**power),
    clients=st.integers(1, 50),
    p=st.integers(1, 20),
    scales=st.tuples(*[st.floats(-3, 3).map(lambda power: 10**power)] * 3),
)
def test_quadratics_of_all_kinds_converge(seed, condition, clients, p, scales):
    """Half of the gap is left at most, in rounds that grow slowly with L/mu."""
    problem = drawn(seed, clients, condition)
    rounds = int(6_000 * max(condition / 10, 1) ** (1 / 3) / p**0.5)
    x = ended(problem, rounds, p, scales)
    assert gap(problem, x) < 0.5 * gap(problem, np.arange(1.0, DX + 1))


@pytest.mark.slow
def test_a_lower_level_of_condition_number_10000_is_solved():
    """In some sqrt(10,000) rounds where plain steps of y need 10,000 and more."""
    problem = drawn(2, 3, 1e4)
    start = gap(problem, np.arange(1.0, DX + 1))
    assert gap(problem, ended(problem, 5000, 20)) < 1e-3 * start


def test_units_do_not_matter_to_a_run_that_went_back():
    """It explodes in round 22, and goes on from the start with what was measured."""
    problem = drawn(0, 2, 100.0)
    usual = ended(problem, 40, 20)
    scaled = ended(problem, 40, 20, (1e-3, 1e3, 1.0))
    np.testing.assert_allclose(scaled, usual, rtol=1e-6)


@pytest.mark.slow
@settings(max_examples=4)
@given(scales=SCALES)
def test_units_do_not_matter(scales):
    """After as many rounds x is where it is in any other units."""
    problem = drawn(5, 3, 20.0)
    usual = ended(problem, 60, 2)
    np.testing.assert_allclose(ended(problem, 60, 2, scales), usual, rtol=1e-6)
    assert not np.allclose(usual, np.arange(1.0, DX + 1), rtol=1e-2)
