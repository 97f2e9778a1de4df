"""Both sides of every bound of a setting, as in `test_ranges`, which has the methods'.

What is allowed stands here a second time, by hand. Whatever a call needs that is not
looked at here is made so that it is not reached, or cheap.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedbilevel._schema import Limits, Settings, Terms, Tuning, check_bounds, options_of
from fedbilevel.cli.arguments import at_least_one, read_counts, read_numbers
from fedbilevel.datasets import partition
from fedbilevel.datasets.images import shrink
from fedbilevel.datasets.preparation import ClassLabel
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.clients import drawn
from fedbilevel.experiments.comparison import compare
from fedbilevel.experiments.federated_tuning import tune_at_sites
from fedbilevel.experiments.recommendation import Situation
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation.secure.layout import MaskedExchange
from fedbilevel.runtime import (
    Checkpoints,
    ReferenceRuntime,
    Sampling,
    Stopping,
    execute,
    mesh,
)
from fedbilevel.runtime.simulator import layout_for
from fedbilevel.sklearn._rows import Table
from fedbilevel.studies.budgets import lengths_of
from fedbilevel.tasks import _labeled, fairness, loss_tuning, quadratic
from fedbilevel.theory.plan import _given_or_least
from tests.cases import quadratic_data, quadratic_job
from tests.test_ranges import CHEAPEST, edges

# The options of commands, by name: all that are bounded where they are declared.
OPTIONS = {
    Settings: {
        "clients": "[1, inf)",
        "rounds": "[1, inf)",
        "local_steps": "[1, inf)",
        "batch": "[1, inf)",
        "model_devices": "[1, inf)",
        "dropout": "[0.0, inf)",
        "measure_every": "[1, inf)",
        "patience": "[1, inf)",
        "max_bytes": "[1, inf)",
        "max_samples": "[1, inf)",
        "max_seconds": "(0.0, inf)",
    },
    Tuning: {"trials": "[1, inf)", "rungs": "[1, inf)", "tuning_seeds": "[1, inf)"},
    Terms: {
        "deadline": "(0.0, inf)",
        "minimum": "[1, inf)",
        "patience": "(0.0, inf)",
        "tolerance": "(0.0, inf)",
    },
    Limits: {},
}
BOUNDED = [(kind, name) for kind, names in OPTIONS.items() for name in names]


def test_every_option_with_a_bound_stands_here():
    for kind, names in OPTIONS.items():
        found = {
            known.flag or one.name
            for one, known in options_of(kind)
            if known.least is not None or known.above is not None
        }
        assert found == set(names)


@pytest.mark.parametrize(("kind", "name"), BOUNDED)
def test_an_option_is_taken_at_its_bound_and_refused_beyond(kind, name):
    inside, outside = edges(OPTIONS[kind][name])
    for value in inside:
        check_bounds(kind, {name: value})
    for value in outside:
        if math.isnan(value) and name == "dropout":
            continue  # refused by whoever draws by it, see below
        with pytest.raises(InvalidInputError, match=f"--{name.replace('_', '-')} "):
            check_bounds(kind, {name: value})
    check_bounds(kind, {name: None})


JOB = quadratic_job(CHEAPEST, quadratic_data(3))
DATA = quadratic_data(3)
LAST = 2**64 - 1
LABELS = np.asarray([0, 0, 1, 1, 1])
TASK: Any = SimpleNamespace(names=(), data=DATA)


def chances(**settings):
    return drawn(Experiment("quadratic", **settings), TASK, Sampling()).chances(DATA)


def four_rows():
    """Return rows of one site and one class."""
    label, columns = ClassLabel("label", ()), {"site": np.asarray(["a"] * 4)}
    draw = np.random.default_rng(0)
    return Table(np.zeros((4, 1)), label, np.zeros(4), columns, draw)


def judged(share):
    return four_rows().judges(share)


def folded(count):
    return four_rows().folds(np.asarray(["a"] * 4), count)


def site_of(client=0, minimum=2):
    """Build far enough that both numbers were looked at."""
    build_site(Experiment("quadratic", clients=3), client, minimum=minimum, trial=True)


def announced(count):
    return MaskedExchange(0, tuple(range(count)))


def one_process(process=0, processes=1, patience=1.0):
    mesh.join("127.0.0.1:1", processes, process, patience=patience)


class ReachedError(Exception):
    """What is checked first was checked, and nothing was wrong."""


def stop(*_: Any, **__: Any) -> Any:
    raise ReachedError


# By what comes after the check.
FIRST = {
    "client": (
        "fedbilevel.experiments.sites.counted",
        lambda value: site_of(client=value),
        "[0, 2]",
    ),
    "minimum-of-sites": (
        "fedbilevel.experiments.sites.counted",
        lambda value: site_of(minimum=value),
        "[2, 3]",
    ),
    "rounds": (
        "fedbilevel.runtime.driver.spacing",
        lambda value: execute(ReferenceRuntime(JOB), value),
        "[1, inf)",
    ),
    "measure-every": (
        "fedbilevel.runtime.driver.spacing",
        lambda value: execute(ReferenceRuntime(JOB), 1, measure_every=value),
        "[1, inf)",
    ),
    "processes": (
        "jax.distributed.is_initialized",
        lambda value: one_process(processes=value),
        "[1, inf)",
    ),
    "process": (
        "jax.distributed.is_initialized",
        lambda value: one_process(process=value, processes=3),
        "[0, 2]",
    ),
    "patience-to-join": (
        "jax.distributed.is_initialized",
        lambda value: one_process(patience=value),
        "(0.0, inf)",
    ),
    "seeds": (
        "fedbilevel.experiments.comparison._entries",
        lambda value: compare(Experiment("quadratic"), ["fedbio"], value),
        "[1, inf)",
    ),
    "rounds-of-trials": (
        "fedbilevel.experiments.federated_tuning._opened",
        lambda value: tried(rounds=value),
        "[1, inf)",
    ),
    "rungs-of-trials": (
        "fedbilevel.experiments.federated_tuning._opened",
        lambda value: tried(rungs=value),
        "[1, 1]",
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_range_is_looked_at_before_anything_is_built(name, monkeypatch):
    place, call, text = FIRST[name]
    monkeypatch.setattr(place, stop)
    inside, outside = edges(text)
    for value in inside:
        with pytest.raises(ReachedError):
            call(value)
    for value in outside:
        with pytest.raises(InvalidInputError):
            call(value)


def tried(rounds=1, rungs=1):
    unused: Any = None
    folder, tuning = Path("folder"), Tuning(rungs=rungs)
    tune_at_sites(unused, Experiment("quadratic"), folder, Terms(), tuning, rounds)


RANGES = {
    "clients-at-once": (lambda value: layout_for(JOB, value), "[1, inf)"),
    "chance": (lambda value: chances(participation=str(value)), "(0.0, 1.0]"),
    "dropout": (lambda value: chances(dropout=value), "[0.0, 1.0)"),
    "patience": (lambda value: Stopping(patience=value), "[1, inf)"),
    "bytes": (lambda value: Stopping(bytes=value), "[1, inf)"),
    "samples": (lambda value: Stopping(samples=value), "[1, inf)"),
    "seconds": (lambda value: Stopping(seconds=value), "(0.0, inf)"),
    "checkpoint-rounds": (lambda value: Checkpoints("f", value), "[1, inf)"),
    "checkpoint-seconds": (lambda value: Checkpoints("f", 1, value), "(0.0, inf)"),
    "minority": (lambda value: fairness._check(1.0, value, 0.0), "(0.0, 0.5]"),
    "fairness-spread": (lambda value: fairness._check(1.0, 0.2, value), "[0.0, 1.0]"),
    "strength": (lambda value: fairness._check(value, 0.2, 0.0), "[0.0, inf)"),
    "quadratic-spread": (lambda value: quadratic.make(2, spread=value), "[0.0, 1.0]"),
    "imbalance": (
        lambda value: loss_tuning._check("default", "auto", value, 1.0),
        "[1.0, inf)",
    ),
    "penalty": (
        lambda value: loss_tuning._check("default", "auto", 1.0, value),
        "(0.0, inf)",
    ),
    "not-negative": (
        lambda value: _labeled.check_not_negative(penalty=value),
        "[0.0, inf)",
    ),
    "clients-of-rows": (
        lambda value: partition._check_clients(LABELS, value),
        "[1, 5]",
    ),
    "dirichlet": (
        lambda value: partition._check_amount("dirichlet", value),
        "(0.0, inf)",
    ),
    "shards": (lambda value: partition._check_amount("shards", value), "[1, inf)"),
    "dominant": (
        lambda value: partition._check_amount("dominant", value),
        "[0.0, 1.0]",
    ),
    "length": (lambda value: lengths_of(value, 1), "[1, inf)"),
    "rungs": (lambda value: lengths_of(9, value), "[1, inf)"),
    "validation": (judged, "(0.0, 1.0)"),
    "folds": (folded, "[2, 4]"),
    "participants-of-a-sum": (announced, "[2, 65536]"),
    "number-of-a-sum": (
        lambda value: MaskedExchange(value, (0, 1)),
        f"[0, {LAST}]",
    ),
    "client-of-a-sum": (
        lambda value: MaskedExchange(0, (0, value)),
        f"[1, {LAST}]",
    ),
    "situation-clients": (lambda value: Situation(clients=value), "[1, inf)"),
    "situation-participants": (lambda value: Situation(5, value), "[1, 5]"),
    "iterations-of-a-plan": (
        lambda value: _given_or_least(value, None, lambda T: 0.0),
        "[1, inf)",
    ),
    "target-of-a-plan": (
        lambda value: _given_or_least(None, value, lambda T: 0.0),
        "(0.0, inf)",
    ),
    "height": (lambda value: shrink(np.zeros((1, 4, 6)), value, 1), "[1, 4]"),
    "width": (lambda value: shrink(np.zeros((1, 4, 6)), 1, value), "[1, 6]"),
    "trials-of-tuning": (lambda value: Tuning(trials=value), "[1, inf)"),
    "rungs-of-tuning": (lambda value: Tuning(rungs=value), "[1, inf)"),
    "seeds-of-tuning": (lambda value: Tuning(seeds=value), "[1, inf)"),
    "typed-number": (lambda value: read_numbers("x", repr(value)), "(0.0, inf)"),
    "typed-count": (lambda value: read_counts("x", repr(value)), "[1, inf)"),
    "count": (lambda value: at_least_one(seeds=value), "[1, inf)"),
}


@pytest.mark.parametrize("name", RANGES)
def test_a_range_ends_where_it_says(name):
    make, text = RANGES[name]
    inside, outside = edges(text)
    for value in inside:
        make(value)
    for value in outside:
        with pytest.raises(FedbilevelError):
            make(value)
