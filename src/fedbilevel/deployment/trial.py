"""A whole federation on this machine, with real processes, for trying things out."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from fedbilevel.deployment.processes import Process, free_port
from fedbilevel.deployment.serving import serve_over_flower
from fedbilevel.deployment.superlink import SuperLink, program
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import clients_of
from fedbilevel.federation import Terms
from fedbilevel.result import Result
from fedbilevel.runtime import Watch

__all__ = ["KINDS", "deployment_of", "federate", "persistent_node"]

KINDS = ("persistent", "stock")
_OPTIONS = ("algorithm", "clients", "participants", "local_steps", "batch", "seed")


def federate(
    experiment: Experiment,
    folder: Path,
    terms: Terms,
    *,
    nodes: str,
    watch: Watch,
) -> Result:
    """Run an experiment on as many nodes as it has clients, on this machine.

    `nodes` are persistent, ours, or stock, Flower's own.
    """
    if nodes not in KINDS:
        raise InvalidInputError(f"nodes '{nodes}': choose {' or '.join(KINDS)}.")
    where = f"127.0.0.1:{free_port()}"
    link = SuperLink(where, folder, certificates=None, remembers=False)
    make = persistent_node if nodes == "persistent" else _stock
    # One core each: they share this machine, and would only wait for each other.
    crowd = [make(experiment, k, folder, link) for k in range(clients_of(experiment))]
    return serve_over_flower(experiment, folder, terms, link, watch=watch, crowd=crowd)


def _arguments_of(experiment: Experiment) -> list[str]:
    """Return the shared settings as they are typed."""
    given = asdict(experiment)
    words = [experiment.task]
    for name in _OPTIONS:
        if given[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(given[name])]
    for name, value in experiment.channel_settings().items():
        words += [f"--{name}", str(value)]
    if experiment.precision != "float32":
        words += ["--precision", experiment.precision]
    for name, value in experiment.options.items():
        words += ["--set", f"{name}={value}"]
    return words


def _node_command(experiment: Experiment, client: int, *more: str) -> list[str]:
    """Return the command of one node."""
    words = ["node", *_arguments_of(experiment), "--client", str(client)]
    return [*words, *more]


def deployment_of(experiment: Experiment) -> list[str]:
    """Return what a real deployment of an experiment would type."""
    options = {n: v for n, v in experiment.options.items() if n != "data"}
    shared = " ".join(_arguments_of(replace(experiment, options=options)))
    known = "--site-key node0.pub ... " if experiment.aggregate == "secure" else ""
    return [
        f"fedbilevel serve {shared} --address 127.0.0.1:8000 "
        "--certificates certificates --node-key node0.pub ... --out RUN",
        f"fedbilevel node {shared} --client 0 --superlink SERVER:8443 "
        f"--root-certificates ca.crt --private-key node0 {known}--data ROWS "
        "--state STATE",
    ]


def persistent_node(
    experiment: Experiment, client: int, folder: Path, link: SuperLink
) -> Process:
    """Return a node of ours for one client, not started yet."""
    state = str(folder / "nodes" / str(client))
    where = ("--superlink", link.address, "--insecure", "--trial", "--state", state)
    command = [sys.executable, "-m", "fedbilevel.cli"]
    command += _node_command(experiment, client, *where)
    return Process(f"node-{client}", command, folder)


def _stock(
    experiment: Experiment, client: int, folder: Path, link: SuperLink
) -> Process:
    state = json.dumps(str((folder / "nodes" / str(client)).resolve()))
    held = f'client={client} trial="true" state={state}'
    command = [
        program("flower-supernode"),
        *("--insecure", "--superlink", link.address),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--node-config", held),
    ]
    return Process(f"node-{client}", command, folder)
