"""A federation over packets makes the simulator's numbers, whatever goes wrong."""

import jax
import numpy as np

from fedbilevel.runtime import SimulatorRuntime, count, execute
from tests.cases import for_cases, quadratic_data, quadratic_job
from tests.federation import Loopback, server_of, site_of

FEDERATED = for_cases(lambda algorithm: not algorithm.pools)


def assert_close(a, b, tolerance):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def loopback(job, folder=None, **more) -> Loopback:
    return Loopback({10 + k: site_of(job, k, folder, **more) for k in range(job.sites)})


@FEDERATED
def test_packets_make_the_numbers_of_the_simulator(case):
    job = quadratic_job(case.algorithm, quadratic_data(3))
    simulated = execute(SimulatorRuntime(job), 3)
    net = loopback(job)
    deployed = execute(server_of(job, net), 3)
    assert_close(simulated.state.server, deployed.state.server, 1e-11)
    assert_close(simulated.columns, deployed.columns, 1e-11)
    # Bytes on the wire are those that were computed, and headers.
    costs = count(job, 3)
    down, up, headers = deployed.state.traffic
    assert down + up - headers == costs["bytes_down"] + costs["bytes_up"]
    assert len(deployed.state.attendance) == costs["exchanges"]
