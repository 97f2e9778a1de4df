"""Where the later federated methods end on the task two-client, whose x is 1."""

import numpy as np
import pytest

from fedbilevel.algorithms.e_aipod import EAiPOD
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.runtime import SimulatorRuntime, execute
from tests.test_known_answers import two_client_job


def end_of(algorithm, rounds):
    job = two_client_job(algorithm)
    state = execute(SimulatorRuntime(job), rounds, measure_every=rounds).state
    return algorithm.point(state.server)


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


@pytest.mark.parametrize("rho", [1.0, 0.5])
def test_recursions_from_the_mean_directions_do_not_drift(rho):
    """FedMSA with 16 local steps, where FedBiO would stop elsewhere."""
    point = end_of(FedMSA(0.02, 0.05, rho, local_steps=16), 300)
    np.testing.assert_allclose(point.x, 1, atol=1e-6)
    np.testing.assert_allclose(point.y, 0.5, atol=1e-6)
