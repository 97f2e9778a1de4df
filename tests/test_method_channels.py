"""Methods that come with a channel: by name, in comparisons, and against faults."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel import algorithms
from fedbilevel.algorithms.br_fedbim import BRFedBiM
from fedbilevel.channels import Channel, Mean, Median, TopK, TrimmedMean
from fedbilevel.cli.app import app
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.channels import read_channel
from fedbilevel.experiments.comparison import compare
from fedbilevel.runtime import SimulatorRuntime, execute
from fedbilevel.tasks._quadratics import ClosedForm
from tests.cases import quadratic_data, quadratic_job


def test_a_method_by_name_comes_with_its_channel():
    robust = Experiment("two-client", "br-fedbim").build()
    assert isinstance(robust.setting.channel.reduction, Median)
    assert robust.config["aggregate"] == "median"
    small = Experiment("two-client", "ef-soba").build()
    (coder,) = small.setting.channel.coders
    assert isinstance(coder, TopK) and coder.fraction == 0.1
    assert small.config["compress"] == "topk:0.1"


def test_what_is_asked_for_comes_before_what_a_method_has():
    chosen = Experiment("two-client", "br-fedbim", aggregate="trimmed-mean:0.2")
    assert isinstance(chosen.build().setting.channel.reduction, TrimmedMean)
    assert chosen.build().config["aggregate"] == "trimmed-mean:0.2"
    plain = Experiment("two-client", "fedbio").build()
    assert isinstance(plain.setting.channel.reduction, Mean)
    assert "aggregate" not in plain.config


def test_a_list_tells_what_a_method_comes_with():
    told = CliRunner().invoke(app, ["list", "algorithms", "br-fedbim"]).stdout
    assert "Comes with: --aggregate median" in told
    told = CliRunner().invoke(app, ["list", "algorithms", "fedbio"]).stdout
    assert "Comes with" not in told


@pytest.mark.parametrize("name", algorithms.names())
def test_every_channel_of_a_method_can_be_read(name):
    channel: Any = algorithms.find(name).channel
    assert read_channel(**channel).is_plain == (not channel)


def test_in_a_comparison_each_method_has_its_own_channel():
    plan = Experiment("two-client", rounds=2, safeguard=False)
    found = compare(plan, ["ef-soba", "fedbio"], 1).found.results
    sent = {name: one.counts["bytes_up"] for name, (one,) in found.items()}
    # Of three blocks of one number the place travels, too.
    assert sent["ef-soba"] - sent["fedbio"] == 2 * 2 * 3 * 4
    (small,), (plain,) = found["ef-soba"], found["fedbio"]
    assert small.config["compress"] == "topk:0.1"
    assert "compress" not in plain.config


def limit(channel):
    """Return the distance from what the four honest of five alike clients want."""
    data = quadratic_data(5, noise=0.0, alike=True)
    wanted = np.asarray(ClosedForm.of(data).solution())
    rows = {name: np.array(leaf) for name, leaf in data.upper.items()}
    rows["b"][3] += 1e3
    wrong = replace(
        data, upper={name: jnp.asarray(leaf) for name, leaf in rows.items()}
    )
    job = quadratic_job(BRFedBiM(0.05, 0.3, 0.3, 0.5), wrong, channel=channel)
    server = execute(SimulatorRuntime(job), 1500, measure_every=1500).state.server
    return np.linalg.norm(np.asarray(server.point.x) - wanted)


def test_one_of_five_leads_a_mean_astray_and_no_median():
    assert limit(Channel(reduction=Median())) < 1e-6
    assert limit(Channel()) > 1
