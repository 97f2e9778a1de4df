"""What is wrong at a site is told with the site's name, where it is known."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
import pytest

from fedbilevel import tasks
from fedbilevel.algorithms import find
from fedbilevel.errors import (
    ClientInputError,
    ClientStageError,
    HeterogeneityWarning,
    InvalidInputError,
    NonFiniteError,
    StageError,
)
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.comparison import _name_results
from fedbilevel.experiments.sites import build_site
from fedbilevel.studies import heterogeneity
from fedbilevel.studies.comparison import Comparison

PLACES = ("North", "South", "West")


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    """Return a table whose third hospital measures in other units."""
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("tables") / "rows.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "place", "sick"])
        for row in range(60):
            age = draw.normal() * (50 if row % 3 == 2 else 1)
            rows.writerow([age, PLACES[row % 3], ("no", "yes")[row % 2]])
    return str(path)


def experiment(table: str, algorithm: str, **more: str) -> Experiment:
    options = {"data": table, "site": "place", **more}
    return Experiment("regularization", algorithm, rounds=2, options=options)


def broken(task: tasks.Task, client: int) -> tasks.Task:
    """Return the task with rows of one client that no loss can take."""
    features: Any = task.data.lower["features"]
    spoiled = features.at[client].set(np.inf)
    return eqx.tree_at(lambda one: one.data.lower["features"], task, spoiled)


def test_a_loss_that_is_nan_at_a_site_names_it(table):
    given = experiment(table, "fedavg")
    task, values, _ = given.build_task()
    assert task.names == PLACES
    with pytest.raises(InvalidInputError) as caught:
        given.bind(broken(task, 2), values).job()
    assert str(caught.value).startswith("client 2 (West): the lower loss is nan at the")
    with pytest.raises(InvalidInputError, match="^client 1: the lower loss is nan"):
        nameless = replace(broken(task, 1), names=())
        given.bind(nameless, values).job()


@pytest.mark.parametrize("algorithm", ["local-bsgvrm", "fednest", "fedmbo"])
def test_a_series_that_does_not_fit_a_site_names_it(table, algorithm):
    wrong = {"ell": "1e-9"} if "ell" in find(algorithm).parameters else {"theta": "1e9"}
    with pytest.raises(ClientInputError, match=r"; on client 2 \(West\) L1 is about"):
        experiment(table, algorithm, **wrong).build().job()


def test_that_clients_differ_is_told_with_their_names(table, monkeypatch):
    monkeypatch.setattr(heterogeneity, "local_inverse_bias", lambda *_: 0.5)
    told = "own Hessian, but the data of North, South, West differ: near the start"
    with pytest.warns(HeterogeneityWarning, match=told):
        experiment(table, "local-bsgvrm").build().job()
    many = [f"site {n}" for n in range(20)]
    assert heterogeneity._listed(many).endswith("site 6, site 7 and 12 more")
    assert heterogeneity._listed(many[:8]).endswith("site 6, site 7")
    assert heterogeneity._listed(()) == "these clients"


def test_what_fails_during_a_run_names_the_site(table):
    made = experiment(table, "fedavg").build()
    stage = ClientStageError(1, ": ValueError: {odd}", "round 3, stage 'local', ")
    told = r"^round 3, stage 'local', client 1 \(South\): ValueError: {odd}$"
    with pytest.raises(StageError, match=told), made.naming_sites():
        raise stage
    lost = NonFiniteError(3, "local", 0, None)
    with pytest.raises(NonFiniteError, match=r", client 0 \(North\): the reply holds"):
        with made.naming_sites():
            raise lost
    # Rows of all sites in one place are nobody's.
    pooled = made._replace(entry=find("pooled"))
    with pytest.raises(NonFiniteError, match=", client 0: the reply"):
        with pooled.naming_sites():
            raise lost
    found = Comparison("upper_loss", diverged={"fedavg": lost, "pooled": lost})
    entries = {name: find(name) for name in ("fedavg", "pooled")}
    _name_results(made, entries, found, None)
    assert "client 0 (North)" in str(found.diverged["fedavg"])
    assert "client 0: the reply" in str(found.diverged["pooled"])


@pytest.mark.slow
def test_a_node_says_its_own_number_and_the_name_that_it_knows(table, tmp_path: Path):
    tried = replace(experiment(table, "local-bsgvrm", theta="1e9"), clients=3)
    with pytest.raises(InvalidInputError, match=r"on client 2 \(West\) L1 is about"):
        build_site(tried, 2, trial=True)
    # A real site has rows of its own, and tells nobody whose they are.
    own = {"data": table, "ignore": "place", "theta": "1e9"}
    with pytest.raises(InvalidInputError, match="on client 2 L1 is about"):
        build_site(replace(tried, options=own), 2)
