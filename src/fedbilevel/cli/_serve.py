"""The command `serve`: the server of a federation."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedbilevel.cli import _arguments as arguments
from fedbilevel.cli._errors import plain_errors
from fedbilevel.cli._federated import (
    Deadline,
    Insecure,
    Minimum,
    Patience,
    Tolerance,
    choose_security,
    experiment_of,
    terms_of,
)
from fedbilevel.cli._progress import watched
from fedbilevel.cli._shared import show_result
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiment import Experiment
from fedbilevel.run import DELTA

__all__ = ["serve"]

Out = Annotated[Path, typer.Option(help="folder for checkpoints, logs and result")]


def serve(
    task: arguments.Task,
    clients: Annotated[int, typer.Option(help="number of sites, K")],
    out: Out,
    algorithm: arguments.Algorithm = None,
    participants: arguments.Participants = None,
    rounds: arguments.Rounds = None,
    local_steps: arguments.LocalSteps = None,
    batch: arguments.Batch = None,
    seed: arguments.Seed = 0,
    settings: arguments.Settings = None,
    precision: arguments.Precision = "float32",
    clip: arguments.Clip = None,
    noise: arguments.Noise = 0.0,
    delta: arguments.Delta = DELTA,
    compress: arguments.Compress = None,
    aggregate: arguments.Aggregate = "mean",
    measure_every: arguments.MeasureEvery = 1,
    address: Annotated[
        str, typer.Option(help="where the SuperLink listens, HOST:PORT")
    ] = "127.0.0.1:8000",
    certificates: Annotated[
        Path | None, typer.Option(help="folder with ca.crt, server.pem, server.key")
    ] = None,
    node_key: Annotated[
        list[Path] | None,
        typer.Option(help="public key of a client's node; repeat, in their order"),
    ] = None,
    insecure: Insecure = False,
    deadline: Deadline = 600.0,
    minimum: Minimum = 1,
    patience: Patience = 86400.0,
    tolerance: Tolerance = 1e3,
    as_json: arguments.AsJson = False,
) -> None:
    """Serve a federation to sites; an interrupted one goes on where it was.

    The server has no rows. Settings must be those of the nodes.
    """
    with plain_errors():
        terms = terms_of(deadline, minimum, patience, tolerance)
        choose_security(insecure, "certificates", certificates)
        _check_keys(node_key or [], clients, insecure)
        experiment = experiment_of(
            task=task,
            algorithm=algorithm,
            clients=clients,
            participants=participants,
            rounds=rounds,
            local_steps=local_steps,
            batch=batch,
            seed=seed,
            data=None,
            settings=settings,
            precision=precision,
            clip=clip,
            noise=noise,
            delta=delta,
            compress=compress,
            aggregate=aggregate,
            measure_every=measure_every,
        )
        _serve(experiment, out, terms, address, certificates, node_key or [], as_json)


def _check_keys(node_keys: list[Path], clients: int, insecure: bool) -> None:
    if node_keys and insecure:
        raise InvalidInputError("--insecure and --node-key exclude each other.")
    if len(node_keys) > clients:
        raise InvalidInputError(
            f"{len(node_keys)} times --node-key for {clients} clients: give one for "
            "each, in their order. Other nodes can be let in with `flwr supernode`."
        )


def _serve(
    experiment: Experiment,
    folder: Path,
    terms: Any,
    address: str,
    certificates: Path | None,
    node_keys: list[Path],
    as_json: bool,
) -> None:
    from fedbilevel.deployment.serving import serve_over_flower
    from fedbilevel.deployment.superlink import SuperLink

    folder.mkdir(parents=True, exist_ok=True)
    experiment.save(folder)
    link = SuperLink(address, folder, certificates)
    with watched(experiment.task, quiet=as_json) as watch:
        result = serve_over_flower(
            experiment, folder, terms, link, node_keys=node_keys, watch=watch
        )
    show_result(result, folder, as_json)
