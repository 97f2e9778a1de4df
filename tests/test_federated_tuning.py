"""Tuning at sites: they choose what a simulation does, and no server tells more."""

import json
from dataclasses import replace

import pytest

from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import SiteSteps
from fedbilevel.experiments.federated import replay, serve
from fedbilevel.experiments.federated_tuning import tune_at_sites
from fedbilevel.experiments.sites import build_site
from fedbilevel.experiments.tuning import Tuning, tune
from fedbilevel.federation.wire import unpack
from tests.federation import TERMS, Loopback, faithful

ROWS = Experiment(
    "regularization",
    "fedbio",
    2,
    rounds=3,
    local_steps=1,
    batch=8,
    weights=(1, 1),  # sites that are started one by one know no rows of others
    options={"data": "breast_cancer"},
)
SMALL = Experiment("two-client", "fedbio", 2, rounds=2, local_steps=1)
ASKED = Tuning(trials=4, seeds=1)
SHORT = replace(TERMS, patience=0.01)


def ignore(_):
    """Do nothing with what is told."""


def site_of(experiment, client, tunes=True):
    return build_site(experiment, client, trial=True, tune=tunes, report=ignore)


def sites_of(experiment, tunes=True):
    return {k: site_of(experiment, k, tunes) for k in range(experiment.clients)}


def tuned(net, experiment, folder, asked=ASKED, rounds=2, terms=TERMS):
    return tune_at_sites(net, experiment, folder, terms, asked, rounds, report=ignore)


@pytest.mark.slow
def test_sites_choose_the_steps_of_a_simulated_search(tmp_path):
    """On rows that each holds out itself; then they run with what was chosen."""
    simulated = tune(ROWS, ASKED)
    net = Loopback(sites_of(ROWS))
    told = tuned(net, ROWS, tmp_path, rounds=3)
    assert simulated.found.judged_by == "held_out_loss"
    assert told.steps.items() <= simulated.options.items() and told.steps
    kept = json.loads((tmp_path / "tuning" / "tuned.json").read_text())
    values = [trial["value"] for trial in kept["trials"]]
    expected = [value for _, value, _ in simulated.trials]
    assert values == pytest.approx(expected, rel=1e-4)
    assert len(set(values)) == 4  # or all points would do

    result = serve(net, ROWS, tmp_path, TERMS, steps=told, report=ignore)
    alone = simulated.experiment.run()
    loss = pytest.approx(alone.final["upper_loss"], rel=1e-4)
    assert result.final["upper_loss"] == loss
    assert Experiment.load(tmp_path).options == simulated.experiment.options
    assert replay(tmp_path)[0].final["upper_loss"] == loss


def hellos(net):
    kinds = [unpack(packet, 1 << 20)[0].kind for _, packet, _ in net.sent]
    return kinds.count("hello")


@pytest.mark.slow
def test_a_search_at_sites_goes_on_also_where_a_site_was_started_again(tmp_path):
    straight = tuned(Loopback(sites_of(SMALL)), SMALL, tmp_path / "straight")
    net = Loopback(sites_of(SMALL))

    def dying(node, packet, net):
        if len(net.sent) > 12:
            raise KeyboardInterrupt
        return faithful(node, packet, net)

    net.script = dying
    with pytest.raises(KeyboardInterrupt):
        tuned(net, SMALL, tmp_path / "run")
    done = list((tmp_path / "run" / "tuning").glob("trial-*"))
    assert 0 < len(done) < 4

    def forgetful(node, packet, net):
        if len(net.sent) == 9:  # within a trial
            net.sites[node] = site_of(SMALL, node)
        return faithful(node, packet, net)

    again = Loopback(sites_of(SMALL), forgetful)
    assert tuned(again, SMALL, tmp_path / "run") == straight
    # Two for what is searched, two for each trial that was left, one for the new site.
    assert hellos(again) == 2 + 2 * (4 - len(done)) + 1
    with pytest.raises(FedbilevelError, match="search with other settings"):
        tuned(again, SMALL, tmp_path / "run", rounds=3)


@pytest.mark.parametrize(("rungs", "rounds"), [(2, 2), (1, 0)])
def test_trials_at_sites_have_a_round_and_no_rungs(tmp_path, rungs, rounds):
    with pytest.raises(InvalidInputError, match="leave out rungs"):
        tuned(Loopback({}), SMALL, tmp_path, replace(ASKED, rungs=rungs), rounds)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ({"upper_step": "1000"}, "upper_step=1000: outside"),
        ({"upper_step": "nan"}, "upper_step=nan: outside"),
        ({"theta": "0.1"}, "theta: not what is tuned"),
        ({"upper_step": 1.0}, "cannot be"),
        ([], "has no steps"),
    ],
)
def test_a_site_takes_no_steps_that_a_search_would_not_try(tmp_path, steps, why):
    told, here = SiteSteps(steps, 0), []
    net = Loopback(sites_of(SMALL))
    net.sites[0].report = here.append
    with pytest.raises(FedbilevelError, match="takes no steps from a server, or not"):
        serve_told(net, told, tmp_path)
    assert why in here[0]


def serve_told(net, told, folder):
    from fedbilevel.experiments.federated_tuning import _Trials

    trials = _Trials(net, SMALL, folder, SHORT, ignore_seal(), ignore)
    trials._gathered(told)


def ignore_seal():
    from fedbilevel.federation.wire import CHECKSUM

    return CHECKSUM


def test_a_site_that_allows_no_tuning_is_told_no_steps(tmp_path):
    net = Loopback(sites_of(SMALL, tunes=False))
    with pytest.raises(FedbilevelError, match="takes no steps from a server"):
        tuned(net, SMALL, tmp_path, terms=SHORT)


def test_trials_under_noise_are_refused_on_both_sides(tmp_path):
    noisy = replace(SMALL, clip=1.0, noise=1.0)
    with pytest.raises(InvalidInputError, match="every trial would spend privacy"):
        tuned(Loopback({}), noisy, tmp_path)
    with pytest.raises(InvalidInputError, match="every trial would spend privacy"):
        site_of(noisy, 0)


@pytest.mark.slow
def test_what_diverges_at_sites_counts_as_the_worst(tmp_path):
    wild = replace(SMALL, options={"lower_step": "1e300,0.1"})
    told = tuned(Loopback(sites_of(wild)), wild, tmp_path)
    assert told.steps == {"lower_step": "0.1"}
    kept = json.loads((tmp_path / "tuning" / "tuned.json").read_text())
    assert kept["trials"][0]["value"] is None
