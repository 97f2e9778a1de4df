"""What a run leaves on disk: results and checkpoints come back bit for bit."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import fedbilevel
from fedbilevel import ClientData, Keeping, Problem, Result, Sampling, Stopping
from fedbilevel._blocks import NOTHING
from fedbilevel._files import write_atomically
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.local.local_bsgvrm import LocalBSGVRM
from fedbilevel.errors import CheckpointError
from fedbilevel.hypergradient import Neumann
from fedbilevel.runtime import (
    Checkpoints,
    Job,
    ReferenceRuntime,
    SimulatorRuntime,
    checkpoint,
)
from fedbilevel.runtime.exchange import start_state
from fedbilevel.studies.single import versions

pytestmark = pytest.mark.two_devices

METHODS = pytest.mark.parametrize("method", [LocalBSGM, LocalBSGVRM])
# Three clients on the two devices of the tests need padding, which is never kept. The
# reference runtime has no devices, and takes a second for a few steps.
PLACES = pytest.mark.parametrize(
    ("runtime", "clients", "participants"),
    [
        (SimulatorRuntime, 3, 3),
        (SimulatorRuntime, 3, 2),
        (ReferenceRuntime, 2, 2),
        pytest.param(ReferenceRuntime, 2, 1, marks=pytest.mark.slow),
    ],
)


def bits(arrays: dict[str, np.ndarray]) -> dict[str, tuple]:
    """Return what must agree: NaN equals itself, and -0 is not 0."""
    return {
        name: (str(a.dtype), a.shape, np.asarray(a).tobytes())
        for name, a in arrays.items()
    }


def upper(x, y, rows):
    return 0.5 * jnp.mean((y - rows["b"]) ** 2) + 0.5 * x**2


def lower(x, y, rows):
    return 0.5 * jnp.mean(rows["h"] * (y - x - rows["a"]) ** 2)


# Scalars, so that the reference runtime has few operations to go through. Rows differ,
# so that a resumed run must meet the same draws.
PROBLEM = Problem(upper, lower)
START = (jnp.zeros(()), jnp.ones(()))


def rows_of(clients: int) -> ClientData:
    draw, each = np.random.default_rng(0), range(clients)
    above = [{"b": draw.normal(size=4)} for _ in each]
    below = [{"a": draw.normal(size=4), "h": draw.uniform(1, 2, 4)} for _ in each]
    return ClientData.from_clients(above, below)


def tiny(method=LocalBSGM) -> Any:
    return method.effective(
        Neumann(q=1, theta=0.4),
        upper_step=0.05,
        lower_step=0.1,
        upper_weight=0.3,
        lower_weight=0.4,
        local_steps=2,
    )


def run(
    method=LocalBSGM,
    clients: int = 3,
    participants: int | None = None,
    **changes: Any,
) -> Result:
    sampling = Sampling(batch=1, participants=participants)
    arguments = {"rounds": 4, "seed": 5, "sampling": sampling, **changes}
    return fedbilevel.run(PROBLEM, rows_of(clients), START, tiny(method), **arguments)


def stop_at_two(done: int, total: int, newest: dict[str, float]) -> None:
    if done >= 2:
        raise KeyboardInterrupt


def interrupt(folder: Path, method=LocalBSGM, **changes: Any) -> None:
    """Stop a run after round 2, where a checkpoint that is due makes the host look."""
    keeping = Keeping(folder, every_rounds=2)
    with pytest.raises(KeyboardInterrupt, match=r"After round 2 of 4\. Kept in"):
        run(method, keeping=keeping, watch=stop_at_two, **changes)


def example() -> Result:
    # Values that a detour over text or over another type would change.
    odd = [0.1, -0.0, np.nan, np.inf, 5e-324]
    return Result(
        task="a task",
        algorithm="an algorithm",
        config={"rounds": 5, "parameters": {"eta": 0.1, "q": None, "name": "π"}},
        versions=versions(),
        columns={
            "round": np.arange(1, 6, dtype=np.int64),
            "double": np.asarray(odd, np.float64),
            "single": np.asarray([0.1, -0.0, np.nan, 1e-45, 3.0], np.float32),
        },
        point={"x.w": np.full((2, 3), 0.1, np.float32), "y": np.asarray(1 / 3)},
        final={"double": 0.1, "x": [0.1, 0.2]},
        counts={"rounds": 5, "calls": {"hessian_product": 7}},
        seconds={"compile": 1 / 3, "run": 0.1},
        ended="after all 5 rounds",
    )


def test_a_saved_result_loads_as_it_was(tmp_path):
    before = example()
    assert before.save(tmp_path / "new") == tmp_path / "new"
    after = Result.load(tmp_path / "new")
    assert bits(after.columns) == bits(before.columns)
    assert bits(after.point) == bits(before.point)
    for name in (*before.summary(), "versions"):
        assert getattr(after, name) == getattr(before, name), name


def test_what_json_cannot_write_becomes_null(tmp_path):
    summary = {**vars(example()), "final": {"loss": float("nan"), "best": np.inf}}
    Result(**summary).save(tmp_path)
    assert Result.load(tmp_path).final == {"loss": None, "best": None}


def test_a_folder_without_a_finished_run_does_not_load(tmp_path):
    with pytest.raises(CheckpointError, match="has not finished, or this is not"):
        Result.load(tmp_path)


@pytest.mark.slow
def test_an_interrupted_run_has_a_checkpoint_and_no_result(tmp_path):
    def stop(done, total, newest):
        raise KeyboardInterrupt

    # None is due by rounds or by time: it is the interruption that writes one.
    with pytest.raises(KeyboardInterrupt, match=r"After round 1 of 4\. Kept in"):
        run(keeping=Keeping(tmp_path, every_seconds=None), watch=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]
    with pytest.raises(CheckpointError, match=r"holds no result\.json"):
        Result.load(tmp_path)


def test_run_saves_what_it_returns(tmp_path):
    returned = run(keeping=Keeping(tmp_path))
    loaded = Result.load(tmp_path)
    assert bits(loaded.columns) == bits(returned.columns)
    assert bits(loaded.point) == bits(returned.point)
    costs = ("exchanges", "bytes", "samples")
    ends = {n: c[-1] for n, c in returned.columns.items() if n not in costs}
    assert loaded.final == ends
    assert loaded.config == returned.config
    assert loaded.counts == returned.counts


def test_a_result_tells_why_it_ended(tmp_path):
    assert run().ended == "after all 4 rounds"
    target = Stopping("upper_loss", target=1e9)
    returned = run(keeping=Keeping(tmp_path), stopping=target)
    assert returned.ended == "after round 1: upper_loss reached 1e+09"
    assert list(returned.columns["round"]) == [1]
    assert returned.counts["rounds"] == 1
    assert Result.load(tmp_path).ended == returned.ended


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "kept"
    path.write_bytes(b"old")

    def fail_midway(file):
        file.write(b"new")
        file.flush()
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        write_atomically(path, fail_midway)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_makes_its_folder_and_replaces_the_file(tmp_path):
    path = tmp_path / "deep" / "file"
    for text in (b"first, and longer", b"second"):
        write_atomically(path, lambda file, text=text: file.write(text))
        assert path.read_bytes() == text
    assert list(path.parent.iterdir()) == [path]


def bare_job(kind: Any) -> Job:
    # Two leaves a level. `Job.of` would refuse float32 next to the float64 of tests.
    x, y = ({"u": jnp.ones(3, kind), "v": jnp.ones((2, 2), kind)} for _ in "xy")
    key = jr.key(0)
    return Job(tiny(), PROBLEM, rows_of(3), x, y, None, key, NOTHING, 3, 3, 1, 1)


def random_state(job: Job, kind: Any):
    draw = np.random.default_rng(0)

    def fill(leaf: jax.Array) -> np.ndarray:
        values = 1e3 * draw.standard_normal(leaf.shape)
        return np.asarray(values).astype(leaf.dtype)

    state = jax.tree.map(fill, start_state(job))
    floats = {leaf.dtype for leaf in jax.tree.leaves(state.server)}
    assert floats == {np.dtype(kind)}
    return state


@pytest.mark.parametrize("kind", [jnp.float32, jnp.float64])
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, kind):
    job = bare_job(kind)
    state = random_state(job, kind)
    columns = {"round": np.asarray([2]), "loss": np.asarray([0.1], kind)}
    saved = checkpoint.Snapshot(state, columns, 2, {"compile": 1 / 3, "run": 0.1})
    checkpoint.save(tmp_path, saved, "mark")
    loaded = checkpoint.load(tmp_path, start_state(job), "mark")
    assert loaded is not None
    assert jax.tree.structure(loaded.state) == jax.tree.structure(state)
    pairs = zip(*map(jax.tree.leaves, (loaded.state, state)), strict=True)
    for new, old in pairs:
        assert bits({"leaf": new}) == bits({"leaf": old})
    assert bits(loaded.columns) == bits(columns)
    assert (loaded.round, loaded.seconds) == (2, {"compile": 1 / 3, "run": 0.1})


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    blank = start_state(bare_job(float))
    assert checkpoint.load(tmp_path, blank, "mark") is None


def assert_same_trajectory(one: Result, other: Result) -> None:
    assert bits(one.columns) == bits(other.columns)
    assert bits(one.point) == bits(other.point)
    assert one.final == other.final
    assert one.counts == other.counts


@pytest.mark.slow
@PLACES
@METHODS
def test_resumed_is_the_run_never_stopped(
    tmp_path, method, runtime, clients, participants
):
    changes = {"runtime": runtime, "clients": clients, "participants": participants}
    whole = run(method, **changes)
    interrupt(tmp_path, method, **changes)
    seen = []
    resumed = run(
        method,
        keeping=Keeping(tmp_path, resume=True),
        watch=lambda done, total, newest: seen.append(done),
        **changes,
    )
    assert seen[0] == 3  # it went on, and did not start anew
    assert list(whole.columns["round"]) == [1, 2, 3, 4]
    assert_same_trajectory(resumed, whole)
    assert_same_trajectory(Result.load(tmp_path), whole)


def test_the_same_call_goes_on_after_an_interrupt(tmp_path):
    """Nobody says that it is to resume."""
    interrupt(tmp_path)
    seen = []
    again = run(keeping=Keeping(tmp_path), watch=lambda done, *_: seen.append(done))
    assert seen[0] == 3
    assert_same_trajectory(again, run())


def test_resume_before_the_first_measurement(tmp_path):
    # The checkpoint after round 2 holds no columns yet.
    whole = run(measure_every=3)
    interrupt(tmp_path, measure_every=3)
    resumed = run(keeping=Keeping(tmp_path, resume=True), measure_every=3)
    assert list(resumed.columns["round"]) == [3, 4]
    assert_same_trajectory(resumed, whole)


def test_resuming_a_finished_run_repeats_its_result(tmp_path):
    whole = run(keeping=Keeping(tmp_path))
    again = run(keeping=Keeping(tmp_path))
    assert_same_trajectory(again, whole)


def test_a_longer_run_continues_a_finished_one(tmp_path):
    run(keeping=Keeping(tmp_path))
    longer = run(keeping=Keeping(tmp_path, resume=True), rounds=6)
    assert_same_trajectory(longer, run(rounds=6))


def test_checkpoints_are_due_by_rounds_or_by_seconds(tmp_path):
    by_time = Checkpoints(tmp_path, every_seconds=5.0)
    assert [by_time.due(99, seconds) for seconds in (4.9, 5.0)] == [False, True]
    by_rounds = Checkpoints(tmp_path, every_rounds=3)
    assert [by_rounds.due(rounds, 99.0) for rounds in (2, 3)] == [False, True]
    both = Checkpoints(tmp_path, every_rounds=3, every_seconds=5.0)
    assert both.due(3, 0.0) and both.due(0, 5.0) and not both.due(2, 4.9)
