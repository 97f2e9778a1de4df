"""Every bad input meets an error that says what, where, and what to do."""

import json
import re
import shutil
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel
from fedbilevel import ClientData, Keeping, Problem, Sampling, Stopping
from fedbilevel._files import read_arrays, write_arrays
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.errors import (
    CheckpointError,
    InvalidInputError,
    NonFiniteError,
    StageError,
)
from fedbilevel.experiments import Experiment
from fedbilevel.hypergradient import Neumann
from fedbilevel.problem import Oracle, broken_derivative
from fedbilevel.runtime import (
    Job,
    ReferenceRuntime,
    SimulatorRuntime,
    SweepRuntime,
    checkpoint,
    execute,
)
from fedbilevel.runtime.contract import failure
from fedbilevel.runtime.exchange import start_state
from fedbilevel.runtime.stopping import SPARSE
from fedbilevel.tasks import two_client

RUNTIMES = pytest.mark.parametrize(
    "runtime",
    [SimulatorRuntime, pytest.param(ReferenceRuntime, marks=pytest.mark.slow)],
)
START = (jnp.zeros(()), jnp.zeros(()))


def upper(x, y, rows):
    return 0.5 * jnp.mean((y - rows["b"]) ** 2) + 0.5 * x**2


def lower(x, y, rows):
    # Past its limit a client's gradient and curvature are NaN.
    factor = jnp.where(y > jnp.mean(rows["limit"]), jnp.nan, 1.0)
    return 0.5 * jnp.mean((y - x - rows["a"]) ** 2) * factor


PROBLEM = Problem(upper, lower)


def data_with(*limits: float, a: float = 1.0) -> ClientData:
    above = [{"b": np.asarray([1.0, 2.0])} for _ in limits]
    below = [{"a": np.full(2, a), "limit": np.full(2, limit)} for limit in limits]
    return ClientData.from_clients(above, below)


def halving(method: Any = LocalBSGM, theta: float = 0.5, **changes: Any) -> Any:
    """x rests, and y goes half the way to a = 1 in a step: 0, 0.5, 0.75, 0.875."""
    letters = {"eta": 1.0, "alpha": 1.0, "beta": 1.0, "rho1": 0.0, "rho2": 0.5}
    return method(Neumann(q=1, theta=theta), **{**letters, "local_steps": 1, **changes})


def run(
    data: ClientData,
    algorithm: Any = None,
    problem=PROBLEM,
    sampling: dict[str, Any] | None = None,
    keeping: dict[str, Any] | None = None,
    **changes: Any,
):
    arguments = {
        "rounds": 6,
        "sampling": Sampling(**{"batch": 1, **(sampling or {})}),
        **changes,
    }
    if keeping is not None:
        arguments["keeping"] = Keeping(**keeping)
    return fedbilevel.run(problem, data, START, algorithm or halving(), **arguments)


def test_theta_too_large_for_the_series():
    task = two_client.make()

    def job(theta: float) -> Job:
        return Job.of(halving(theta=theta), task.problem, task.data, task.x, task.y)

    told = r"theta=0\.5\).*theta < 1/L1; on client 1 L1 is about 3 "
    with pytest.raises(InvalidInputError, match=told) as caught:
        job(theta=0.5)
    largest = re.findall(r"use at most ([\d.]+)\.$", str(caught.value))
    assert 0.3 < float(*largest) < 1 / 3
    job(theta=float(*largest))


@pytest.mark.parametrize(
    ("method", "letter", "product", "bound"),
    [
        (LocalBSGM, "alpha", "alpha*eta", 2.0),
        (LocalBSGM, "beta", "beta*eta", 2.0),
        (LocalBSGVRM, "alpha", "alpha*eta^2", 4.0),
        (LocalBSGVRM, "beta", "beta*eta^2", 4.0),
    ],
)
def test_momentum_weight_of_one_or_more(method, letter, product, bound):
    told = rf"{re.escape(product)} = 1 must be below 1.*use {letter} < {bound:g};"
    with pytest.raises(InvalidInputError, match=told):
        halving(method, eta=0.5, **{letter: bound})
    halving(method, eta=0.5, **{letter: 0.99 * bound})
    # Without memory is where both are 1.
    halving(method, eta=1.0, alpha=1.0, beta=1.0)
    with pytest.raises(InvalidInputError, match="= 1.5 must be below 1"):
        halving(method, eta=1.0, **{"alpha": 0.5, "beta": 0.5, letter: 1.5})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rounds": 0}, r"rounds=0, .*at least 1"),
        ({"measure_every": 0}, r"measure_every=0: .*at least 1"),
        ({"sampling": {"batch": 0}}, r"batch=0: draw at least one row"),
        ({"sampling": {"participants": 0}}, r"=0: .*between 1 and the 2 clients"),
        ({"sampling": {"participants": 3}}, r"=3: .*between 1 and the 2 clients"),
        ({"keeping": {"every_rounds": -1}}, r"checkpoint_rounds=-1 must be above 0"),
        ({"keeping": {"every_seconds": 0.0}}, r"checkpoint_seconds=0.0 must be above"),
    ],
    ids=str,
)
def test_sizes_out_of_range(tmp_path, changes, told):
    def watch(done, total, newest):
        assert done > 0, "the run goes backwards, without end"

    keeping = {"folder": tmp_path, **changes.get("keeping", {})}
    with pytest.raises(InvalidInputError, match=told):
        run(data_with(9, 9), watch=watch, **{**changes, "keeping": keeping})


@pytest.mark.parametrize("name", ["patience", "bytes", "samples", "seconds"])
def test_limits_that_are_none(name):
    limit: Any = {name: 0}
    with pytest.raises(InvalidInputError, match=rf"{name}=0\)`: it must be above 0"):
        Stopping(**limit)


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({"a": np.ones((0, 2))}, r"client 1 has no lower samples"),
        ({"a": np.ones((3, 4))}, r"client 1: one lower .*\(4,\).*client 0 .*\(2,\)"),
        ({"a": np.ones((3, 2)), "b": np.ones(5)}, r"client 1: .*of rows, .*\(5,\)\]"),
        (
            {"a": np.asarray([[0.0, 1.0], [2.0, 3.0], [4.0, np.nan]])},
            r"client 1: lower array 'a' holds NaN or infinity, first in row 2",
        ),
    ],
    ids=["empty", "shape", "rows", "nan"],
)
def test_data_of_one_client_that_cannot_be_used(second, told):
    good = {"a": np.ones((3, 2))}
    with pytest.raises(InvalidInputError, match=told):
        ClientData.from_clients([good, good], [good, second])


def without_y(x, y, rows):
    return jnp.mean(rows["b"]) * x**2


def summed(x, y, rows):
    return rows["b"].shape[0] * upper(x, y, rows)


def per_sample(x, y, rows):
    return (y - x - rows["a"]) ** 2


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (Problem(without_y, lower), r"`upper\(.*\)` does not depend on y"),
        (Problem(upper, per_sample), r"`lower\(.*\)` must return one number.*\.mean"),
        (Problem(summed, lower), r"`upper.* is 2\.5 on two rows.* 1\.25.*jnp\.mean"),
        (Problem(upper, without_y), r"`lower\(.*\)` fails on .*row of client 0: 'b'"),
    ],
    ids=["without y", "no scalar", "sum", "raises"],
)
def test_losses_that_no_algorithm_could_use(problem, told):
    with pytest.raises(InvalidInputError, match=told):
        run(data_with(9, 9), problem=problem)


def test_a_loss_that_drops_nan_depends_on_y_all_the_same():
    def squared_hinge(x, y, rows):
        return jnp.mean(jnp.where(y < rows["b"], (rows["b"] - y) ** 2, 0.0)) + x**2

    Job.of(halving(), Problem(squared_hinge, lower), data_with(9), *START)


def test_a_loss_that_is_nan_at_the_start():
    with pytest.raises(InvalidInputError, match=r"client 1: the lower loss is nan at"):
        run(data_with(9, -1, 9))


@pytest.mark.parametrize(
    ("above", "below", "size", "told"),
    [
        (
            lambda x: jnp.sqrt(x @ x),
            lambda y: 0,
            1,
            r"e derivative .*upper.* x\.s is nan",
        ),
        (lambda x: 0, lambda y: jnp.sqrt(y @ y), 1, r"e derivative .*lower.* y is nan"),
        (lambda x: 0, lambda y: (y**1.5).sum(), 1, r"second .*lower.* to y is inf"),
        (lambda x: 0, lambda y: 0, 1e200, r"e\+200 \('a', column 1\).*rescale"),
    ],
    ids=["upper", "lower", "second order", "column"],
)
def test_a_derivative_that_is_not_finite_at_the_start(above, below, size, told):
    rows = {"a": np.asarray([[1.0, size], [2.0, size]])}

    def upper(x, y, rows):
        return jnp.mean((rows["a"][:, 0] - y[0]) ** 2) + above(x["s"])

    def lower(x, y, rows):
        return jnp.mean((rows["a"] @ y) ** 2) + x["s"] @ y + below(y)

    client = ClientData.from_clients([rows], [rows])
    oracle = Oracle(Problem(upper, lower), client, 0, None, None)
    start = ({"s": jnp.zeros(2)}, jnp.zeros(2))
    assert re.search(told, broken_derivative(oracle, *start, second=True))


def test_a_broken_derivative_is_not_blamed_on_steps():
    def rooted(x, y, rows):
        return upper(x, y, rows) + jnp.sqrt(x**2)

    job = Job.of(halving(), Problem(rooted, lower), data_with(9), *START)
    named = str(failure(job, (0, 0, 0)).at("North"))
    assert named.startswith("round 1, phase 'local', client 0 (North): the reply")
    assert "upper loss with respect to x is nan" in named
    assert "Smaller" not in named
    # Later rounds have gone elsewhere, and what they met there is not looked for.
    assert "Smaller step sizes" in str(failure(job, (1, 0, 0)))


def test_a_curvature_that_is_not_finite_is_not_blamed_on_theta():
    def powers(x, y, rows):
        return jnp.mean(rows["a"]) * jnp.abs(y) ** 1.5 + 0.5 * (y - x) ** 2

    with pytest.raises(InvalidInputError, match=r"^client 0: No step.* to y is inf"):
        run(data_with(9), problem=Problem(upper, powers))


@RUNTIMES
def test_nan_names_client_round_and_last_good_checkpoint(tmp_path, runtime):
    # y is 0.75 after round 2, so client 2 computes NaN in round 3.
    data, kept = data_with(9, 9, 0.6), f"{tmp_path}, after round 2"
    told = rf"round 3, phase 'local', client 2: .*kept in {re.escape(kept)}\.$"
    with pytest.raises(NonFiniteError, match=told) as caught:
        run(data, runtime=runtime, keeping={"folder": tmp_path, "every_rounds": 1})
    error = caught.value
    assert (error.round, error.phase, error.client) == (3, "local", 2)
    assert error.checkpoint == kept
    job = Job.of(halving(), PROBLEM, data, *START)
    mark = checkpoint.fingerprint(job, every=SPARSE)
    last = checkpoint.load(tmp_path, start_state(job), mark)
    assert last is not None and last.round == 2
    assert last.state.server.point.y == 0.75


@RUNTIMES
def test_overflow_names_the_round(runtime):
    # y is 1e200 after round 1 on all clients, and -1e400 in round 2.
    told = r"round 2, phase 'local', client 0: .*No checkpoint was written"
    with pytest.raises(NonFiniteError, match=told) as caught:
        run(data_with(*3 * [1e300]), halving(rho2=1e200), runtime=runtime)
    assert caught.value.checkpoint is None


@RUNTIMES
def test_of_several_failing_clients_both_runtimes_name_the_same(runtime):
    # In round 3 of seed 3 the cohort is drawn in the order 3, 2, 1, and all fail.
    with pytest.raises(NonFiniteError, match=r"round 3, phase 'local', client 1:"):
        cohort = {"participants": 3}
        run(data_with(9, 0.6, 0.6, 0.6), runtime=runtime, sampling=cohort, seed=3)


@pytest.mark.slow
def test_a_loss_that_raises_during_a_round():
    armed = []

    def arm(done, total, newest):
        armed.append(done)

    def fragile(x, y, rows):
        # The reference runtime compiles nothing: rows have their values here.
        if armed and rows["limit"][0] == 7:
            raise ZeroDivisionError("broken on purpose")
        return lower(x, y, rows)

    told = r"round 2, phase 'local', stage 'local', client 1: ZeroDivisionError: broken"
    problem = Problem(upper, fragile)
    with pytest.raises(StageError, match=told) as caught:
        run(data_with(9, 7, 9), None, problem, runtime=ReferenceRuntime, watch=arm)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "two-clients"}, r"unknown task 'two-clients'.*mean 'two-client'\?"),
        ({"algorithm": "local-bsg"}, "unknown algorithm .*mean 'local-bsgm', "),
        ({"options": {"thet": "1"}}, "unknown option 'thet'.*mean 'theta', 'eta' or"),
        ({"options": {"lr_x": "big"}}, r"option lr_x='big' is not a number"),
        ({"options": {"noise": "big"}}, r"option noise='big' is not a number"),
        (
            {"algorithm": "local-bsgm", "options": {"eta": "linear:1"}},
            r"eta='linear:1' is no schedule",
        ),
        ({"runtime": "simulater"}, r"unknown runtime .*'simulator'\?.*reference"),
        ({"local_steps": 0}, r"local_steps=...\)` must be at least 1, got 0"),
    ],
)
def test_names_and_options_that_do_not_exist(changes, told):
    with pytest.raises(InvalidInputError, match=told):
        Experiment(**{"task": "two-client", "rounds": 1, **changes}).run()


def test_a_folder_that_is_in_use_or_not_there(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    told = "exists and is not empty. Choose another folder, or remove it"
    with pytest.raises(CheckpointError, match=told):
        run(data_with(9), keeping={"folder": tmp_path})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(CheckpointError, match=r"absent is not a run folder"):
        absent = {"folder": tmp_path / "absent", "resume": True}
        run(data_with(9), keeping=absent)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run(data_with(9, 9, 9), keeping={"folder": folder})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": halving(alpha=0.5)},
        {"algorithm": halving(LocalBSGVRM)},
        {"data": data_with(9, 9, 9, a=2.0)},
        {"seed": 1},
        {"sampling": {"batch": 2}},
        {"sampling": {"participants": 1}},
        {"measure_every": 2},
    ],
    ids=lambda change: next(iter(change.get("sampling", change))),
)
def test_a_checkpoint_of_another_configuration(finished, change):
    keeping = {"folder": finished, "resume": True}
    arguments = {"data": data_with(9, 9, 9), "keeping": keeping}
    with pytest.raises(CheckpointError, match=r"belongs to another configuration"):
        run(**{**arguments, **change})


@dataclass(frozen=True)
class Penalized:
    loss: Any
    strength: float

    def __call__(self, x, y, rows):
        return self.loss(x, y, rows) + self.strength * y**2

    def method(self, x, y, rows):
        return self(x, y, rows)


def closure(strength):
    return lambda x, y, rows: lower(x, y, rows) + strength * y**2


@pytest.mark.parametrize(
    "make",
    [
        lambda strength: Penalized(lower, strength),
        lambda strength: Penalized(lower, strength).method,
        lambda strength: Penalized(Penalized(lower, strength), 0.0),
        lambda strength: closure(strength),
        lambda strength: closure(np.asarray(strength)),
        lambda strength: jax.jit(closure(strength)),
        lambda strength: partial(Penalized.__call__, Penalized(lower, strength)),
    ],
    ids=["field", "method", "deep", "closure", "array", "compiled", "partial"],
)
def test_a_loss_with_another_number_is_another_configuration(make):
    job = Job.of(halving(), PROBLEM, data_with(9), *START)

    def mark(strength: float) -> str:
        other = replace(job, problem=Problem(upper, make(strength)))
        return checkpoint.fingerprint(other, every=1)

    assert mark(0.5) == mark(0.5) != mark(0.25)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_damaged_checkpoint(finished, tmp_path, share):
    folder = shutil.copytree(finished, tmp_path / "copy")
    path = folder / "checkpoint.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    told = rf"{re.escape(str(path))} cannot be read as a checkpoint.*damaged"
    with pytest.raises(CheckpointError, match=told):
        run(data_with(9, 9, 9), keeping={"folder": folder, "resume": True})


@pytest.mark.parametrize("packed", [True, False])
def test_a_checkpoint_that_grows_is_refused_unread(
    finished, tmp_path, monkeypatch, packed
):
    """Zeros take a thousandth packed; and a state has the size of the job's."""
    folder = shutil.copytree(finished, tmp_path / "copy")
    path = folder / "checkpoint.npz"
    arrays = {**read_arrays(path), "state/more": np.zeros(2**20, np.uint8)}
    if packed:
        np.savez_compressed(path, **arrays)
    else:
        write_arrays(path, arrays)
        monkeypatch.setattr(checkpoint, "_ROOM", 2**19)
    monkeypatch.setattr(np.lib.format, "read_array", None)
    with pytest.raises(CheckpointError, match=r"it would unpack to 1,\d\d\d,\d\d\d by"):
        run(data_with(9, 9, 9), keeping={"folder": folder, "resume": True})


def test_a_checkpoint_of_an_older_format(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    path = folder / "checkpoint.npz"
    arrays = read_arrays(path)
    about = json.loads(arrays["about"].tobytes())
    assert about["format"] == 6
    older = json.dumps({**about, "format": 5}).encode()
    write_arrays(path, {**arrays, "about": np.frombuffer(older, np.uint8)})
    told = (
        rf"{re.escape(str(path))} has format 5, this version reads 6\. Finish .* "
        r"version of fedbilevel that began it, or start it again in a new folder\."
    )
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=told):
        run(data_with(9, 9, 9), keeping={"folder": folder, "resume": True})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithms": [halving(), halving(local_steps=2)]}, r"local_steps or q"),
        ({"algorithms": [halving(), halving(LocalBSGVRM)]}, r"kinds of parts"),
        ({"algorithms": 2 * [halving()], "seeds": [1]}, r"one to one, got 2 and 1"),
        ({}, r"one to one, got 0 and 0"),
        ({"rounds": 0, "seeds": [1]}, r"rounds=0.*at least 1"),
    ],
    ids=["counts", "kinds", "lengths", "nothing", "rounds"],
)
def test_a_sweep_that_cannot_be_one_program(changes, told):
    def sweep(rounds: int = 2, **lists: Any) -> None:
        job = Job.of(halving(), PROBLEM, data_with(9, 9), *START)
        execute(SweepRuntime(job, **lists), rounds)

    with pytest.raises(InvalidInputError, match=told):
        sweep(**changes)


@pytest.mark.parametrize("algorithms", [halving(), []], ids=["no seed", "nothing"])
def test_a_sweep_of_nothing(algorithms):
    with pytest.raises(InvalidInputError, match="at least one algorithm and one seed"):
        fedbilevel.sweep(
            PROBLEM, data_with(9, 9), START, algorithms, rounds=2, seeds=()
        )
