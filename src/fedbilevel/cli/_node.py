"""The command `node`: one site of a federation."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedbilevel.cli import _arguments as arguments
from fedbilevel.cli._errors import plain_errors
from fedbilevel.cli._federated import (
    Insecure,
    choose_security,
    experiment_of,
    needs_flower,
)
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiment import Experiment
from fedbilevel.run import DELTA
from fedbilevel.runtime import configure

__all__ = ["node"]


def node(
    task: arguments.Task,
    client: Annotated[int, typer.Option(help="number of this site, from 0")],
    clients: Annotated[int, typer.Option(help="number of sites, K")],
    superlink: Annotated[str, typer.Option(help="where the server is, HOST:PORT")],
    state: Annotated[Path, typer.Option(help="folder for what this site remembers")],
    algorithm: arguments.Algorithm = None,
    participants: arguments.Participants = None,
    local_steps: arguments.LocalSteps = None,
    batch: arguments.Batch = None,
    seed: arguments.Seed = 0,
    data: Annotated[
        str | None, typer.Option(help="file or folder of this site's own rows")
    ] = None,
    settings: arguments.Settings = None,
    precision: arguments.Precision = "float32",
    clip: arguments.Clip = None,
    noise: arguments.Noise = 0.0,
    delta: arguments.Delta = DELTA,
    compress: arguments.Compress = None,
    aggregate: arguments.Aggregate = "mean",
    root_certificates: Annotated[
        Path | None, typer.Option(help="certificate of the authority, ca.crt")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option(help="this site's key, made by ssh-keygen")
    ] = None,
    insecure: Insecure = False,
    patience: Annotated[
        float, typer.Option(help="seconds without a connection before giving up")
    ] = 86400.0,
    trial: Annotated[
        bool,
        typer.Option("--trial", help="take this client's share of data of all clients"),
    ] = False,
    cores: Annotated[int, typer.Option(help="cores to compute on")] = 1,
) -> None:
    """Take part in a federation, with rows that never leave this site."""
    with plain_errors():
        needs_flower()
        choose_security(insecure, "root-certificates", root_certificates, private_key)
        if data is None and not trial:
            # The task would take a set of its own, and nobody would notice.
            raise InvalidInputError("give --data, where the rows of this site are.")
        experiment = experiment_of(
            task=task,
            algorithm=algorithm,
            clients=clients,
            participants=participants,
            rounds=None,
            local_steps=local_steps,
            batch=batch,
            seed=seed,
            data=data,
            settings=settings,
            precision=precision,
            clip=clip,
            noise=noise,
            delta=delta,
            compress=compress,
            aggregate=aggregate,
        )
        from fedbilevel.runtime.flower.node import Link

        link = Link(superlink, root_certificates, private_key, patience)
        configure(precision, cores=cores)
        _take_part(experiment, client, link, state, trial)


def _take_part(
    experiment: Experiment, client: int, link: Any, state: Path, trial: bool
) -> None:
    from fedbilevel.deployment import build_site
    from fedbilevel.runtime.flower.node import serve_packets

    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: asked.append(signum))
    console = Console(stderr=True)
    site = build_site(experiment, client, trial=trial, folder=state)
    console.print(f"Client {client} is ready, its state is in {state}")
    serve_packets(
        link,
        site.handle,
        asked_to_stop=lambda: bool(asked),
        report=lambda text: console.print(text, markup=False),
    )
    console.print("Ended as asked.")
