"""Messages in half precision, both ways: how far off, how many bytes, the same run."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedbilevel import ClientData, FedAvg, Problem
from fedbilevel._types import Pair
from fedbilevel.channels import BFloat16, Channel, Mean, Median, Privacy, SecureMean
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.clients import read_channel
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.wire import EVERYONE, Header, pack, unpack, unpack_tree
from fedbilevel.runtime import (
    Job,
    ReferenceRuntime,
    Sampling,
    SimulatorRuntime,
    count,
    execute,
)
from tests.cases import (
    case_of,
    data_for,
    quadratic_data,
    quadratic_job,
    some_of,
    with_precision,
)
from tests.federation import Loopback, of_all_rows, server_of, site_of

UP, DOWN = Channel((BFloat16(),)), Channel((), Mean(), BFloat16())
BOTH = Channel((BFloat16(),), Mean(), BFloat16())
HEADER = Header("exchange", "f1", "settings", "algorithm", EVERYONE, 1)


def assert_close(a, b, tolerance=1e-12):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def to_eight_bits(numbers: np.ndarray) -> np.ndarray:
    """Round to 8 significant bits, ties to the even one."""
    fraction, exponent = np.frexp(np.asarray(numbers, np.float64))
    return np.ldexp(np.round(fraction * 2**8), exponent - 8)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_number_is_off_by_a_256th_of_itself_at_most(kind):
    draw = np.random.default_rng(0)
    numbers = draw.normal(size=100_000) * 2.0 ** draw.integers(-60, 60, 100_000)
    numbers = np.append(numbers, [0.0, 1 + 2**-8, 1 + 3 * 2**-8]).astype(kind)

    def there_and_back(numbers):
        # In one program, where XLA may leave out what it takes for idle.
        sent = UP.encode(numbers, UP.start(numbers), jr.key(0))[0]
        down = DOWN.received(DOWN.sent(numbers), numbers)
        return UP.decode(sent, numbers), down

    up, down = jax.jit(there_and_back)(jnp.asarray(numbers))
    assert up.dtype == down.dtype == kind
    np.testing.assert_array_equal(up, to_eight_bits(numbers))
    np.testing.assert_array_equal(down, to_eight_bits(numbers))
    off = np.abs(np.asarray(up)[numbers != 0] / numbers[numbers != 0] - 1).max()
    assert 0.99 * 2**-8 < off <= 2**-8


def test_single_numbers_and_whole_ones_are_told_as_they_are():
    third = jnp.asarray(1 / 3)
    message = (Pair({"a": jnp.full(3, 1 / 3), "b": third}, third), third, jnp.arange(3))
    sent = DOWN.sent(message)
    kinds = [leaf.dtype.name for leaf in jax.tree.leaves(sent)]
    # A number in a block with arrays is one of them.
    assert kinds == ["bfloat16", "bfloat16", "float64", "float64", "int64"]
    heard = DOWN.received(sent, message)
    assert heard[0].y == heard[1] == third and heard[0].x["b"] != third
    assert Channel().sent(message) is message


def loopback(job: Job, **more) -> Loopback:
    return Loopback({10 + k: site_of(job, k, **more) for k in range(job.clients)})


# Clients that keep nothing, that keep private blocks, and that get messages of their
# own; replies that travel whole, and that are clipped and rounded as well.
FEDERATED = {
    "down": ("momentum-local-sgd", DOWN, None),
    "both": ("fedbio", BOTH, None),
    "private": ("fedbioacc-local", BOTH, None),
    "cohort": ("fednest", BOTH, 2),
    "apart": ("fedmbo", DOWN, None),
    "clipped": (
        "momentum-local-sgd",
        Channel((Privacy(0.3), BFloat16()), Median(), BFloat16()),
        None,
    ),
}
LONG = ("both", "private", "cohort", "apart")  # to compile


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
        for name in FEDERATED
    ],
)
def test_packets_of_half_precision_make_the_numbers_of_the_simulator(name):
    method, channel, participants = FEDERATED[name]
    case, rounds = case_of(method), 2
    job = quadratic_job(
        case.algorithm, data_for(case, 3), channel=channel, participants=participants
    )
    simulated = execute(SimulatorRuntime(job), rounds)
    deployed = execute(server_of(job, loopback(job)), rounds)
    assert_close(simulated.state.server, deployed.state.server, 1e-11)
    costs, (down, up, headers) = count(job, rounds), deployed.state.traffic
    assert down + up - headers == costs["bytes_down"] + costs["bytes_up"]


@pytest.mark.slow
def test_masked_changes_of_a_rounded_point_make_those_numbers_too():
    channel = Channel((), SecureMean(), BFloat16())
    algorithm = case_of("momentum-local-sgd").algorithm
    job = of_all_rows(quadratic_job(algorithm, quadratic_data(3), channel=channel))
    simulated = execute(SimulatorRuntime(job), 2).state.server
    deployed = execute(server_of(job, loopback(job)), 2).state.server
    assert_close(simulated, deployed, 1e-9)  # as fine as masked numbers are


@pytest.mark.slow
def test_simulator_is_reference_with_half_precision():
    algorithm = case_of("fedbio-clientwise").algorithm
    job = quadratic_job(algorithm, quadratic_data(3), channel=BOTH, participants=2)
    fast, slow = (
        execute(made(job), 2) for made in (SimulatorRuntime, ReferenceRuntime)
    )
    assert_close((fast.state, fast.columns), (slow.state, slow.columns))


@pytest.mark.parametrize(("channel", "down", "up"), [(DOWN, 2, 4), (UP, 4, 2)])
def test_what_is_rounded_has_half_the_bytes(channel, down, up):
    algorithm = case_of("momentum-local-sgd").algorithm
    job = quadratic_job(algorithm, quadratic_data(3), channel=channel)
    each = count(with_precision(job, "float32"), 2)["per_client_and_round"]
    assert each["floats_down"] == each["floats_up"] > 0
    assert each["bytes_down"] == down * each["floats_down"]
    assert each["bytes_up"] == up * each["floats_up"]


def test_what_is_short_already_keeps_its_digits():
    message = {"short": jnp.asarray([1.001], jnp.float16), "long": jnp.ones(1)}
    sent = DOWN.sent(message)
    assert sent["long"].dtype == jnp.bfloat16
    assert sent["short"].dtype == jnp.float16 and sent["short"] == message["short"]


def square(x, y, rows):
    return jnp.mean((rows["a"] * (y - rows["t"])) ** 2)


def averaged(channel: Channel, step: float, rounds: int):
    """Minimize mean_k a_k^2 |y - t_k|^2 from y = 1 and return y."""
    rows = [{"a": np.ones((2, 1)) * a, "t": np.ones((2, 4)) * a} for a in (1.0, 2.0)]
    job = Job.of(
        FedAvg(step, local_steps=1),
        Problem(square, square),
        ClientData.from_clients(rows, rows),
        jnp.zeros(()),
        jnp.ones(4),
        sampling=Sampling(None),
        channel=channel,
    )
    return np.asarray(execute(SimulatorRuntime(job), rounds).state.server.point.y)


@pytest.mark.parametrize(
    "channel", some_of([BOTH, UP, DOWN], 1), ids=["both", "up", "down"]
)
def test_steps_below_the_rounding_are_not_lost(channel):
    step, rounds = 2.0**-10, 40
    expected = 1.0
    for _ in range(rounds):
        # Slopes of (y - 1)^2 and 4 (y - 2)^2, each a mean over the four entries of y.
        slopes = [2 * (expected - 1) / 4, 8 * (expected - 2) / 4]
        expected -= step * np.mean(slopes)
    found = averaged(channel, step, rounds)
    assert expected - 1 > 0.03
    # Every slope is off by a 256th, and by that of the point, a 256th of 1.
    np.testing.assert_allclose(found - 1, expected - 1, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("channel", [UP, DOWN, BOTH], ids=["up", "down", "both"])
def test_a_run_ends_within_the_rounding_of_the_minimum(channel):
    found = averaged(channel, 0.5, 60)
    minimum = (1 * 1 + 4 * 2) / 5  # of (y - 1)^2 + 4 (y - 2)^2
    np.testing.assert_allclose(averaged(Channel(), 0.5, 60), minimum, rtol=1e-9)
    np.testing.assert_allclose(found, minimum, rtol=2**-8)


def test_bfloat16_travels_by_its_name_and_is_looked_at():
    leaf = np.asarray(jnp.asarray([[1.5, -2.0], [3e38, 1e-30]], jnp.bfloat16))
    _, listed, body = unpack(pack(HEADER, [leaf]), 1 << 20)
    assert listed == [["bfloat16", [2, 2], None]] and len(body) == 8
    found = unpack_tree(listed, body, leaf)
    assert found.dtype == leaf.dtype and (found == leaf).all()
    with pytest.raises(RefusedError, match="dtype: .*bfloat16.* where <f4 is expected"):
        unpack_tree(listed, body, leaf.astype(np.float32))
    _, listed, body = unpack(pack(HEADER, [leaf * leaf.dtype.type(np.inf)]), 1 << 20)
    with pytest.raises(RefusedError, match="not-finite"):
        unpack_tree(listed, body, leaf)


def test_both_ways_are_read_and_recorded():
    assert read_channel(compress="bfloat16", compress_down="bfloat16") == BOTH
    experiment = Experiment(
        "two-client", "fedavg", rounds=1, local_steps=1, compress_down="bfloat16"
    )
    built = experiment.build()
    assert built.job().channel == DOWN
    assert (
        built.config["compress_down"] == "bfloat16" and "compress" not in built.config
    )
    assert built.job().channel.describe()["down"] == {"kind": "BFloat16"}
    for text, told in [
        ("topk:0.1", "compress_down 'topk'. Known: bfloat16"),
        ("bfloat16:8", "write it like bfloat16"),
    ]:
        with pytest.raises(InvalidInputError, match=told):
            read_channel(compress_down=text)
