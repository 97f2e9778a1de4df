"""Decisions that a whole run shows late or never: devices, trials, what is noted."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from fedbilevel import tasks
from fedbilevel.errors import CheckpointError, DivergedError
from fedbilevel.experiments import Experiment, experiment
from fedbilevel.experiments.agreement import SiteSteps
from fedbilevel.experiments.federated_tuning import _Trials
from fedbilevel.runtime import mesh
from fedbilevel.runtime.layout import devices_for
from fedbilevel.tasks._texts import _summary


@pytest.mark.parametrize(
    ("processes", "participants", "shared", "devices"),
    [
        (1, 3, 1, 3),
        (1, 9, 1, 4),
        (1, 9, 2, 2),
        (1, 1, 2, 1),
        # Every process must have a part in the program, or all compute the same.
        (2, 2, 1, 4),
        (2, 1, 1, 1),
    ],
)
def test_several_processes_share_all_devices(
    monkeypatch, processes, participants, shared, devices
):
    held = [SimpleNamespace(process_index=k * processes // 4) for k in range(4)]
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(jax, "devices", lambda: held)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    assert devices_for(participants, shared) == devices


@pytest.mark.parametrize(("shared", "made"), [(1, 0), (2, 1)])
def test_a_model_that_devices_share_is_made_on_the_host(monkeypatch, shared, made):
    entered = []

    def on_host() -> Any:
        entered.append(1)
        return nullcontext()

    monkeypatch.setattr(mesh, "made_on_host", on_host)
    monkeypatch.setattr(tasks, "built", lambda *_: "task")
    monkeypatch.setattr(experiment.clients, "weighed", lambda _, task: task)
    asked = Experiment("quadratic", model_devices=shared)
    assert asked.build_task()[0] == "task"
    assert len(entered) == made


def trials(folder, made: Any) -> Any:
    def comes_to(given: Any, rounds: int) -> float:
        del given, rounds
        if isinstance(made, Exception):
            raise made
        return made

    return SimpleNamespace(folder=folder, _made=comes_to)


GIVEN = SiteSteps({"lr": "2"}, seed=3)
TOLD = {"steps": {"lr": "2"}, "seed": 3, "held_out": False}


@pytest.mark.parametrize(("held", "value"), [(0.5, 0.5), (2, 2.0), (None, math.inf)])
def test_a_trial_of_before_is_not_made_again(tmp_path, held, value):
    path = tmp_path / "trial-1-seed-3.json"
    path.write_text(json.dumps({"told": TOLD, "value": held}))
    found = _Trials.value(trials(tmp_path, AssertionError()), 1, GIVEN, 5)
    assert found == value and isinstance(found, float)


def test_a_trial_of_other_steps_is_refused(tmp_path):
    path = tmp_path / "trial-1-seed-3.json"
    path.write_text(json.dumps({"told": {**TOLD, "steps": {"lr": "9"}}, "value": 0.5}))
    with pytest.raises(CheckpointError, match="trial-1-seed-3.json is of another"):
        _Trials.value(trials(tmp_path, 0.25), 1, GIVEN, 5)


@pytest.mark.parametrize(
    ("made", "value", "kept"),
    [(0.25, 0.25, 0.25), (DivergedError("x"), math.inf, None)],
)
def test_a_new_trial_is_kept(tmp_path, made, value, kept):
    assert _Trials.value(trials(tmp_path, made), 1, GIVEN, 5) == value
    held = json.loads((tmp_path / "trial-1-seed-3.json").read_text())
    assert held == {"told": TOLD, "value": kept}


@pytest.mark.parametrize(("own", "column"), [(True, "folder"), (False, "")])
def test_a_summary_of_texts_counts_what_each_site_holds(own, column):
    def rows(count: int, cut: int = 0, left_out: int = 0) -> Any:
        return SimpleNamespace(tokens=[0] * count, cut=cut, left_out=left_out)

    texts = SimpleNamespace(name="notes", sources={"north": 1, "south": 2})
    below = [{"web": rows(3, cut=1)}, {"web": rows(2), "books": rows(4, left_out=2)}]
    above = [rows(1), rows(5)]
    given: Any = SimpleNamespace(texts=texts, own=own)
    found = _summary(given, below, above, rows(6, cut=1), 32)  # pyright: ignore[reportArgumentType]
    assert (found["source"], found["own"], found["site_column"]) == (
        "notes",
        own,
        column,
    )
    assert (found["rows"], found["tested"]) == (15, 6)
    north, south = found["sites"]
    assert north == {
        **{"name": "north", "training": 3, "validation": 1},
        "classes": {"books": 0, "web": 3},
    }
    assert south["classes"] == {"books": 4, "web": 2} and south["validation"] == 5
    said = " ".join(found["remarks"])
    assert "2 rows were cut at 32 tokens" in said and "2 rows were left out" in said
