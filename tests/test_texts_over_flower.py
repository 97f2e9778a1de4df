"""Texts of one's own at real nodes: the numbers of the simulator, and what travels.

Nodes are processes that were given the folder of their site alone, over TLS, with keys,
through the proxy of the guide, which records all that passes.
"""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.deployment.apps import Served
from fedbilevel.deployment.processes import Process, free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import SuperLink
from fedbilevel.experiments import Experiment
from fedbilevel.federation import Terms
from fedbilevel.federation.signatures import KeyFiles
from fedbilevel.result import Result
from tests.gateway import Gateway, make_certificates, make_key

pytestmark = pytest.mark.slow
LENGTH, ROUNDS, SITES = 24, 2, ("north", "south", "west")
SECRET = "zebra"  # in every text, and in nothing else
HELD = {
    "north": {"notes": ["blue", "green", "white"], "forum": ["grey", "pink"]},
    "south": {"notes": ["red", "yellow"]},
    "west": {"forum": ["brown"], "notes": ["black", "violet"]},
}
TRUSTED = ["gold", "silver", "amber", "rose", "teal"]
# Logits of two sources and two copies of B: 8 x 2 of queries, 8 x 2 of down.
NUMBERS = 2 + 2 * (16 + 16)
EXPERIMENT = Experiment(
    "reweighting",
    clients=3,
    rounds=ROUNDS,
    batch=2,
    local_steps=2,
    precision="float32",
    options={
        **{"width": "8", "rank": "2", "adapted": "query,down"},
        "length": str(LENGTH),
    },
)


def write_texts(folder: Path) -> Path:
    """Write a folder for every site; each has some of the sources."""
    for site, sources in HELD.items():
        for name, words in {**sources, "trusted": TRUSTED}.items():
            path = folder / site / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [{"prompt": f"{SECRET} ", "response": word} for word in words]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tokens() -> str:
    """Return the tokens of all sites: the bytes of responses, and an end of each.

    Every fifth trusted text tests, and counts for nobody.
    """
    counts = {"trusted": len(SITES) * sum(len(word) + 1 for word in TRUSTED[:4])}
    for sources in HELD.values():
        for name, words in sources.items():
            counts[name] = counts.get(name, 0) + sum(len(one) + 1 for one in words)
    return ",".join(f"{name}:{count}" for name, count in sorted(counts.items()))


def node_of(
    experiment: Experiment, client: int, folder: Path, texts: Path, address: str
) -> Process:
    """Return a node as its operator starts it, with its own texts alone."""
    shared = experiment.arguments(shared=True)
    own = {
        "client": client,
        "superlink": address,
        "root-certificates": folder / "certificates" / "ca.crt",
        "private-key": folder / f"node{client}",
        "server-key": folder / "server.pub",
        "data": texts / SITES[client],
        "state": folder / f"state{client}",
    }
    words = [word for name, value in own.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "fedbilevel.cli", "node", *shared, *words]
    return Process(f"node-{client}", command, folder)


def served(
    experiment: Experiment, folder: Path, texts: Path
) -> tuple[Result, list[bytes]]:
    """Serve to three nodes; return what came of it, and all that passed."""
    certificates = make_certificates(folder / "certificates")
    for name in ("server", "node0", "node1", "node2"):
        make_key(folder / name)
    peers = tuple(folder / f"node{client}.pub" for client in range(3))
    link = SuperLink(f"127.0.0.1:{free_port()}", folder / "run", certificates)
    with Gateway(link.address, certificates) as gateway:
        terms = Terms(deadline=120.0, patience=300.0)
        keys = KeyFiles(folder / "server", peers)
        result = serve_over_flower(
            Served(experiment, folder / "run", terms, keys),
            link,
            watch=lambda *_: None,
            say=lambda text: None,
            crowd=[
                node_of(experiment, client, folder, texts, gateway.address)
                for client in range(3)
            ],
        )
    return result, gateway.recorded


def simulated_alone(experiment: Experiment, folder: Path) -> Result:
    """Simulate in a process of its own: in this one numbers have 64 bits."""
    words = ["run", *experiment.arguments(), "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "fedbilevel.cli", *words], check=True)
    return Result.load(folder)


def pushed(recorded: list[bytes]) -> list[bytes]:
    """Return what nodes sent as content: path, headers and body follow each other."""
    return [
        recorded[place + 2]
        for place, part in enumerate(recorded)
        if part == b"/v1/fleet/push-object"
    ]


# The method divides differences of slopes by nu = 0.1, and their rounding with them.
# Rounding to bfloat16 can go the other way where float32 differs in its last bit.
KINDS = {"float32": (4, 1e-4), "bfloat16": (2, 2.0**-8)}


@pytest.mark.parametrize(
    "kind", [pytest.param("float32", marks=pytest.mark.exhaustive), "bfloat16"]
)
def test_three_nodes_with_texts_are_as_in_the_simulator(kind, tmp_path):
    each, off = KINDS[kind]
    texts = write_texts(tmp_path / "texts")
    channel = "bfloat16" if each == 2 else None
    given = replace(EXPERIMENT, compress=channel, compress_down=channel)
    shared = replace(given, options={**given.options, "tokens": tokens()})
    result, recorded = served(shared, tmp_path, texts)
    own = replace(given, options={**given.options, "data": str(texts)})
    simulated = simulated_alone(own, tmp_path / "simulated")
    for name, leaf in simulated.point.items():
        assert np.any(leaf)
        allowed = off * np.abs(leaf).max()
        np.testing.assert_allclose(result.point[name], leaf, rtol=0, atol=allowed)
    # The adapters and the logits, and nothing else but what safeguards the steps: how
    # often they were halved, when that is new, whether they should, and the upper loss,
    # up as it is and down as it was.
    wire = result.counts["wire"]
    leaves = wire["bytes_down"] + wire["bytes_up"] - wire["of_them_headers"]
    assert leaves == 3 * (4 + ROUNDS * (2 * each * NUMBERS + 3 * 4))
    # A hello, and of every round an exchange and a measurement; none is longer. Besides
    # them a node may confirm that it heard of the end, without a word.
    sent = [b"FBL" in one for one in pushed(recorded)]
    assert sent.count(True) == 3 * (1 + 2 * ROUNDS) and sent.count(False) <= 3
    assert max(map(len, pushed(recorded))) < 4 * NUMBERS + 6000
    assert SECRET.encode() not in b"\0".join(recorded)
    assert (texts / "west" / "notes.jsonl").read_text().count(SECRET) == 2
    with (tmp_path / "run" / "weights.csv").open(newline="") as file:
        assert {row["source"] for row in csv.DictReader(file)} == {"notes", "forum"}
    adapter = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    assert adapter.stat().st_size > 0
