"""Tuning at sites: the steps of a simulated search, told by a server they may refuse."""

import json
from dataclasses import replace

import pytest

from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import replay, serve
from fedbilevel.experiments.federated_tuning import tune_at_sites
from fedbilevel.experiments.searching import Tuning
from fedbilevel.experiments.sites import build_site
from fedbilevel.experiments.telling import Told
from fedbilevel.experiments.tuning import tune
from fedbilevel.federation.wire import pack, unpack
from tests.federation import TERMS, Loopback, faithful

ROWS = Experiment(
    "regularization",
    "fedbio",
    3,
    rounds=4,
    local_steps=1,
    batch=8,
    options={"data": "breast_cancer"},
)
ASKED = Tuning(trials=4, seeds=1)


def sites_of(experiment, **more):
    clients = range(experiment.clients)
    return {k: build_site(experiment, k, trial=True, tune=True, **more) for k in clients}


def test_sites_choose_the_steps_of_a_simulated_search(tmp_path):
    """On rows that each holds out itself; then they run with what was chosen."""
    simulated = tune(ROWS, ASKED)
    net = Loopback(sites_of(ROWS))
    told = tune_at_sites(net, ROWS, tmp_path, TERMS, ASKED, 4, report=[].append)
    assert simulated.found.judged_by == "held_out_loss"
    assert told == Told(simulated.options, ROWS.seed)
    kept = json.loads((tmp_path / "tuning" / "tuned.json").read_text())
    values = [trial["value"] for trial in kept["trials"]]
    expected = [value for _, value, _ in simulated.trials]
    assert values == pytest.approx(expected, rel=1e-4)
    assert len(set(values)) == 4  # or all points would do

    result = serve(net, ROWS, tmp_path, TERMS, told=told, report=[].append)
    alone = simulated.experiment.run()
    assert result.final["upper_loss"] == pytest.approx(
        alone.final["upper_loss"], rel=1e-4
    )
    assert Experiment.load(tmp_path).options == simulated.experiment.options
    assert replay(tmp_path)[2].parameters() == alone.config["parameters"]
