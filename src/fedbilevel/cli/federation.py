"""Commands for federations of real processes: `federate`, `serve`, `node`, `replay`."""

import signal
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from fedbilevel.cli.arguments import (
    FEDERATED,
    AsJson,
    Group,
    NewFolder,
    PlanFile,
    option,
    takes,
)
from fedbilevel.cli.output import print_json, show_result
from fedbilevel.cli.progress import watched
from fedbilevel.cli.theory import follow_file
from fedbilevel.errors import InvalidInputError
from fedbilevel.experiments import Experiment
from fedbilevel.runtime import configure
from fedbilevel.studies.setting import open_folder
from fedbilevel.studies.single import named_leaves

__all__ = ["federate", "node", "replay", "serve"]

_PANEL = "Waiting for nodes"
Insecure = Annotated[
    bool, typer.Option("--insecure", help="neither encryption nor keys: for trials")
]


def read_terms(**given: Any) -> Any:
    """Return how long a server waits, and what it takes."""
    _require_flower()
    from fedbilevel.federation import Terms

    return Terms(**given)


TERMS = Group(
    {
        "deadline": option(float, 60.0, "seconds an exchange may take", panel=_PANEL),
        "minimum": option(
            int, 1, "replies without which an exchange is made again", panel=_PANEL
        ),
        "patience": option(
            float, 600.0, "seconds to wait for all nodes at the start", panel=_PANEL
        ),
        "tolerance": option(
            float,
            1e3,
            "a reply that moves so many times the median is left out",
            panel=_PANEL,
        ),
    },
    read_terms,
)
_TRIED = FEDERATED.having(clients=option(int, 4, "number of nodes, K"))
_SERVED = FEDERATED.without("data")
# A node is told when to end, and by whom it is measured.
_NODE = FEDERATED.without(
    *("rounds", "measure_every", "target", "stop_patience"),
    *("max_bytes", "max_samples", "max_seconds"),
).having(data=option(str | None, None, "file or folder of this site's own rows"))


@takes(experiment=_TRIED, terms=TERMS)
def federate(
    experiment: Experiment,
    terms: Any,
    plan: PlanFile = None,
    nodes: Annotated[str, typer.Option(help="persistent or stock")] = "persistent",
    out: NewFolder = None,
    as_json: AsJson = False,
) -> None:
    """Run a whole federation on this machine, with real processes, to try it out."""
    if plan is not None:
        experiment = follow_file(plan, experiment)
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


@takes(experiment=_SERVED, terms=TERMS.defaulting(deadline=600.0, patience=86400.0))
def serve(
    experiment: Experiment,
    terms: Any,
    out: Annotated[Path, typer.Option(help="folder for checkpoints, logs and result")],
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
    as_json: AsJson = False,
) -> None:
    """Serve a federation to sites; an interrupted one goes on where it was.

    The server has no rows. Settings must be those of the nodes.
    """
    keys = node_key or []
    _check_security(insecure, "certificates", certificates)
    _check_keys(keys, int(experiment.clients or 0), insecure)
    from fedbilevel.deployment.serving import serve_over_flower
    from fedbilevel.deployment.superlink import SuperLink

    out.mkdir(parents=True, exist_ok=True)
    experiment.save(out)
    link = SuperLink(address, out, certificates)
    with watched(experiment.task, quiet=as_json) as watch:
        result = serve_over_flower(
            experiment, out, terms, link, node_keys=keys, watch=watch
        )
    show_result(result, out, as_json)


@takes(experiment=_NODE)
def node(
    experiment: Experiment,
    client: Annotated[int, typer.Option(help="number of this site, from 0")],
    superlink: Annotated[str, typer.Option(help="where the server is, HOST:PORT")],
    state: Annotated[Path, typer.Option(help="folder for what this site remembers")],
    root_certificates: Annotated[
        Path | None, typer.Option(help="certificate of the authority, ca.crt")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option(help="this site's key, made by ssh-keygen")
    ] = None,
    site_key: Annotated[
        list[Path] | None,
        typer.Option(
            help="with a secure mean, public key of a client's node; repeat for all, "
            "in their order"
        ),
    ] = None,
    minimum: Annotated[
        int,
        typer.Option(help="fewest sites in a secure sum that this one takes part in"),
    ] = 2,
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
    _require_flower()
    _check_security(insecure, "root-certificates", root_certificates, private_key)
    if "data" not in experiment.options and not trial:
        # The task would take a set of its own, and nobody would notice.
        raise InvalidInputError("give --data, where the rows of this site are.")
    identity = _identity(experiment, client, private_key, site_key or [])
    from fedbilevel.federation.flower.node import Connection

    link = Connection(superlink, root_certificates, private_key, patience)
    configure(experiment.precision, cores=cores)
    masks = {"identity": identity, "minimum": minimum}
    _take_part(experiment, client, link, state, trial, masks)


def _identity(
    experiment: Experiment, client: int, private_key: Path | None, site_keys: list[Path]
) -> Any:
    """Return the keys by which sites know each other, or None where they need not."""
    if experiment.aggregate != "secure":
        if site_keys:
            raise InvalidInputError("--site-key is for --aggregate secure.")
        return None
    if private_key is None:
        if site_keys:
            raise InvalidInputError("--insecure and --site-key exclude each other.")
        Console(stderr=True).print(
            "Without keys of the other sites their masks are the server's word: a "
            "server that lies can open the replies of this site."
        )
        return None
    if len(site_keys) != experiment.clients:
        raise InvalidInputError(
            f"{len(site_keys)} times --site-key for {experiment.clients} clients: a "
            "secure mean needs the public keys of all, in their order, or --insecure."
        )
    from fedbilevel.federation.secure.identity import SiteIdentity
    from fedbilevel.federation.signatures import read_private_key, read_public_key

    public = [read_public_key(path) for path in site_keys]
    return SiteIdentity(client, read_private_key(private_key), public)


def _take_part(
    experiment: Experiment,
    client: int,
    link: Any,
    state: Path,
    trial: bool,
    masks: dict[str, Any],
) -> None:
    from fedbilevel.experiments.federated import build_site
    from fedbilevel.federation.flower.node import serve_packets

    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: asked.append(signum))
    console = Console(stderr=True)
    site = build_site(experiment, client, trial=trial, folder=state, **masks)
    console.print(f"Client {client} is ready, its state is in {state}")
    serve_packets(
        link,
        site.handle,
        asked_to_stop=lambda: bool(asked),
        report=lambda text: console.print(text, markup=False),
    )
    console.print("Ended as asked.")


def replay(
    folder: Annotated[Path, typer.Argument(help="folder of a finished federation")],
    as_json: AsJson = False,
) -> None:
    """Repeat a federation in the simulator, with the clients that took part."""
    from fedbilevel.experiments import federated

    configure(Experiment.load(folder).precision)
    deployed, outcome, algorithm = federated.replay(folder)
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


def _require_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            "a federation needs Flower. Install it with "
            "`pip install 'fedbilevel[flower]'`."
        ) from error


def _check_security(insecure: bool, name: str, *given: Path | None) -> None:
    """Raise unless there are certificates, or none are wanted."""
    if insecure and any(given):
        raise InvalidInputError("--insecure and certificates exclude each other.")
    if not insecure and not all(given):
        raise InvalidInputError(
            f"give --{name}{' and --private-key' if len(given) > 1 else ''}, or "
            "--insecure to do without encryption and keys."
        )


def _check_keys(node_keys: list[Path], clients: int, insecure: bool) -> None:
    if node_keys and insecure:
        raise InvalidInputError("--insecure and --node-key exclude each other.")
    if len(node_keys) > clients:
        raise InvalidInputError(
            f"{len(node_keys)} times --node-key for {clients} clients: give one for "
            "each, in their order. Other nodes can be let in with `flwr supernode`."
        )
