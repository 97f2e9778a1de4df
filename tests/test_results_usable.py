"""What one does with a result, while a run goes on, and when it is stopped."""

import json
import os
import pydoc
import re
import signal
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from typer.testing import CliRunner

import fedbilevel as fb
from fedbilevel.algorithms import Preset, ServerOptimizer
from fedbilevel.algorithms.wrappers import steady
from fedbilevel.algorithms.wrappers.optimizer import Descent
from fedbilevel.cli.app import app
from fedbilevel.errors import (
    CheckpointError,
    FedbilevelError,
    InvalidInputError,
    NonFiniteError,
)
from fedbilevel.experiments import Experiment
from fedbilevel.saved import read_saved
from fedbilevel.tracking import check_tracking, tracker
from tests.test_result import PROBLEM, START, lower, rows_of, run, tiny, upper

WIDTH = 4


def rows(seed: int, count: int = 6) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    inputs = draw.normal(size=(count, 3))
    return {"inputs": inputs, "targets": np.sin(inputs[:, :1])}


def judged(x, y, batch):
    return jnp.mean((jax.vmap(y)(batch["inputs"]) - batch["targets"]) ** 2)


def trained(x, y, batch):
    arrays = jax.tree.leaves(eqx.filter(y, eqx.is_array))
    return judged(x, y, batch) + jnp.exp(x["log"]) * sum(jnp.sum(a**2) for a in arrays)


def network() -> eqx.nn.MLP:
    return eqx.nn.MLP(3, 1, WIDTH, 1, jax.nn.tanh, key=jr.key(0))


MODEL = fb.Problem(judged, trained)
DATA = fb.ClientData.from_clients([rows(0), rows(1)], [rows(2), rows(3)])


def run_network(start: Any = None, **more: Any) -> fb.Result:
    start = start or ({"log": jnp.asarray(-3.0)}, network())
    method = fb.FedBiO(0.01, 0.05, 0.03, local_steps=2)
    arguments = {"rounds": 3, "sampling": fb.Sampling(batch=None), **more}
    return fb.run(MODEL, DATA, start, method, **arguments)


@pytest.fixture(scope="module")
def found() -> fb.Result:
    metrics = {"metrics": lambda x, y: {"at_one": y(jnp.ones(3))[0]}}
    return run_network(**metrics)


def forward(point: dict[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
    """Return tanh(W0 a + b0) W1 + b1 from the named leaves, by NumPy alone."""
    hidden = np.tanh(inputs @ point["y.layers.0.weight"].T + point["y.layers.0.bias"])
    return hidden @ point["y.layers.1.weight"].T + point["y.layers.1.bias"]


@pytest.mark.slow
def test_a_model_with_functions_in_it_is_a_start(found):
    """Its activation is no number, and must be there where losses see the model."""
    batches = [rows(0), rows(1)]
    errors = [
        np.mean((forward(found.point, one["inputs"]) - one["targets"]) ** 2)
        for one in batches
    ]
    assert found.final["upper_loss"] == pytest.approx(np.mean(errors), rel=1e-6)
    ones = forward(found.point, np.ones((1, 3)))[0, 0]
    assert found.final["at_one"] == pytest.approx(ones, rel=1e-6)


def test_x_and_y_come_back_in_the_structure_of_the_start(found, tmp_path):
    assert isinstance(found.y, eqx.nn.MLP) and set(found.x) == {"log"}
    inputs = jr.normal(jr.key(5), (4, 3))
    expected = forward(found.point, np.asarray(inputs))
    assert np.allclose(jax.vmap(found.y)(inputs), expected, rtol=1e-6)
    found.save(tmp_path)
    again = fb.Result.load(tmp_path, like=({"log": 0.0}, network()))
    assert np.array_equal(jax.vmap(again.y)(inputs), jax.vmap(found.y)(inputs))
    assert float(again.x["log"]) == float(found.x["log"])


def test_a_loaded_result_has_its_parts_by_name(found, tmp_path):
    loaded = fb.Result.load(found.save(tmp_path))
    assert set(loaded.y["layers"]) == {"0", "1"}
    kept = found.point["y.layers.1.weight"]
    assert np.array_equal(loaded.y["layers"]["1"]["weight"], kept)
    with pytest.raises(CheckpointError, match=r"no place for y\.layers\.0\.bias"):
        fb.Result.load(tmp_path, like=({"log": 0.0}, jnp.zeros(3)))


def test_names_with_dots_do_not_hide_each_other():
    point = {"x.a": np.zeros(1), "x.a.b": np.ones(2), "y": np.ones(3)}
    one = fb.Result("t", "a", {}, {}, {}, point, {}, {}, {})
    assert {name: leaf.size for name, leaf in one.x.items()} == {"a": 1, "a.b": 2}
    assert one.y.size == 3


def test_what_cannot_be_kept_is_named():
    start = ({"log": jnp.asarray(0.0)}, {"w": network(), "odd": {1, 2}.union})
    start[1]["odd"] = type("Odd", (), {"__hash__": None})()
    with pytest.raises(InvalidInputError, match="start y holds a leaf of type Odd"):
        run_network(start)


def test_numbers_of_a_plain_tree_are_optimized_those_of_a_module_are_not():
    class Scaled(eqx.Module):
        weight: jax.Array
        factor: float

    def loss(x, y, batch):
        return jnp.mean((y.factor * y.weight - batch["b"]) ** 2) + 0.5 * x**2

    problem = fb.Problem(loss, loss)
    start = (0.25, Scaled(jnp.asarray(1.0), 2.0))
    data = fb.ClientData.from_clients([{"b": np.zeros(2)}], [{"b": np.zeros(2)}])
    method = fb.FedBiO(0.1, 0.1, 0.1, local_steps=1)
    result = fb.run(problem, data, start, method, rounds=1)
    assert result.y.factor == 2.0
    assert float(result.y.weight) == pytest.approx(1 - 0.1 * 2 * 2 * 2, rel=1e-6)
    assert float(result.x) != 0.25


def test_metrics_may_see_the_server():
    def metrics(x, y, server):
        return {"size": jnp.abs(server.blocks.z), "x": server.state.point.x}

    method = fb.FedBiO(0.1, 0.1, 0.1, local_steps=1)
    found = fb.run(PROBLEM, rows_of(3), START, method, rounds=3, metrics=metrics)
    assert (found.columns["z_norm"] > 0).all()
    np.testing.assert_allclose(found.columns["size"], found.columns["z_norm"])
    assert found.columns["x"][-1] == found.x


@pytest.mark.slow
def test_metrics_may_see_the_measured_curvature():
    def metrics(x, y, server):
        return {"curvature": server.curvature}

    data, every = rows_of(3), fb.Sampling(batch=None)
    more = {"rounds": 2, "runtime": fb.ReferenceRuntime, "metrics": metrics}
    method = fb.FedBiO(local_steps=1)  # whose steps are measured
    around = ServerOptimizer(method, Descent(1.0))
    for one in (method, around):
        found = fb.run(PROBLEM, data, START, one, sampling=every, **more)
        # Of a client it is the mean of h, and L1 the fourth root of their mean power.
        each = np.asarray(data.lower["h"]).mean(axis=1)
        expected = np.mean(each**4) ** 0.25
        np.testing.assert_allclose(found.columns["curvature"], expected, rtol=1e-5)

    def known(x, y, server):
        return {"measured": jnp.asarray(server.curvature is not None)}

    more["metrics"] = known
    plain = fb.run(PROBLEM, data, START, tiny(), sampling=every, **more)
    assert not plain.columns["measured"].any()


@pytest.mark.slow
def test_the_guide_writes_the_residual_as_a_metric():
    guide = Path(__file__).parents[1] / "docs" / "own-tasks.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), flags=re.DOTALL)
    (block,) = [one for one in blocks if "residual" in one]
    data = rows_of(1)
    above, below = (
        {n: a[0] for n, a in part.items()} for part in (data.upper, data.lower)
    )
    names = {"upper": upper, "lower": lower, "above": above, "below": below}
    names |= {"jax": jax, "jnp": jnp}
    exec(compile(block, "own-tasks.md", "exec"), names)

    def metrics(x, y, server):
        return {"z": server.blocks.z, "y": y, **names["metrics"](x, y, server)}

    method = fb.FedBiO(0.1, 0.1, 0.1, local_steps=1)
    every = {"sampling": fb.Sampling(batch=None), "runtime": fb.ReferenceRuntime}
    found = fb.run(PROBLEM, data, START, method, rounds=3, metrics=metrics, **every)
    y, z = found.columns["y"], found.columns["z"]
    product = np.mean(below["h"]) * z
    expected = np.abs(product - np.mean(y[:, None] - above["b"], axis=1))
    np.testing.assert_allclose(found.columns["residual"], expected, rtol=1e-4)


@pytest.mark.slow
def test_a_result_is_named_after_the_preset_also_inside_of_wrappers():
    more = {"rounds": 1, "runtime": fb.ReferenceRuntime, "sampling": fb.Sampling(None)}
    steps = {"lr_x": 0.1, "lr_y": 0.1, "lr_z": 0.1, "local_steps": 1}
    preset = fb.FedBiOControls(**steps)
    for method in (preset, ServerOptimizer(preset, Descent(1.0)), steady(preset)):
        result = fb.run(PROBLEM, rows_of(2), START, method, **more)
        assert result.algorithm == "FedBiOControls"
    plain = fb.run(PROBLEM, rows_of(2), START, fb.FedBiO(**steps), **more)
    assert plain.algorithm == "FedBiO"


def test_without_a_batch_it_is_all_rows_unless_they_are_many():
    def holding(*counts):
        level = [{"b": np.zeros(count)} for count in counts]
        return fb.ClientData.from_clients(level, level)

    several, few = holding(600, 600), fb.Sampling(participants=1)
    assert few.rows(several) is None and few.rows(several.pooled()) == 32
    assert few.rows(holding(2, 999)) is None and few.rows(holding(2, 1000)) == 32
    assert fb.Sampling(7).rows(several) == 7
    assert fb.Sampling(None).rows(holding(2000)) is None


def test_a_result_is_told_in_two_lines(found):
    lines = repr(found).splitlines()
    assert len(lines) == 2 and all(len(line) < 100 for line in lines)
    assert "FedBiO" in lines[0] and "after all 3 rounds" in lines[0]
    assert lines[0].endswith("all rows a sample:") and found.config["batch"] is None
    assert f"upper_loss {found.final['upper_loss']:.5g}" in lines[1]
    table = found._repr_html_()
    assert table.count("<tr>") == 4 and "upper_loss" in table
    hostile = fb.Result("<b>", "a", {}, {}, {}, {}, {"<i>": 1.0}, {}, {})
    assert "<b>" not in hostile._repr_html_() and "<i>" not in hostile._repr_html_()


def test_columns_become_a_frame_or_a_sentence(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedbilevelError, match=r"pandas: install it, or read `result"):
        found.to_pandas()


def test_columns_become_a_frame(found):
    frame = found.to_pandas()
    assert list(frame["round"]) == [1, 2, 3]
    assert np.array_equal(frame["upper_loss"], found.columns["upper_loss"])


def test_a_plot_shows_the_columns(found):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = found.plot(["upper_loss", "at_one"], along="bytes")
    try:
        drawn = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
        assert set(drawn) == {"upper_loss", "at_one"}
        columns = (found.columns["bytes"], found.columns["at_one"])
        assert np.array_equal(drawn["at_one"], np.stack(columns, axis=1))
        assert found.plot(axes=axes) is axes
        with pytest.raises(InvalidInputError, match="Did you mean 'upper_loss'"):
            found.plot("uper_loss", axes=axes)
    finally:
        pyplot.close("all")


@pytest.mark.slow
def test_every_measured_round_is_told_once_in_order():
    events: list[Any] = []
    result = run(rounds=40, measure_every=3, on_round=events.append)
    assert [one.round for one in events] == list(result.columns["round"])
    assert {one.rounds for one in events} == {40}
    told = [one.values["upper_loss"] for one in events]
    assert told == list(result.columns["upper_loss"])
    seconds = [one.seconds for one in events]
    assert seconds == sorted(seconds)


def test_a_callback_ends_a_run_and_the_result_says_why(tmp_path):
    def stop(event):
        if event.round == 2:
            event.stop("the nurse said so")

    # Looked at after every second round, so that the end is known.
    keeping = fb.Keeping(tmp_path, every_rounds=2)
    result = run(rounds=40, on_round=stop, keeping=keeping)
    last = int(result.columns["round"][-1])
    assert last == 2
    assert result.ended == "after round 2: the nurse said so"
    assert fb.Result.load(tmp_path).ended == result.ended
    assert result.columns["upper_loss"][1] == run().columns["upper_loss"][1]


def test_a_resumed_run_tells_no_round_twice(tmp_path):
    def fail(event):
        raise ZeroDivisionError("a mistake in the callback")

    keeping = fb.Keeping(tmp_path, every_seconds=None)  # none is due by itself
    with pytest.raises(ZeroDivisionError):  # its work is kept all the same
        run(on_round=fail, keeping=keeping)
    events: list[Any] = []
    run(on_round=events.append, keeping=fb.Keeping(tmp_path, resume=True))
    assert [one.round for one in events] == [2, 3, 4]


class Pressed(fb.SimulatorRuntime):
    """Somebody presses Ctrl-C while the compiled program runs."""

    def advance(self, state, span):
        if span.start >= 1:
            os.kill(os.getpid(), signal.SIGINT)
        return super().advance(state, span)


@pytest.fixture
def ctrl_c():
    """Take Ctrl-C, which a process in the background of a shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_python_keeps_the_work_and_says_how_to_go_on(tmp_path, capfd, ctrl_c):
    with pytest.raises(KeyboardInterrupt) as caught:
        run(keeping=fb.Keeping(tmp_path, every_rounds=2), runtime=Pressed)
    told = str(caught.value)
    assert "After round 2 of 4. Kept in" in told
    assert f"keeping=Keeping({str(tmp_path)!r})" in told
    assert "fedbilevel resume" not in told
    assert "Press Ctrl-C again" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is ctrl_c
    resumed = run(keeping=fb.Keeping(tmp_path, resume=True))
    assert np.array_equal(resumed.point["y"], run().point["y"])


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_without_a_folder_says_that_nothing_is_kept():
    with pytest.raises(KeyboardInterrupt, match="Nothing was kept, as no folder"):
        run(rounds=50, runtime=Pressed, watch=lambda *_: None)


@pytest.mark.usefixtures("ctrl_c")
def test_the_second_ctrl_c_stops_at_once():
    class Twice(fb.SimulatorRuntime):
        def advance(self, state, span):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        run(runtime=Twice)


def test_a_folder_of_python_is_never_said_to_be_resumed_by_a_command(tmp_path):
    run(keeping=fb.Keeping(tmp_path))
    with pytest.raises(CheckpointError) as used:
        run(keeping=fb.Keeping(tmp_path, resume=False))
    with pytest.raises(CheckpointError) as loaded:
        Experiment.load(tmp_path)
    (tmp_path / "result.json").unlink()
    with pytest.raises(CheckpointError) as unfinished:
        fb.Result.load(tmp_path)
    for caught in (used, loaded, unfinished):
        assert f"`keeping=Keeping({str(tmp_path)!r})`" in str(caught.value)
        assert "fedbilevel resume" not in str(caught.value)


def test_a_folder_of_the_command_is_resumed_by_it(tmp_path):
    Experiment("quadratic").save(tmp_path)
    with pytest.raises(CheckpointError, match=f"`fedbilevel resume {tmp_path}`"):
        run(keeping=fb.Keeping(tmp_path))


@pytest.mark.slow
def test_a_folder_may_be_given_by_its_name(tmp_path):
    name = str(tmp_path / "run")
    experiment = Experiment("two-client", rounds=2)
    result = experiment.run(name)
    assert Experiment.load(name) == experiment
    (saved,) = read_saved(name).results[result.algorithm]
    assert saved.final == result.final


@pytest.mark.slow
def test_a_comparison_of_python_is_resumed_as_a_whole(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    arguments = (PROBLEM, rows_of(3), START, {"one": tiny()})
    home = tmp_path / "study"
    with pytest.raises(KeyboardInterrupt) as caught:
        fb.compare(
            *arguments, rounds=4, seeds=[5], keeping=fb.Keeping(home), watch=stop
        )
    assert f"Keeping({str(home)!r})" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"`keeping=Keeping"):
        kept = fb.Keeping(home, resume=False)
        fb.compare(*arguments, rounds=4, seeds=[5], keeping=kept)
    fb.compare(*arguments, rounds=4, seeds=[5], keeping=fb.Keeping(home))


def exploding(folder: Path | None, **more: Any) -> NonFiniteError:
    steps = {"upper_step": 0.05, "lower_step": 1e60}
    weights = {"upper_weight": 0.3, "lower_weight": 0.4}
    method = fb.LocalBSGM.effective(
        fb.Neumann(q=1, theta=0.4), **steps, **weights, local_steps=2
    )
    keeping = None if folder is None else fb.Keeping(folder, **more)
    with pytest.raises(NonFiniteError) as caught:
        fb.run(PROBLEM, rows_of(3), START, method, rounds=9, keeping=keeping)
    return caught.value


def test_a_run_that_diverges_tells_the_truth_about_checkpoints(tmp_path):
    assert "Ask for them" in str(exploding(None))
    early = str(exploding(tmp_path / "early"))
    assert "none was due yet" in early and "Ask for them" not in early
    late = exploding(tmp_path / "late", every_rounds=1)
    assert f"kept in {tmp_path / 'late'}, after round {late.round - 1}." in str(late)


def test_a_run_that_diverges_names_theta_and_the_curvature():
    assert "theta=0.4 needs a lower level that curves less than 1/theta = 2.5" in str(
        exploding(None)
    )


def public() -> list[tuple[str, Any]]:
    """Return every class, and every preset, that `fedbilevel` exports."""
    named = [(name, getattr(fb, name)) for name in sorted(dir(fb))]
    return [
        (name, one)
        for name, one in named
        if not name.startswith("_") and (isinstance(one, type | Preset))
    ]


@pytest.mark.parametrize("name, kind", public(), ids=lambda one: str(one)[:30])
def test_help_explains_every_parameter(name, kind):
    """By its name in the documentation, whether written there or from its field."""
    text = pydoc.plain(pydoc.render_doc(kind)).partition("Method resolution order")[0]
    if isinstance(kind, Preset):
        names = [*kind.parameters]
    elif is_dataclass(kind):
        names = [field.name for field in fields(kind) if field.init]
    else:
        return
    missing = [one for one in names if f"`{one}`" not in text]
    assert not missing, f"help(fedbilevel.{name}) says nothing of {missing}"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rounds_are_tracked_as_lines_of_json(tmp_path):
    path = tmp_path / "new" / "rounds.jsonl"
    with tracker(f"jsonl:{path}") as track:
        result = run(on_round=track)
    lines = lines_of(path)
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert [line["upper_loss"] for line in lines] == list(result.columns["upper_loss"])
    with pytest.raises(CheckpointError, match="the rounds of two runs would be mixed"):
        check_tracking(f"jsonl:{path}")


def test_lines_of_a_resumed_run_go_on_where_it_does(tmp_path):
    path, folder = tmp_path / "rounds.jsonl", tmp_path / "run"
    interrupted(folder)
    # The process died after round 3 was written, and before it was kept.
    path.write_text('{"round": 1}\n{"round": 2}\n{"round": 3, "upper_loss": 9}\n{"ro')
    with tracker(f"jsonl:{path}", resume=True) as track:
        result = run(on_round=track, keeping=fb.Keeping(folder, resume=True))
    lines = lines_of(path)
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert lines[2]["upper_loss"] == result.columns["upper_loss"][2]
    path.write_text("my diary\n")
    with pytest.raises(CheckpointError, match="not those of a run"):
        with tracker(f"jsonl:{path}", resume=True) as track:
            track(fb.Event(3, 4, {}, 0.0))
    assert path.read_text() == "my diary\n"


def interrupted(folder: Path) -> None:
    def stop(done, total, newest):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(keeping=fb.Keeping(folder, every_rounds=2), watch=stop)


def test_what_is_not_a_number_is_null_in_a_line(tmp_path):
    with tracker(f"jsonl:{tmp_path / 'a'}") as track:
        track(fb.Event(1, 2, {"loss": float("nan"), "best": 1.5}, 0.25))
    told = {"round": 1, "rounds": 2, "seconds": 0.25, "loss": None, "best": 1.5}
    assert lines_of(tmp_path / "a") == [told]


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_before_the_run(kind, monkeypatch):
    package = {"tensorboard": "tensorboardX"}.get(kind, kind)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FedbilevelError, match=f"`pip install {package}`"):
        check_tracking(f"{kind}:somewhere")


def test_a_tracker_that_there_is_not_is_refused():
    with pytest.raises(InvalidInputError, match="Did you mean 'jsonl'"):
        check_tracking("json:a")
    with pytest.raises(InvalidInputError, match="write wandb:PLACE"):
        check_tracking("wandb")


def test_tensorboard_has_the_values(tmp_path):
    pytest.importorskip("tensorboardX")
    with tracker(f"tensorboard:{tmp_path}", about={"task": "mine"}) as track:
        track(fb.Event(1, 1, {"upper_loss": 0.5}, 0.1))
    (written,) = tmp_path.iterdir()
    assert b"upper_loss" in written.read_bytes()


def test_mlflow_has_the_values(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    with tracker(f"mlflow:{tmp_path}", about={"task": "mine"}) as track:
        for number, loss in enumerate((0.5, 0.25), 1):
            track(fb.Event(number, 2, {"upper_loss": loss}, 0.1))
    (kept,) = mlflow.search_runs(experiment_names=["fedbilevel"], output_format="list")
    assert kept.data.metrics == {"upper_loss": 0.25}
    assert kept.data.params == {"task": "mine"}


def test_wandb_has_a_run_offline(tmp_path):
    pytest.importorskip("wandb")
    with tracker(f"wandb:{tmp_path}") as track:
        track(fb.Event(1, 1, {"upper_loss": 0.5}, 0.1))
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.slow
def test_the_command_tracks(tmp_path):
    path = tmp_path / "rounds.jsonl"
    words = f"run quadratic --algorithm fedavg --rounds 3 --track jsonl:{path} --json"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert [line["round"] for line in lines_of(path)] == [1, 2, 3]
    again = CliRunner().invoke(app, words.split())
    assert again.exit_code == 2 and "Choose another file" in again.stderr
