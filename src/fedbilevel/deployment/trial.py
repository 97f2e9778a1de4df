"""A whole federation on this machine, with real processes, for trying things out."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedbilevel import tasks
from fedbilevel.datasets.tables import READERS, kind_of
from fedbilevel.deployment.apps import ERROR, Served
from fedbilevel.deployment.processes import Process, free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import SuperLink, program
from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.served_model import leave_of_trial
from fedbilevel.experiments.sites import LOCAL
from fedbilevel.federation.signatures import KeyFiles, make_key_pair
from fedbilevel.models import can_be_kept
from fedbilevel.result import Result
from fedbilevel.runtime import Watch

KINDS = ("persistent", "stock")


def federate(
    served: Served,
    *,
    nodes: str,
    watch: Watch,
    say: Callable[[str], None] = print,
    about: Callable[[str, str], None] = lambda word, who: None,
) -> Result:
    """Run an experiment on as many nodes as it has clients, on this machine.

    `nodes` are persistent, ours, or stock, Flower's own. All have keys that are made
    for this run, in its folder. Only nodes of ours can tune.
    """
    experiment, folder, tuning = served.experiment, served.folder, served.tuning
    if nodes not in KINDS:
        raise InvalidInputError(f"nodes '{nodes}': choose {' or '.join(KINDS)}.")
    if tuning is not None and nodes != KINDS[0]:
        raise InvalidInputError(
            f"--tune with nodes '{nodes}': Flower's own nodes forget their steps "
            f"between two messages. Choose {KINDS[0]}."
        )
    where = f"127.0.0.1:{free_port()}"
    link = SuperLink(where, folder, certificates=None, remembers=False)
    make = persistent_node if nodes == "persistent" else _stock
    keys = make_keys(folder, experiment.sites)
    # One core each: they share this machine, and would only wait for each other.
    crowd = [make(experiment, k, folder, link) for k in range(experiment.sites)]
    for node in crowd if tuning is not None else ():
        node.command.append("--tune")
    served = replace(served, keys=keys)
    result = serve_over_flower(
        served, link, watch=watch, say=say, about=about, crowd=crowd
    )
    return _with_model(experiment, result, folder, say)


def _with_model(
    experiment: Experiment, result: Result, folder: Path, say: Callable[[str], None]
) -> Result:
    """Leave a model in the folder, as a simulation would: all rows are here."""
    if not can_be_kept():
        return result
    try:
        model = leave_of_trial(experiment, result, folder)
    except (FedbilevelError, OSError) as error:  # the run is over, and stays
        say(f"No model is left: {error}")
        return result
    if model is not None:
        model.save(folder)
    return replace(result, model=model)


def make_keys(folder: Path, clients: int) -> KeyFiles:
    """Make the keys of a trial, and return those of its server."""
    for name in ("server", *map(str, range(clients))):
        make_key_pair(folder / "keys" / name)
    peers = [folder / "keys" / f"{client}.pub" for client in range(clients)]
    return KeyFiles(folder / "keys" / "server", tuple(peers))


def _site_keys(folder: Path, client: int) -> KeyFiles:
    """Return the keys that were made for one client."""
    return KeyFiles(folder / "keys" / str(client), (folder / "keys" / "server.pub",))


def _all_sites(experiment: Experiment, folder: Path) -> list[Path]:
    """Return the public keys by which sites know each other, where they need to."""
    masked = experiment.aggregate == "secure"
    count = experiment.sites if masked else 0
    return [folder / "keys" / f"{client}.pub" for client in range(count)]


def deployment_of(experiment: Experiment, *, tune: bool = False) -> list[str]:
    """Return what a real deployment of an experiment would type."""
    shared = shlex.join(experiment.arguments(shared=True, without=LOCAL))
    known = "--site-key node0.pub ... " if experiment.aggregate == "secure" else ""
    rows = Path(experiment.options.get("data", ""))
    # Sites with tables of their own agree on their columns, by `fedbilevel prepare`.
    if kind_of(rows) in READERS and "preparation" in experiment.task_options:
        shared += " --preparation PREPARATION"
    # Those with texts add up their tokens, which a node prints.
    if rows.is_dir() and "tokens" in experiment.task_options:
        shared += " --set tokens=TOKENS"
    tuned = " --tune" if tune else ""
    return [
        f"fedbilevel serve {shared} --address 127.0.0.1:8000 "
        "--certificates certificates --private-key server --node-key node0.pub ... "
        f"--out RUN{tuned}",
        f"fedbilevel node {shared} --client 0 --superlink SERVER:8443 "
        "--root-certificates ca.crt --private-key node0 --server-key server.pub "
        f"{known}--data ROWS --state STATE{tuned}",
    ]


def persistent_node(
    experiment: Experiment, client: int, folder: Path, link: SuperLink
) -> Process:
    """Return a node of ours for one client, not started yet."""
    state = str(folder / "nodes" / str(client))
    where = ("--superlink", link.address, "--trial", "--state", state)
    if link.certificates is None:
        where += ("--insecure",)
    else:
        where += ("--root-certificates", str(link.certificates / "ca.crt"))
    keys = _site_keys(folder, client)
    known = ("--private-key", str(keys.private), "--server-key", str(keys.peers[0]))
    measured = ("--measure", "scalars") if _measures(experiment) else ()
    for path in _all_sites(experiment, folder):
        known += ("--site-key", str(path))
    words = ("node", *experiment.arguments(shared=True), "--client", str(client))
    command = [sys.executable, "-m", "fedbilevel.cli"]
    command += [*words, *where, *known, *measured]
    return Process(f"node-{client}", command, folder)


def _measures(experiment: Experiment) -> bool:
    """Say whether nodes measure: all rows of a trial are of one who tries it."""
    return not experiment.noise


def _stock(
    experiment: Experiment, client: int, folder: Path, link: SuperLink
) -> Process:
    keys = _site_keys(folder, client)
    paths = {
        "state": folder / "nodes" / str(client),
        "private_key": keys.private,
        "server_key": keys.peers[0],
    }
    held = [f"{name}={json.dumps(str(path.resolve()))}" for name, path in paths.items()]
    # What is in files of one's own, a node takes from its operator alone.
    for kind in ("task", "algorithm"):
        named = getattr(experiment, kind)
        if named is not None and tasks.is_file(named):
            held.append(f"{kind}={json.dumps(named)}")
    held += ['measure="scalars"'] if _measures(experiment) else []
    others = [str(path.resolve()) for path in _all_sites(experiment, folder)]
    held += [f"site_keys={json.dumps(os.pathsep.join(others))}"] if others else []
    config = " ".join([f'client={client} trial="true"', *held])
    command = [
        program("flower-supernode"),
        *("--insecure", "--superlink", link.address),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--node-config", config),
    ]
    error = folder / "nodes" / str(client) / ERROR
    return Process(f"node-{client}", command, folder, error=error)
