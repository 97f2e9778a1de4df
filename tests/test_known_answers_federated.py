"""Where the later federated methods end on the task two-client, whose x is 1."""

from typing import Any

import numpy as np
import pytest

from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.fedmsa import FedMSA
from fedbilevel.algorithms.local.simfbo import SimFBO
from fedbilevel.algorithms.nested.aggitd import AggITD
from fedbilevel.algorithms.nested.e_aipod import EAiPOD
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime import SimulatorRuntime, execute
from tests.test_known_answers import two_client_job


def end_of(algorithm, rounds):
    job = two_client_job(algorithm)
    state = execute(SimulatorRuntime(job), rounds, measure_every=rounds).state
    return algorithm.point(state.server)


@pytest.mark.slow
@pytest.mark.parametrize("chance", [1.0, 0.3, 0.1])
def test_skipped_exchanges_leave_no_bias(chance):
    """E-AiPOD: whatever the chance of an exchange is, and with several steps of x."""
    algorithm = EAiPOD(
        alpha=0.3,
        lr_y=0.2,
        probability=chance,
        inner_rounds=3,
        local_steps=3,
        ell=3.01,
        terms=60,
        random_length=False,
    )
    point = end_of(algorithm, 300)
    np.testing.assert_allclose(point.x, 1, atol=1e-6)
    np.testing.assert_allclose(point.y, 0.5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rho", [1.0, 0.5])
def test_recursions_from_the_mean_directions_do_not_drift(rho):
    """FedMSA with 16 local steps, where FedBiO would stop elsewhere."""
    point = end_of(FedMSA(0.02, 0.05, rho, local_steps=16), 300)
    np.testing.assert_allclose(point.x, 1, atol=1e-6)
    np.testing.assert_allclose(point.y, 0.5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("normalized", [True, False])
def test_clients_of_few_steps_count_as_much_only_if_sums_are_divided(normalized):
    """ShroFBO's y ends at 1/2 up to a drift of 1e-3, SimFBO's far from it."""
    algorithm = SimFBO(
        *[0.002] * 6, local_steps=10, fewest_steps=1, normalized=normalized
    )
    error = abs(float(end_of(algorithm, 4000).y[0]) - 0.5)
    assert error < 2e-3 if normalized else error > 0.05


def test_differences_leave_no_bias_where_the_lower_level_is_quadratic():
    point = end_of(FedBiO(0.5, 0.3, 0.3, local_steps=1, distance=0.1), 300)
    np.testing.assert_allclose(point.x, 1, atol=1e-6)


def test_numbers_of_steps_that_cannot_be_are_refused():
    with pytest.raises(InvalidInputError, match="at most local_steps, which is 2"):
        SimFBO(*[0.1] * 6, local_steps=2, fewest_steps=3)
    with pytest.raises(InvalidInputError, match="equal numbers of local steps. Leave"):
        SimFBO(*[0.1] * 6, local_steps=2, fewest_steps=1, drift="anchor")
    with pytest.raises(InvalidInputError, match=r"fewest_steps=...\)` must be at"):
        SimFBO(*[0.1] * 6, local_steps=2, fewest_steps=-1)


@pytest.mark.slow
def test_a_series_that_travels_with_lower_steps_inverts_the_mean_hessian():
    steps: dict[str, Any] = {"alpha": 0.3, "beta": 0.3, "lam": 0.3}
    algorithm = AggITD(**steps, terms=60, local_steps=2, random_length=False)
    point = end_of(algorithm, 200)
    np.testing.assert_allclose(point.x, 1, atol=1e-6)
    np.testing.assert_allclose(point.y, 0.5, atol=1e-6)
