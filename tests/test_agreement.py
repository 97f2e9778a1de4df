"""Sites that cannot run together, and servers that cannot start, are told why."""

import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.deployment import build_site, serve
from fedbilevel.deployment.processes import Process
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.errors import InvalidInputError
from fedbilevel.runtime.federation import Terms
from tests.federation import Loopback
from tests.planted import settings

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


def test_advice_that_depends_on_rows_is_named_and_can_be_chosen(tmp_path):
    few = write_rows(tmp_path / "a.npz", 40, ("ill", "well"))
    many = write_rows(tmp_path / "b.npz", 2600, ("ill", "well"))
    with pytest.raises(InvalidInputError, match="in lower_step, upper_step"):
        serve_sites(tmp_path, [few, many])
    chosen = {"upper_step": "20", "lower_step": "0.5"}
    result = serve_sites(tmp_path / "chosen", [few, many], **chosen)
    assert result.final["round"] == 2


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        link = SuperLink(address, tmp_path, certificates=None)
        with pytest.raises(InvalidInputError, match="somebody listens"):
            serve_over_flower(
                settings("quadratic"), tmp_path, TERMS, link, watch=lambda *_: None
            )
    assert not any(tmp_path.iterdir())


def test_homes_of_processes_do_not_depend_on_where_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = Process("superlink", [], Path("run"))
    assert process.environment()["FLWR_HOME"] == f"{tmp_path}/run/homes/superlink"


def test_a_node_without_rows_of_its_own_is_told(tmp_path):
    words = "node regularization --clients 2 --client 0 --superlink 127.0.0.1:1"
    done = CliRunner().invoke(
        app, [*words.split(), "--state", str(tmp_path), "--insecure"]
    )
    assert done.exit_code == 2 and "--data" in done.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--insecure --node-key a.pub", "exclude each other"),
        ("--certificates c --node-key a.pub --node-key b.pub --node-key c.pub", "3"),
        ("", "--certificates, or --insecure"),
    ],
)
def test_a_server_with_odd_keys_is_told_before_anything_starts(words, reason, tmp_path):
    start = ["serve", "quadratic", "--clients", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*start, *words.split()])
    assert done.exit_code == 2 and reason in done.output
    assert not any(tmp_path.iterdir())
