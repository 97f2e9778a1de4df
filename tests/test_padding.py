"""Rows are padded to few sizes: that changes no run, and spares compiling again."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import tasks
from fedbilevel.algorithms.local.fedbio import FedBiO
from fedbilevel.algorithms.local.local_bsgm import LocalBSGM
from fedbilevel.algorithms.one_machine.saba import SABA
from fedbilevel.algorithms.presets import LFedNestSVRG
from fedbilevel.experiments import Experiment
from fedbilevel.hypergradient import ForwardGradient, Neumann
from fedbilevel.problem import ClientData, Oracle, Problem, padded, padded_count
from fedbilevel.problem import data as stacking
from fedbilevel.runtime import Job, Sampling, SimulatorRuntime, counts, execute
from fedbilevel.studies.single import run_job
from fedbilevel.studies.validation import held_out
from tests.cases import some_of

COMPILED = "/jax/core/compile/backend_compile_duration"
# None of them is one of the few sizes, so that even the largest client is padded.
UPPER_SIZES, LOWER_SIZES = (17, 9, 19), (33, 21, 35)


def test_there_are_few_sizes_and_little_padding():
    held = [padded_count(rows) for rows in range(1, 5000)]
    for rows, size in enumerate(held, start=1):
        assert rows <= size <= rows * 9 / 8
        assert rows >= 16 or size == rows
        assert padded_count(size) == size  # rows cut from such a stack are of one, too
    assert held == sorted(held)
    for power in range(4, 12):
        assert len(set(held[2**power - 1 : 2 ** (power + 1) - 1])) <= 9


def test_padding_is_zeros_after_the_rows():
    rows = np.arange(1.0, 2 * 17 * 3 + 1).reshape(2, 17, 3)
    found = padded(rows, axis=1)
    assert found.shape == (2, 18, 3)
    np.testing.assert_array_equal(found[:, :17], rows)
    np.testing.assert_array_equal(found[:, 17:], 0)
    data = ClientData.from_clients([rows[0], rows[0][:4]], [rows[1], rows[1]])
    assert data.upper.shape == data.lower.shape == (2, 18, 3)
    assert data.upper_sizes.tolist() == [17, 4]


def _upper(x, y, rows):
    return jnp.mean((rows["a"] @ y - rows["b"]) ** 2)


def _lower(x, y, rows):
    losses = jax.nn.softplus(rows["a"] @ y * rows["b"])
    return jnp.mean(losses) + 0.5 * jnp.sum(jnp.exp(x) * y**2)


def _rows(size: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng([size, seed])
    return {"a": draw.normal(size=(size, 3)), "b": draw.normal(size=size)}


def _data() -> ClientData:
    return ClientData.from_clients(
        [_rows(size, k) for k, size in enumerate(UPPER_SIZES)],
        [_rows(size, 10 + k) for k, size in enumerate(LOWER_SIZES)],
    )


@pytest.fixture
def exact(monkeypatch):
    """Return what stacks rows without any padding but that to the largest client."""

    def without(make: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(stacking, "padded_count", lambda rows: rows)
            return make()

    return without


def _assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


NEST: dict[str, Any] = {"alpha": 0.2, "beta": 0.3, "inner_rounds": 2, "local_steps": 2}
METHODS = {
    "few rows drawn": (FedBiO(0.1, 0.2, 0.15, local_steps=2), 4, False),
    "all rows": (FedBiO(0.1, 0.2, 0.15, local_steps=2), None, False),
    "parts that come again": (SABA(0.1, 0.2, 0.15, parts=5, local_steps=3), 1, True),
    "anchors": (LFedNestSVRG(Neumann(2, 0.3), **NEST), 4, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", some_of(METHODS, 1))
def test_padding_changes_no_run(kind, exact):
    method, batch, pools = METHODS[kind]

    def run(data: ClientData) -> tuple[list, dict[str, Any]]:
        chosen = data.pooled() if pools else data
        start = (jnp.zeros(3), jnp.ones(3))
        problem, sampling = Problem(_upper, _lower), Sampling(batch)
        job = Job.of(method, problem, chosen, *start, sampling=sampling, seed=3)
        outcome = execute(SimulatorRuntime(job), 4)
        return jax.tree.leaves(outcome.columns), counts.count(job, 4)

    plain = exact(_data)
    assert plain.lower["b"].shape == (3, 35)
    assert _data().lower["b"].shape == (3, 36)
    found, told = run(_data())
    expected, costs = run(plain)
    _assert_close(found, expected)
    assert told == costs


def _table(path: Path, rows: int) -> str:
    """Write a table with two groups, a label of two classes, and a number."""
    draw = np.random.default_rng(rows)
    values, group = draw.normal(size=(rows, 3)), draw.integers(0, 2, rows)
    score = values @ [1.0, -0.5, 0.2] + 0.3 * draw.normal(size=rows)
    lines = [
        f"{a:.6f},{b:.6f},{c:.6f},{'mf'[g]},{'no' if s < 0 else 'yes'},{s + c:.6f}"
        for (a, b, c), g, s in zip(values, group, score, strict=True)
    ]
    file = path / f"{rows}.csv"
    file.write_text("\n".join(["a,b,c,sex,told,amount", *lines]))
    return str(file)


TASKS: dict[str, dict[str, Any]] = {
    "regularization": {"label": "told"},
    "regularization of numbers": {"label": "amount"},
    "cleaning": {"label": "told"},
    "loss-tuning": {"label": "told"},
    "representation": {"label": "told", "width": 3},
    "fairness": {"label": "told", "group": "sex"},
}


def _task(kind: str, file: str) -> Any:
    options: Any = {"data": file, **TASKS[kind]}
    return tasks.find(kind.partition(" ")[0])(2, **options)


@pytest.mark.parametrize("kind", some_of(TASKS, 2))
def test_padding_changes_no_measurement(kind, exact, tmp_path):
    file = _table(tmp_path, 421)

    def measured() -> tuple[list[np.ndarray], tuple[int, ...]]:
        task = _task(kind, file)
        # Entries of x beyond the rows have no say, whatever they are.
        x, y = jax.tree.map(
            lambda leaf: jnp.cos(jnp.arange(1.0, leaf.size + 1)).reshape(leaf.shape),
            (task.x, task.y),
        )

        @jax.jit
        def everything():
            oracle = Oracle(task.problem, task.data, 1)
            upper = oracle.upper_loss(x, y, oracle.all_upper())
            lower = oracle.lower_loss(x, y, oracle.all_lower())
            return task.metrics(x, y), upper, lower

        return jax.tree.leaves(everything()), task.metrics.label.shape

    (found, shape), (expected, plain) = measured(), exact(measured)
    assert plain[-1] < shape[-1] == padded_count(plain[-1])
    _assert_close(found, expected)
    assert np.isfinite(found).all()


@pytest.mark.exhaustive
def test_padding_changes_no_weight_of_a_row(exact, tmp_path):
    file = _table(tmp_path, 421)
    # Directions are drawn for all of x, which has an entry for every row, and for more.
    rule = ForwardGradient(2, 0.2)
    method = LocalBSGM(rule, 0.1, 1.0, 1.0, 0.5, 0.8, local_steps=2)

    def run() -> tuple[list[float], np.ndarray]:
        task = _task("cleaning", file)
        start, metrics = (task.x, task.y), task.metrics
        job = Job.of(method, task.problem, task.data, *start, metrics=metrics)
        result = run_job(job, 3, config={})
        return list(result.final.values()), result.point["x"]

    (found, weights), (expected, plain) = run(), exact(run)
    _assert_close(found, expected)
    rows = plain.shape[-1]
    assert weights.shape[-1] == padded_count(rows) > rows
    _assert_close(weights[..., :rows], plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "regularization",
        pytest.param("cleaning", marks=pytest.mark.slow),
        pytest.param("fairness", marks=pytest.mark.exhaustive),
    ],
)
def test_another_number_of_rows_compiles_nothing(kind, tmp_path):
    names: list[str] = []

    def heard(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs
        if event == COMPILED:
            names.append(kwargs.get("fun_name", "?"))

    def run(rows: int) -> dict[str, Any]:
        options = {"data": _table(tmp_path, rows), **TASKS[kind]}
        return Experiment(kind, clients=2, rounds=2, options=options).run().final

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        run(1222)
        assert names  # a listener that hears nothing would tell nothing
        names.clear()
        run(1234)
        assert names == []
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def test_rows_held_out_are_of_few_sizes_too():
    # Of either a fifth is held out, 41 rows, and 165 or 168 are left.
    for size in (206, 209):
        rows = np.arange(1.0, size + 1)[:, None]
        kept, judged = held_out(ClientData.from_clients([rows], [rows]))
        assert judged is not None
        assert (kept.upper.shape[1], judged.upper.shape[1]) == (176, 44)
        left, taken = int(kept.upper_sizes[0]), int(judged.upper_sizes[0])
        assert (left, taken) == (size - size // 5, size // 5)
        each = np.concatenate([kept.upper[0, :left, 0], judged.upper[0, :taken, 0]])
        np.testing.assert_array_equal(np.sort(each), rows[:, 0])
