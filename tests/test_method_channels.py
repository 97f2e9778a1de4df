"""What a method does to replies itself goes with whatever a run does to them."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.algorithms import quantile_clipped, steadied
from fedbilevel.algorithms.local.br_fedbim import BRFedBiM
from fedbilevel.algorithms.presets import CompressedLocalSGD, FedCOM
from fedbilevel.algorithms.single_level.fedavg import FedAvg
from fedbilevel.channels import (
    PLAIN,
    Channel,
    Mean,
    Median,
    Privacy,
    Quantize,
    SecureMean,
    TopK,
    TrimmedMean,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.comparison import compare
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.runtime import SimulatorRuntime, count, execute
from fedbilevel.tasks.quadratic import ClosedForm
from tests.cases import quadratic_data, quadratic_job
from tests.federation import TERMS, Loopback

ROUNDED = FedCOM(0.1, bits=4, local_steps=2)


def channel_of(algorithm, channel: Channel = PLAIN) -> Channel:
    return quadratic_job(algorithm, quadratic_data(3), channel=channel).channel


def test_a_method_that_compresses_is_counted_as_the_run_that_compresses():
    own = quadratic_job(ROUNDED, quadratic_data(3))
    plain = FedAvg(0.1, local_steps=2)
    given = quadratic_job(plain, quadratic_data(3), channel=Channel((Quantize(4),)))
    assert count(own, 3) == count(given, 3)
    assert count(own, 3) != count(quadratic_job(plain, quadratic_data(3)), 3)


def test_parts_of_a_run_come_before_those_of_the_method():
    made = channel_of(ROUNDED, Channel((Privacy(1.0),), Median()))
    assert [type(one) for one in made.coders] == [Privacy, Quantize]
    assert isinstance(made.reduction, Median)
    assert channel_of(FedAvg(0.1, local_steps=2)) == PLAIN
    guarded = channel_of(steadied(ROUNDED, safeguard=True))
    assert [type(one) for one in guarded.coders] == [Quantize]


def test_a_method_may_reduce_replies_itself():
    own = Channel((), TrimmedMean(0.2))
    assert isinstance(PLAIN.joined(own, "M").reduction, TrimmedMean)
    assert isinstance(own.joined(PLAIN, "M").reduction, TrimmedMean)
    assert isinstance(PLAIN.joined(PLAIN, "M").reduction, Mean)
    with pytest.raises(InvalidInputError, match="`M` has a reduction of its own"):
        Channel((), Median()).joined(own, "M")


def test_nothing_is_compressed_twice_or_where_it_cannot_be():
    with pytest.raises(InvalidInputError, match="`FedCOM` has a compression of its"):
        channel_of(ROUNDED, Channel((TopK(0.5),)))
    with pytest.raises(InvalidInputError, match="`SecureMean` adds up masked numbers"):
        channel_of(ROUNDED, Channel((), SecureMean()))
    with pytest.raises(InvalidInputError, match="`FedCOM` compresses its replies"):
        quantile_clipped(ROUNDED, 0.5)


def test_where_nothing_travels_nothing_is_compressed():
    algorithm = CompressedLocalSGD(0.1, local_steps=2)
    job = quadratic_job(algorithm, quadratic_data(3).pooled())
    assert job.channel == PLAIN


def test_a_method_is_compressed_by_its_name_alone():
    built = Experiment("two-client", "fedpaq", options={"bits": "5"}).build()
    (coder,) = built.job().channel.coders
    assert isinstance(coder, Quantize) and coder.bits == 5
    plan = Experiment("two-client", "fedpaq", compress="topk:0.1")
    with pytest.raises(InvalidInputError, match="Leave out the other one"):
        plan.build().job()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Experiment("two-client", "fedpaq", 2, rounds=3, options={"bits": "3"}),
        # Of three clients the median is another one than the mean.
        Experiment("quadratic", "br-fedbim", 3, rounds=3, options={"spread": "1"}),
    ],
    ids=lambda plan: plan.algorithm,
)
def test_sites_do_to_replies_what_a_simulation_does(plan, tmp_path):
    def ignore(_):
        """Do nothing with what is told."""

    sites = range(plan.clients)
    every = {k: build_site(plan, k, trial=True, report=ignore) for k in sites}
    result = serve(Loopback(every), plan, tmp_path, TERMS, report=ignore)
    alone = plan.run()
    for name, leaf in alone.point.items():
        np.testing.assert_allclose(result.point[name], leaf, atol=1e-5)
    assert result.counts["bytes_up"] == alone.counts["bytes_up"]


def limit(robust):
    """Return the distance from what the four honest of five alike clients want."""
    data = quadratic_data(5, noise=0.0, alike=True)
    wanted = np.asarray(ClosedForm.of(data).solution())
    rows = {name: np.array(leaf) for name, leaf in data.upper.items()}
    rows["b"][3] += 1e3
    wrong = replace(
        data, upper={name: jnp.asarray(leaf) for name, leaf in rows.items()}
    )
    job = quadratic_job(BRFedBiM(0.05, 0.3, 0.3, 0.5, robust=robust), wrong)
    server = execute(SimulatorRuntime(job), 1500, measure_every=1500).state.server
    return np.linalg.norm(np.asarray(server.point.x) - wanted)


@pytest.mark.slow
def test_one_of_five_leads_a_mean_astray_and_no_median():
    assert limit("median") < 1e-6
    assert limit("mean") > 1


@pytest.mark.slow
def test_a_method_comes_with_its_channel_by_name_and_in_comparisons():
    robust = Experiment("two-client", "br-fedbim").build().job()
    assert isinstance(robust.channel.reduction, Median)
    plan = Experiment("two-client", rounds=2, safeguard=False)
    found = compare(plan, ["ef-soba", "fedbio"], 1).found.results
    sent = {name: one.counts["bytes_up"] for name, (one,) in found.items()}
    # Of three blocks of one number the place travels, too.
    assert sent["ef-soba"] - sent["fedbio"] == 2 * 2 * 3 * 4
