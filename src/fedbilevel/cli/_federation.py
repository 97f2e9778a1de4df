"""Commands for real federations: `federate`, `serve`, `node` and `replay`."""

import signal
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from fedbilevel.cli import _arguments as arguments
from fedbilevel.cli._arguments import read_settings, read_sizes
from fedbilevel.cli._errors import plain_errors
from fedbilevel.cli._progress import watched
from fedbilevel.cli._shared import Command, print_json, show_result
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiment import Experiment
from fedbilevel.run import named_leaves, open_folder
from fedbilevel.runtime import configure

__all__ = ["COMMANDS"]

Deadline = Annotated[float, typer.Option(help="seconds an exchange may take")]
Minimum = Annotated[
    int, typer.Option(help="replies without which an exchange is made again")
]
Patience = Annotated[
    float, typer.Option(help="seconds to wait for all nodes at the start")
]
Tolerance = Annotated[
    float,
    typer.Option(help="a reply that moves so many times the median is left out"),
]
Out = Annotated[Path, typer.Option(help="folder for checkpoints, logs and result")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="neither encryption nor keys: for trials")
]


def _experiment(**given: Any) -> Experiment:
    sizes = {n: given.pop(n) for n in ("clients", "rounds", "local_steps", "batch")}
    options = read_settings(given.pop("settings") or [], given.pop("data"))
    return Experiment(**given, **read_sizes(**sizes), options=options)


def _terms(deadline: float, minimum: int, patience: float, tolerance: float):
    _needs_flower()
    from fedbilevel.runtime.federation import Terms

    return Terms(deadline, minimum, patience, tolerance)


def _needs_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            "a federation needs Flower. Install it with "
            "`pip install 'fedbilevel[flower]'`."
        ) from error


def federate(
    task: arguments.Task,
    algorithm: arguments.Algorithm = None,
    clients: Annotated[int, typer.Option(help="number of nodes, K")] = 4,
    participants: arguments.Participants = None,
    rounds: arguments.Rounds = None,
    local_steps: arguments.LocalSteps = None,
    batch: arguments.Batch = None,
    seed: arguments.Seed = 0,
    data: arguments.Data = None,
    settings: arguments.Settings = None,
    precision: arguments.Precision = "float32",
    measure_every: arguments.MeasureEvery = 1,
    nodes: Annotated[str, typer.Option(help="persistent or stock")] = "persistent",
    deadline: Deadline = 60.0,
    minimum: Minimum = 1,
    patience: Patience = 600.0,
    tolerance: Tolerance = 1e3,
    out: Annotated[
        Path | None, typer.Option(help="new folder for checkpoints and result")
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Run a whole federation on this machine, with real processes, to try it out."""
    with plain_errors():
        terms = _terms(deadline, minimum, patience, tolerance)
        experiment = _experiment(
            task=task,
            algorithm=algorithm,
            clients=clients,
            participants=participants,
            rounds=rounds,
            local_steps=local_steps,
            batch=batch,
            seed=seed,
            data=data,
            settings=settings,
            precision=precision,
            measure_every=measure_every,
        )
        if out is not None:
            open_folder(out, resume=False)
            _federate(experiment, out, terms, nodes, as_json, kept=True)
            return
        with tempfile.TemporaryDirectory() as folder:
            _federate(experiment, Path(folder), terms, nodes, as_json, kept=False)


def _federate(
    experiment: Experiment,
    folder: Path,
    terms: Any,
    nodes: str,
    as_json: bool,
    *,
    kept: bool,
) -> None:
    from fedbilevel.deployment import trial

    experiment.save(folder)
    if not as_json:
        lines = trial.deployment_of(experiment)
        text = (
            "In a real deployment, on the server, behind the proxy of "
            "docs/deployment.md, and at every site:\n  "
        )
        Console(stderr=True).print(
            text + "\n  ".join(lines), markup=False, soft_wrap=True
        )
    with watched(experiment.task, quiet=as_json) as watch:
        result = trial.federate(experiment, folder, terms, nodes=nodes, watch=watch)
    show_result(result, folder if kept else None, as_json)


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
    measure_every: arguments.MeasureEvery = 1,
    address: Annotated[
        str, typer.Option(help="where the SuperLink listens, HOST:PORT")
    ] = "127.0.0.1:8000",
    certificates: Annotated[
        Path | None, typer.Option(help="folder with ca.crt, server.pem, server.key")
    ] = None,
    node_key: Annotated[
        list[Path] | None,
        typer.Option(help="public key of a node to let in; may be repeated"),
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
        terms = _terms(deadline, minimum, patience, tolerance)
        _choose_security(insecure, "certificates", certificates)
        experiment = _experiment(
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
            measure_every=measure_every,
        )
        _serve(experiment, out, terms, address, certificates, node_key or [], as_json)


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
        _needs_flower()
        _choose_security(insecure, "root-certificates", root_certificates, private_key)
        if data is None and not trial:
            # The task would take a set of its own, and nobody would notice.
            raise InvalidInputError("give --data, where the rows of this site are.")
        experiment = _experiment(
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


def _choose_security(insecure: bool, option: str, *given: Path | None) -> None:
    if insecure and any(given):
        raise InvalidInputError("--insecure and certificates exclude each other.")
    if not insecure and not all(given):
        raise InvalidInputError(
            f"give --{option}{' and --private-key' if len(given) > 1 else ''}, or "
            "--insecure to do without encryption and keys."
        )


def replay(
    folder: Annotated[Path, typer.Argument(help="folder of a finished federation")],
    as_json: arguments.AsJson = False,
) -> None:
    """Repeat a federation in the simulator, with the clients that took part."""
    with plain_errors():
        from fedbilevel.deployment.server import replay as again

        configure(Experiment.load(folder).precision)
        deployed, outcome, algorithm = again(folder)
        point = algorithm.point(outcome.state.server)
        simulated = {**named_leaves("x", point.x), **named_leaves("y", point.y)}
        apart = max(
            float(np.max(np.abs(deployed.point[name] - leaf), initial=0.0))
            for name, leaf in simulated.items()
        )
        if as_json:
            print_json({"largest_difference": apart})
        else:
            Console().print(f"Largest difference of the final points: {apart:.3g}")


COMMANDS: dict[str, Command] = {
    "federate": Command(
        federate,
        "Example: fedbilevel federate regularization --clients 4 --rounds 20",
    ),
    "serve": Command(
        serve,
        "Example: fedbilevel serve regularization --clients 3 --certificates "
        "certificates --node-key node0.pub --out run",
    ),
    "node": Command(
        node,
        "Example: fedbilevel node regularization --clients 3 --client 0 --superlink "
        "server:8000 --root-certificates ca.crt --private-key node0 --data rows "
        "--state state",
    ),
    "replay": Command(replay, "Example: fedbilevel replay runs/federation"),
}
