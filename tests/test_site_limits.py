"""What a site tells a server that asks for more than an honest one would."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.experiments.clients import read_channel
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import SiteLimits, Terms
from fedbilevel.federation.server import exchanges as exchanges_module
from fedbilevel.federation.server.measuring import willing
from fedbilevel.federation.wire import pack, unpack, unpack_start
from fedbilevel.runtime import SimulatorRuntime, execute
from fedbilevel.runtime.job import start_server
from tests.cases import case_of, quadratic_data, quadratic_job
from tests.federation import Loopback, server_of, site_of
from tests.planted import plant, settings
from tests.tampering import renewed, with_header
from tests.test_channels import DELTA, direct_epsilon

CHEAPEST = case_of("momentum-local-sgd").algorithm
PLAIN, MASKED = {}, {"aggregate": "secure"}
NOISY = {"clip": 0.1, "noise": 20.0, "delta": DELTA}


def job_with(channel, clients=3):
    return quadratic_job(
        CHEAPEST, quadratic_data(clients), channel=read_channel(**channel)
    )


def federation(job, rounds=1, folder=None, **more):
    """Run a federation faithfully, and return its sites and what was sent.

    Client k keeps what it has to in a folder of its own, named by its number.
    """
    sites = {}
    for k in range(job.clients):
        own = None if folder is None else folder / str(k)
        sites[10 + k] = site_of(job, k, own, **more)
    net = Loopback(sites)
    return net, execute(server_of(job, net), rounds)


def an_exchange(net, node=10):
    """Return the first exchange that a node was asked for, which has all leaves."""
    packets = [packet for to, packet, _ in net.sent if to == node]
    return [p for p in packets if unpack(p, 1 << 30)[0].kind == "exchange"][0]


def asked_for(job, packet, seed, kind="measure", **changed):
    """Return a question about a point of the server's choice."""
    draw = np.random.default_rng(seed)
    point = [
        np.asarray(draw.normal(size=leaf.shape), leaf.dtype)
        for leaf in map(np.asarray, jax.tree.leaves(start_server(job)))
    ]
    header = unpack(packet, 1 << 30)[0]
    return pack(replace(header, kind=kind, info=None, **changed), point)


def ledger_in(folder):
    """Read the one ledger that a site keeps."""
    (file,) = folder.glob("*.ledger.json")
    return json.loads(file.read_text())


def told(site, packet):
    """Return how a site answers: by so many numbers, or with a reason."""
    header, listed, body = unpack(site.handle(renewed(packet)), 1 << 30)
    if header.kind == "refused":
        return (header.info or {})["reason"]
    return sum(leaf.size for leaf in unpack_start(listed, body))


@pytest.mark.parametrize(
    ("channel", "answers"),
    [
        (PLAIN, ["measured"]),
        (MASKED, ["measure"]),
        (NOISY, ["measure"]),
        (MASKED | NOISY, ["measure"]),
    ],
    ids=["plain", "masked", "noisy", "both"],
)
def test_no_gradient_of_a_site_can_be_asked_for(channel, answers):
    """The gradient over all rows, at 44 points, made rows known: now there is none."""
    job = job_with(channel)
    net, _ = federation(job)
    packet = an_exchange(net)
    assert {told(net.sites[10], asked_for(job, packet, n)) for n in range(44)} == {
        *answers
    }
    # What a later exchange may be followed by is one number for each column.
    later = asked_for(job, packet, 0, exchange=100)
    columns = 1 + len(jax.eval_shape(job.measured, job.x, job.y))
    assert told(net.sites[10], later) == (columns if channel == PLAIN else "measure")


def test_an_answer_that_got_lost_is_given_again_and_no_other():
    job = job_with(PLAIN)
    net, _ = federation(job)
    site, packet = net.sites[10], an_exchange(net)
    columns = 1 + len(jax.eval_shape(job.measured, job.x, job.y))
    first = asked_for(job, packet, 0, exchange=9)
    assert told(site, first) == told(site, first) == columns
    assert told(site, asked_for(job, packet, 1, exchange=9)) == "measured"
    assert told(site, asked_for(job, packet, 1, exchange=8)) == "measured"
    # A server that was started again made its exchanges anew.
    assert told(site, asked_for(job, packet, 1, exchange=8, attempt=2)) == columns


def test_replies_and_measurements_end_at_the_limit_whatever_restarts(tmp_path):
    job, limits = job_with(PLAIN), SiteLimits(max_exchanges=4)
    net, _ = federation(job, 3, folder=tmp_path, limits=limits)
    packet, answers = an_exchange(net), []
    for number in range(4):
        site = site_of(job, 0, tmp_path / "0", limits=limits)
        answers.append(told(site, with_header(packet, index=10 + number)))
        measure = asked_for(job, packet, number, exchange=10 + number)
        answers.append(told(site, measure))
    # Three of each were given before.
    assert answers[2:] == ["limit"] * 6 and all(isinstance(n, int) for n in answers[:2])
    # Another federation, of the server's making, changes nothing.
    other = replace(unpack(packet, 1 << 30)[0], kind="hello", federation="f2", info={})
    site = site_of(job, 0, tmp_path / "0", limits=limits)
    site.handle(pack(other))
    assert told(site, asked_for(job, packet, 0, federation="f2")) == "limit"


def test_a_ledger_that_cannot_be_read_is_not_begun_anew(tmp_path):
    job = job_with(PLAIN)
    federation(job, folder=tmp_path)
    file = next((tmp_path / "0").glob("*.ledger.json"))
    whole = json.loads(file.read_text())
    assert (whole["exchanges"], whole["measurements"]) == (1, 1)
    kind = {**whole["releases"][0], "participants": 0}
    for changed in ({"exchanges": -5}, {"releases": [kind]}, {"releases": [[2, 3]]}):
        file.write_text(json.dumps({**whole, **changed}))
        with pytest.raises(CheckpointError, match="ledger.json is damaged"):
            site_of(job, 0, tmp_path / "0")
    for held in (b"", b"[]"):
        file.write_bytes(held)
        with pytest.raises(CheckpointError, match="ledger.json is damaged"):
            site_of(job, 0, tmp_path / "0")
        assert file.read_bytes() == held


def test_a_federation_is_concluded_once(tmp_path):
    job, seen = job_with(PLAIN), []

    def conclude(state):
        seen.append(state)
        return {"share": 0.5}

    net, _ = federation(job, folder=tmp_path, conclude=conclude)
    packet, site = an_exchange(net), net.sites[10]
    one, other = (asked_for(job, packet, n, kind="conclude") for n in range(2))
    assert unpack(site.handle(renewed(one)), 1 << 30)[0].info == {"share": 0.5}
    site = site_of(job, 0, tmp_path / "0", conclude=conclude)
    assert unpack(site.handle(renewed(one)), 1 << 30)[0].info == {"share": 0.5}
    assert told(site, other) == "measured" and len(seen) == 2
    silent = site_of(job, 1, conclude=conclude, limits=SiteLimits(measure="none"))
    net.sites[11] = silent
    server = server_of(job, net, attempt=2)
    assert willing(server.exchanges, "concludes") == [0, 2]


@pytest.mark.slow
def test_a_server_goes_on_without_sites_that_do_not_measure():
    job, said = job_with(PLAIN), []
    limits = [SiteLimits(measure="none"), SiteLimits(), SiteLimits()]
    net = Loopback({10 + k: site_of(job, k, limits=limits[k]) for k in range(3)})
    deployed = execute(server_of(job, net, report=said.append), 2)
    kinds = [(to, unpack(packet, 1 << 30)[0].kind) for to, packet, _ in net.sent]
    assert (10, "measure") not in kinds and (11, "measure") in kinds
    assert sum("2 of 3 clients measure" in line for line in said) == 1
    assert np.isfinite(deployed.columns["upper_loss"]).all()
    # Nobody: the run is that of others, its columns are empty.
    job = job_with(MASKED)
    _, masked = federation(job, 2)
    simulated = execute(SimulatorRuntime(job), 2)
    assert np.isnan(masked.columns["upper_loss"]).all()
    left, right = (jax.tree.leaves(one.state.server)[0] for one in (masked, simulated))
    np.testing.assert_allclose(left, right, 1e-5)


def test_a_site_with_masks_measures_if_its_operator_says_so():
    job = job_with(MASKED)
    _, deployed = federation(job, limits=SiteLimits(measure="scalars"))
    assert np.isfinite(deployed.columns["upper_loss"]).all()


@pytest.mark.slow
def test_a_target_that_nobody_measures_is_refused_before_the_run(tmp_path):
    experiment = replace(settings("quadratic"), aggregate="secure", target=1.0)
    sites = {k: build_site(experiment, k, trial=True) for k in range(2)}
    with pytest.raises(InvalidInputError, match="no site measures"):
        serve(Loopback(sites), experiment, tmp_path, Terms(patience=1), report=ignore)


def ignore(*_) -> None:
    """Do nothing with what is told."""


@pytest.mark.parametrize(
    ("limits", "channel", "reason"),
    [
        ({"minimum_rows": 4}, PLAIN, "has 3 rows .* minimum_rows is 4"),
        ({"minimum_batch": 2}, PLAIN, "of 1 rows, but minimum_batch is 2"),
        ({"measure": "scalars"}, NOISY, "epsilon would not hold"),
        ({"max_epsilon": 1.0}, PLAIN, "without noise"),
        ({"measure": "gradients"}, PLAIN, "choose none or scalars"),
        ({"max_exchanges": 0}, PLAIN, "max_exchanges=0: a limit is above 0"),
        ({"max_epsilon": float("nan")}, NOISY, "max_epsilon=nan: a limit"),
    ],
    ids=str,
)
def test_limits_that_settings_do_not_meet_are_told_at_the_start(
    limits, channel, reason
):
    with pytest.raises(InvalidInputError, match=reason):
        site_of(job_with(channel), 0, limits=SiteLimits(**limits))


def test_limits_are_options_of_a_node(tmp_path):
    data, _ = plant(tmp_path, 0)
    words = ["node", "regularization", "--client", "0", "--clients", "2", "--insecure"]
    words += ["--superlink", "127.0.0.1:1", "--state", str(tmp_path / "state")]
    words += ["--algorithm", "fedbio-controls"]
    more = ["--data", data, "--batch", "4", "--minimum-batch", "50"]
    found = CliRunner().invoke(app, [*words, *more, "--precision", "float64"])
    assert found.exit_code == 2 and "minimum_batch is 50" in found.output
    texts = {"measure": "none", "max_exchanges": "7", "max_epsilon": "1.5", "client": 0}
    assert SiteLimits.read(texts) == SiteLimits("none", 7, 1.5)
    with pytest.raises(InvalidInputError, match="limits of this node"):
        SiteLimits.read({"max_exchanges": "many"})


def test_a_site_refuses_the_reply_that_would_exceed_its_epsilon(tmp_path):
    job = job_with(NOISY)
    # Of y and its direction, with the noise of one of three.
    multiplier = 20.0 / np.sqrt(2 * 3)
    most = direct_epsilon((multiplier, 3)).expected * 1.001
    limits = SiteLimits(max_epsilon=most)
    net, _ = federation(job, folder=tmp_path, limits=limits)
    packet = an_exchange(net)
    later = [with_header(packet, index=10 + number) for number in range(4)]
    numbers = told(net.sites[10], later[0])
    # Another process goes on counting.
    site = site_of(job, 0, tmp_path / "0", limits=limits)
    assert [told(site, one) for one in later[1:]] == [numbers, "privacy", "privacy"]
    held = ledger_in(tmp_path / "0")
    (kind,) = held["releases"]
    assert (kind["blocks"], kind["shares"], kind["times"]) == (2, 1, 3)
    assert held["exchanges"] == 3


def test_under_masks_epsilon_is_that_of_the_smallest_sum(tmp_path):
    """A server may say of all others but one that they dropped out."""
    job = job_with(MASKED | NOISY)
    federation(job, folder=tmp_path, minimum=2)
    (kind,) = ledger_in(tmp_path / "0")["releases"]
    assert (kind["blocks"], kind["shares"], kind["times"]) == (2, 2, 1)


def asked_of(net, node):
    """Return the exchanges that a node was asked for and answered."""
    kinds = {id(one): unpack(one[1], 1 << 30)[0].kind for one in net.sent}
    return [one for one in net.sent if one[0] == node and kinds[id(one)] == "exchange"]


def spoiling(times, dies=()):
    """Return a script in which node 1 spoils some of its replies, and a server dies."""
    count = [0]

    def script(node, packet, net):
        answer = net.sites[node].handle(packet)
        if unpack(packet, 1 << 30)[0].kind != "exchange" or node != 1:
            return answer
        count[0] += 1
        if count[0] in dies:
            raise ConnectionAbortedError
        return answer[:-1] if count[0] <= times else answer

    return script


@pytest.mark.slow
def test_epsilon_is_that_of_all_that_was_asked_for(tmp_path, monkeypatch):
    """One node spoils exchanges that are made again, and then the server dies."""
    monkeypatch.setattr(exchanges_module, "_PAUSE", 0.0)
    channel = {"clip": 1.0, "noise": 20.0, "delta": DELTA, "force": True}
    experiment = replace(settings("quadratic"), **channel)
    sites = {k: build_site(experiment, k, trial=True) for k in range(2)}
    net, terms = Loopback(sites, spoiling(9, dies=(11,))), Terms(patience=1, minimum=2)
    with pytest.raises(ConnectionAbortedError):
        serve(net, experiment, tmp_path, terms, report=ignore)
    result = serve(net, experiment, tmp_path, terms, report=ignore)
    # Nine of one reply alone; one that was lost with the server; two rounds.
    multiplier = 20.0 / np.sqrt(3)
    events = ((multiplier / np.sqrt(2), 9), (multiplier, 3))
    assert result.counts["epsilon"] == direct_epsilon(*events)
    assert result.counts["releases"] == 12
    # The sites gave the same bytes again: of each round they released one reply.
    assert [site.ledger.spent.exchanges for site in sites.values()] == [2, 2]
    told_of = {bytes(unpack(a or b"", 1 << 30)[2]) for _, _, a in asked_of(net, 0)}
    assert len(told_of) == 2
    assert json.loads((tmp_path / "releases.json").read_text()) == [
        [3, 1, 9],
        [3, 2, 3],
    ]
    (tmp_path / "releases.json").write_text('[[3, 1, "9"]]')
    with pytest.raises(CheckpointError, match="releases.json is damaged"):
        serve(net, experiment, tmp_path, terms, report=ignore)


IN_SINGLE_PRECISION = """
import pathlib, sys
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from tests.federation import Loopback
experiment = Experiment(
    "quadratic", "fedbio", clients=2, rounds=1, local_steps=1, batch=4,
    clip=0.5, noise=4.0, aggregate="secure", force=True,
)
sites = {k: build_site(experiment, k, trial=True) for k in range(2)}
folder = pathlib.Path(sys.argv[1])
result = serve(Loopback(sites), experiment, folder, Terms(patience=1))
print(result.config["precision"], result.counts["releases"])
"""


@pytest.mark.slow
def test_masks_and_noise_work_together_in_single_precision(tmp_path):
    """In another process: this one computes in double precision."""
    done = subprocess.run(
        [sys.executable, "-c", IN_SINGLE_PRECISION, str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.endswith("float32 1\n"), done.stderr
