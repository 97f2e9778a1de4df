"""What is done once for all clients, where they are many: draws, passes, checks."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import every_client
from fedbilevel.problem.every_client import map_clients, mean_of_clients
from fedbilevel.runtime import Job, Sampling, keys
from fedbilevel.runtime.exchange import start_state
from fedbilevel.runtime.layout import AXIS, Layout
from fedbilevel.tasks import quadratic

pytestmark = pytest.mark.two_devices
TWO_SORTS = 1700  # clients, of whom bits of 32 would be equal too often for one sort


def numpys_order(root, turn: int, clients: int) -> list[int]:
    """Sort by the same bits with NumPy, as often as `jr.permutation` does."""
    key = jr.fold_in(jr.fold_in(jr.fold_in(root, 16), 0), turn)
    order = np.arange(clients)
    for _ in range(int(np.ceil(3 * np.log(clients) / np.log(2**32 - 1)))):
        key, drawn = jr.split(key)
        bits = np.asarray(jr.bits(drawn, (clients,), jnp.uint32))
        order = order[np.argsort(bits, kind="stable")]
    return order.tolist()


@pytest.mark.parametrize("clients", [2, 37, TWO_SORTS])
def test_cohorts_are_the_first_of_a_permutation(clients):
    root = jr.key(3)
    drawn = keys.draw_cohort(root, keys.ROUNDS, 0, 5, clients, clients - 1)
    assert drawn.dtype == jnp.int32
    assert drawn.tolist() == numpys_order(root, 5, clients)[: clients - 1]
    key = jr.fold_in(jr.fold_in(jr.fold_in(root, 16), 0), 5)
    assert drawn.tolist() == jr.permutation(key, clients)[: clients - 1].tolist()


def test_equal_bits_keep_the_order_of_clients():
    bits = jnp.asarray([7, 2**32 - 1, 7, 0, 7, 0], jnp.uint32)
    assert keys._ranked(bits).tolist() == [3, 5, 0, 2, 4, 1]


def test_devices_that_share_the_draw_draw_the_same():
    layout = Layout(TWO_SORTS, 20, devices=2, at_once=None)
    nowhere = jax.sharding.PartitionSpec()

    def drawn(root):
        where = (keys.ROUNDS, 0, 9, TWO_SORTS, 20)
        return keys.draw_cohort(root, *where, layout.at_keys)[None]

    everywhere = jax.jit(
        jax.shard_map(
            drawn,
            mesh=layout.mesh(),
            in_specs=nowhere,
            out_specs=jax.sharding.PartitionSpec(AXIS),
            check_vma=False,
        )
    )
    found = np.asarray(everywhere(jr.key(3))).reshape(2, 20)
    assert (found == numpys_order(jr.key(3), 9, TWO_SORTS)[:20]).all()


@pytest.mark.parametrize("held", [1, 3, 100])
def test_passes_over_clients_do_not_depend_on_how_many_are_held(held, monkeypatch):
    monkeypatch.setattr(every_client, "_FLOATS", held)
    numbers = jnp.arange(7.0)

    def value(one):
        # The entry of a client that is no client must not count, whatever it is.
        return {"a": jnp.stack([one, one**2]), "b": jnp.where(one == 2, jnp.nan, one)}

    found = map_clients(value, numbers, 1)
    np.testing.assert_array_equal(found["a"], [[k, k * k] for k in range(7)])
    shares = np.asarray([0.1, 0.2, 0.0, 0.1, 0.1, 0.1, 0.4])
    mean = mean_of_clients(value, numbers, jnp.asarray(shares), 1)
    expected = [shares @ np.arange(7), shares @ np.arange(7) ** 2]
    np.testing.assert_allclose(mean["a"], expected, rtol=1e-14)
    np.testing.assert_allclose(mean["b"], shares @ np.arange(7), rtol=1e-14)


def test_no_gradients_of_all_clients_are_held_at_once(monkeypatch):
    """Of 7 clients two are held; the largest number of entries in the program tells."""
    monkeypatch.setattr(every_client, "_FLOATS", 2 * 1000)
    traced = jax.make_jaxpr(
        lambda s: mean_of_clients(lambda k: jnp.full(1000, k), s, s, 1000)
    )(jnp.ones(7))
    sizes = [
        variable.aval.size
        for equation in traced.jaxpr.eqns
        for variable in equation.outvars
    ]
    assert max(sizes) == 1000


def job_of(algorithm, clients: int) -> Job:
    task = quadratic.make(clients)
    sampling = Sampling(1, 1)
    return Job.of(algorithm, task.problem, task.data, task.x, task.y, sampling=sampling)


def test_clients_that_keep_nothing_have_nothing_stored():
    state = start_state(job_of(FedAvg(0.1, local_steps=1), 50))
    assert jax.tree.leaves(state.clients) == []


def test_of_many_large_clients_some_are_looked_at(monkeypatch):
    algorithm = LocalBSGM.effective(
        Neumann(2, 0.4),
        upper_step=0.1,
        lower_step=0.1,
        upper_weight=0.1,
        lower_weight=0.1,
        local_steps=1,
    )
    job = job_of(algorithm, 50)
    assert job._looked_at().tolist() == list(range(50))
    monkeypatch.setattr("fedbilevel.runtime.job._SOON", 11 * 20)  # dx + dy = 11
    found = job._looked_at()
    assert len(found) == 20 == len(set(found.tolist()))
    assert (found[0], found[-1]) == (0, 49)
    assert set(np.diff(found)) <= {2, 3}
