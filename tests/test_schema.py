"""Options are declared once: commands, folders, servers, sites and the docs agree."""

import importlib.util
import json
from dataclasses import MISSING, fields, replace
from pathlib import Path

import jax.numpy as jnp
import pytest
import typer.main

from fedbilevel._schema import (
    NOBODY,
    SITES,
    Limits,
    Settings,
    Terms,
    Tuning,
    check_bounds,
    checked,
    options_of,
)
from fedbilevel.cli.app import app
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import shared_settings
from fedbilevel.federation import SiteLimits
from fedbilevel.studies.setting import Keeping

ROOT = Path(__file__).parent.parent
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# What may differ between two runs that are continued in one folder, and what between a
# server and its sites: written here a second time, on purpose.
FREE = {"rounds", "target", "patience", "max_bytes", "max_samples", "max_seconds"}
FREE |= {"client_states", "checkpoint_rounds", "checkpoint_seconds", "force"}
OWN = {*FREE, "runtime", "measure_every", "model_devices"}
OWN |= {"dropout", "participation"}  # of simulations alone
OTHERS = {
    "task": "minimax",
    "algorithm": "fedbio",
    "runtime": "reference",
    "precision": "float64",
    "client_states": "states",
    "participation": "0.5",
    "clip": 2.0,
    "compress": "topk:0.1",
    "compress_down": "bfloat16",
    "aggregate": "median",
    "safeguard": False,
    "weights": (1.0, 2.0),
    "wrappers": ("controls",),
}


def changed(name: str) -> Experiment:
    """Return an experiment that differs from the usual one in one option."""
    return replace(Experiment("quadratic"), **{name: OTHERS.get(name, 3)})


@pytest.mark.parametrize(
    ("kind", "command"),
    [(Settings, "run"), (Tuning, "run"), (Terms, "federate"), (Limits, "node")],
)
def test_a_command_has_every_option_with_its_default_and_meaning(kind, command):
    known = {one.name: one for one in COMMANDS[command].params}
    for one, option in options_of(kind):
        found = known[option.flag or one.name]
        typed = one.default if option.typed is None else None
        assert found.default == (None if one.default is MISSING else typed), one.name
        assert getattr(found, "help", None) == option.meaning, one.name


def test_who_must_agree():
    held = Experiment("quadratic")
    for one, option in options_of(Experiment):
        other = changed(one.name)
        assert other != held
        assert bool(held.differences(other)) == (one.name not in FREE), one.name
        apart = shared_settings(held) != shared_settings(other)
        assert apart == (one.name not in OWN), one.name
        assert (option.agree == NOBODY) == (one.name in FREE)
        assert (option.agree == SITES) == (one.name not in OWN)
    assert held.differences(replace(held, options={"noise": "1"})) == [
        "noise is left out there and 1 here"
    ]


def test_the_seconds_between_checkpoints_are_written_once(tmp_path):
    assert Keeping(tmp_path).every_seconds == Settings.checkpoint_seconds == 30.0
    assert [one.name for one in fields(SiteLimits)] == [o.name for o in fields(Limits)]


def test_a_folder_of_before_is_read(tmp_path):
    """With fewer options than there are today, and whole numbers for others."""
    held = {"task": "quadratic", "clients": 2, "noise": 0, "weights": [1, 2]}
    held |= {"max_bytes": 1e9, "checkpoint_seconds": None}
    (tmp_path / "experiment.json").write_text(json.dumps(held))
    found = Experiment.load(tmp_path)
    assert found == Experiment(**{**held, "weights": (1, 2)})
    found.save(tmp_path)
    assert Experiment.load(tmp_path) == found
    written = json.loads((tmp_path / "experiment.json").read_text())
    assert list(written) == [one.name for one in fields(Experiment)]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"clients": "2"}, "clients cannot be '2'"),
        ({"seed": 0.5}, "seed cannot be 0.5"),
        ({"seed": True}, "seed cannot be True"),
        ({"safeguard": 1}, "safeguard cannot be 1"),
        ({"weights": ["1"]}, "weights cannot be"),
        ({"options": []}, "options cannot be"),
        ({"speed": 3}, "speed"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, content, why):
    text = json.dumps({"task": "quadratic", **content})
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(CheckpointError, match=why):
        Experiment.load(tmp_path)


def test_a_search_of_before_is_read():
    assert checked(Tuning, {"trials": 3}) == Tuning(trials=3)
    with pytest.raises(TypeError, match="trials"):
        checked(Tuning, {"trials": 3.5})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"clients": 0}, "--clients 0: must be at least 1"),
        ({"local_steps": -1}, "--local-steps -1: must be at least 1"),
        ({"max_seconds": 0.0}, "--max-seconds 0: must be above 0"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused(given, why):
    with pytest.raises(InvalidInputError, match=why):
        check_bounds(Settings, given)


def test_the_docs_list_every_option():
    path = ROOT / "docs" / "pages.py"
    spec = importlib.util.spec_from_file_location("pages", path)
    assert spec is not None and spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    page = pages.options_page()
    for kind in (Settings, Tuning, Terms, Limits):
        for one, option in options_of(kind):
            if one.default is not MISSING:
                flag = (option.flag or one.name).replace("_", "-")
                assert f"| `--{flag}` |" in page
            assert option.meaning.replace("|", "\\|") in page


@pytest.mark.parametrize("name", ["exchanges", "bytes", "samples", "round"])
def test_a_metric_may_not_have_the_name_of_a_column_of_every_run(name):
    """What a run counts itself would be written over it, in silence."""
    built = Experiment("quadratic", clients=2).build()
    made = replace(built.setting, metrics=lambda x, y: {f"my {name}": jnp.sum(y)})
    assert made.job(built.algorithm)
    made = replace(built.setting, metrics=lambda x, y: {name: jnp.sum(y)})
    with pytest.raises(InvalidInputError, match=f"metric '{name}'.* other than"):
        made.job(built.algorithm)
