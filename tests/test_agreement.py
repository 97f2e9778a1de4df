"""Sites that cannot run together, and servers that cannot start, are told why."""

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.deployment.apps import Served
from fedbilevel.deployment.processes import Process
from fedbilevel.deployment.serving import make_keys, serve_over_flower
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.experiments import Experiment, federated
from fedbilevel.experiments.federated import ATTENDANCE, replay, serve
from fedbilevel.experiments.sites import build_site
from fedbilevel.federation import Terms
from fedbilevel.federation.wire import unpack
from tests.federation import Loopback
from tests.planted import settings, sites_with_rows

TERMS = Terms(patience=1)


def write_rows(path: Path, count: int, names: tuple[str, str]) -> str:
    features = np.random.default_rng(count).normal(size=(count, 3))
    label = np.array(names)[(features[:, 0] > 0).astype(int)]
    np.savez(path, features=features, label=label)
    return str(path)


def serve_sites(folder: Path, sources: list[str], **options: str):
    experiment = settings("regularization", **options)
    sites = {}
    for client, data in enumerate(sources):
        # How long to run is the server's business.
        own = replace(experiment, rounds=None, options={**options, "data": data})
        sites[client] = build_site(own, client)
    return serve(Loopback(sites), experiment, folder / "run", TERMS)


def test_sites_must_mean_the_same_classes(tmp_path):
    first = write_rows(tmp_path / "a.npz", 40, ("ill", "well"))
    other = write_rows(tmp_path / "b.npz", 40, ("no", "yes"))
    with pytest.raises(InvalidInputError, match="client 1 .* in classes"):
        serve_sites(tmp_path, [first, other])


@pytest.mark.slow
def test_advice_that_depends_on_rows_is_named_and_can_be_chosen(tmp_path):
    few = write_rows(tmp_path / "a.npz", 40, ("ill", "well"))
    many = write_rows(tmp_path / "b.npz", 2600, ("ill", "well"))
    with pytest.raises(InvalidInputError, match="in lower_step, upper_step"):
        serve_sites(tmp_path, [few, many], folds="1")
    chosen = {"upper_step": "20", "lower_step": "0.5", "folds": "1"}
    result = serve_sites(tmp_path / "chosen", [few, many], **chosen)
    assert result.final["round"] == 2


def trial_sites(experiment: Experiment) -> Loopback:
    """Return sites that take their share of the rows of all clients."""
    clients = range(experiment.clients or 0)
    return Loopback({k: build_site(experiment, k, trial=True) for k in clients})


def ignore(*_) -> None:
    """Do nothing with what is told."""


@pytest.mark.slow
@pytest.mark.parametrize("safeguard", [False, True])
def test_sites_whose_replies_are_masked_are_taken_and_replayed(tmp_path, safeguard):
    """They report keys of their own, in which they may differ.

    All samples are alike, since no simulator draws those of a site under masks.
    """
    alike = settings("quadratic", noise="0")
    experiment = replace(alike, aggregate="secure", safeguard=safeguard)
    experiment.save(tmp_path)
    net = trial_sites(experiment)
    result = serve(net, experiment, tmp_path, TERMS, report=ignore)
    deployed, outcome, algorithm = replay(tmp_path)
    point = algorithm.point(outcome.state.server)
    assert result.final["round"] == 2
    np.testing.assert_allclose(deployed.point["y"], point.y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{}, {"aggregate": "secure"}, {"noise": 1.0}])
def test_a_replay_says_where_sites_draw_by_secrets(tmp_path, monkeypatch, more):
    replace(settings("quadratic"), clip=1.0, **more).save(tmp_path)
    (tmp_path / "result.json").touch()
    point = SimpleNamespace(x=np.zeros(2), y=np.zeros(2))
    made = SimpleNamespace(point={"x": point.x, "y": point.y})
    outcome = SimpleNamespace(state=SimpleNamespace(server=None))
    method = SimpleNamespace(point=lambda server: point)
    monkeypatch.setattr(federated, "replay", lambda folder: (made, outcome, method))
    told = " ".join(CliRunner().invoke(app, ["replay", str(tmp_path)]).output.split())
    assert "Largest difference of the final points: 0" in told
    assert ("by secrets of their own" in told) == bool(more)


@pytest.mark.slow
def test_a_run_that_ends_early_is_replayed_as_far_as_it_went(tmp_path):
    # How long to run is the server's business: the sites do not know of it.
    sites = settings("quadratic", noise="0")
    ends = {"target": 1e6, "patience": 3, "max_bytes": 10**6, "max_seconds": 1e6}
    experiment = replace(sites, rounds=9, measure_every=2, **ends)
    net = trial_sites(sites)
    experiment.save(tmp_path)
    result = serve(net, experiment, tmp_path, TERMS, report=ignore)
    assert result.final["round"] == 2 and "reached 1e+06" in result.ended
    deployed, outcome, algorithm = replay(tmp_path)
    point = algorithm.point(outcome.state.server)
    np.testing.assert_allclose(deployed.point["x"], point.x, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(deployed.point["y"], point.y, rtol=1e-11, atol=1e-11)
    record = np.full((2, 4), 4, np.uint8)  # as 0.2.0 wrote it of sums asked again
    np.savez(tmp_path / ATTENDANCE, attendance=record)
    with pytest.raises(CheckpointError, match=r"only version 0\.2\.0 draws"):
        replay(tmp_path)
    (tmp_path / ATTENDANCE).write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CheckpointError, match="attendance.npz is damaged"):
        replay(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", [None, 1e6])
def test_sites_conclude_when_a_run_has_ended_however_it_did(target, tmp_path):
    sites, _ = sites_with_rows(tmp_path, "cleaning", corrupted="0.5")
    experiment = replace(settings("cleaning", corrupted="0.5"), target=target)
    net = Loopback(dict(enumerate(sites)))
    result = serve(net, experiment, tmp_path / "run", TERMS, report=ignore)
    assert result.final["round"] == (2 if target is None else 1)
    assert {"weight_auc", "weight_clean"} <= set(result.final)
    kinds = [unpack(packet, 1 << 30)[0].kind for _, packet, _ in net.sent]
    assert kinds.count("conclude") == len(sites)


def test_an_algorithm_that_needs_all_rows_is_not_for_sites():
    with pytest.raises(InvalidInputError, match="'pooled' needs the rows of all"):
        build_site(replace(settings("quadratic"), algorithm="pooled"), 0, trial=True)


def test_noise_needs_sites_of_equal_weight(tmp_path):
    experiment = replace(settings("quadratic"), clip=1.0, noise=1.0, weights=(1, 2))
    net = trial_sites(experiment)
    with pytest.raises(InvalidInputError, match="weights are 1 to 2"):
        serve(net, experiment, tmp_path, TERMS, report=ignore)


def test_a_federation_of_an_older_protocol_is_not_continued(tmp_path):
    held = '{"experiment": "0", "task": "0", "attempt": 1}'
    (tmp_path / "federation.json").write_text(held)
    with pytest.raises(CheckpointError, match="begun under protocol 2 or older"):
        serve(Loopback({}), settings("quadratic"), tmp_path, TERMS)
    assert (tmp_path / "federation.json").read_text() == held


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        link = SuperLink(address, tmp_path, certificates=None)
        with pytest.raises(InvalidInputError, match="somebody listens"):
            served = Served(settings("quadratic"), tmp_path, TERMS)
            serve_over_flower(served, link, watch=lambda *_: None)
    assert not any(tmp_path.iterdir())


def test_wrong_keys_are_told_before_anything_starts(tmp_path):
    keys, folder = make_keys(tmp_path, 2), tmp_path / "run"
    # The address is taken, which would be found next.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        link = SuperLink(address, folder, certificates=None)
        twice = replace(keys, peers=(keys.peers[0], keys.peers[0]))
        served = Served(settings("quadratic"), folder, TERMS, twice)
        with pytest.raises(InvalidInputError, match="clients 0 and 1 have the same"):
            serve_over_flower(served, link, watch=lambda *_: None)
    assert not folder.exists()


def test_homes_of_processes_do_not_depend_on_where_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = Process("superlink", [], Path("run"))
    assert process.environment()["FLWR_HOME"] == f"{tmp_path}/run/homes/superlink"
    process.check()  # it was not started, so that nothing can be wrong


def test_a_node_without_rows_of_its_own_is_told(tmp_path):
    words = "node regularization --clients 2 --client 0 --superlink 127.0.0.1:1"
    done = CliRunner().invoke(
        app, [*words.split(), "--state", str(tmp_path), "--insecure"]
    )
    assert done.exit_code == 2 and "--data" in done.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--insecure --node-key a.pub", "give --private-key, or"),
        ("--insecure --certificates c", "exclude each other"),
        (
            "--certificates c --private-key s "
            "--node-key a.pub --node-key b.pub --node-key c.pub",
            "3",
        ),
        ("--certificates c --private-key s --node-key a.pub", "1 times"),
        ("--certificates c", "give --private-key and --node-key, or --insecure"),
        ("", "give --certificates and --private-key and --node-key, or --insecure"),
    ],
)
def test_a_server_with_odd_keys_is_told_before_anything_starts(words, reason, tmp_path):
    start = ["serve", "quadratic", "--clients", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*start, *words.split()])
    assert done.exit_code == 2 and reason in done.output
    assert not any(tmp_path.iterdir())
