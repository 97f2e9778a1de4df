"""Commands for federations of real sites: `serve`, `node`, `replay`."""

import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedbilevel import _folders
from fedbilevel.cli import checks
from fedbilevel.cli.arguments import (
    FEDERATED,
    SITE_TUNING,
    TABLE,
    AsJson,
    Group,
    Track,
    option,
    takes,
)
from fedbilevel.cli.output import print_json, show_result
from fedbilevel.cli.progress import watched
from fedbilevel.errors import CheckpointError, InvalidInputError
from fedbilevel.startup.own_process import collect_as_usual

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

__all__ = [
    "TERMS",
    "WAITING",
    "TuneAtSites",
    "check_track",
    "node",
    "replay",
    "serve",
    "tried_at_sites",
]

_PANEL = "Waiting for nodes"
WAITING = "waiting for nodes"
TuneAtSites = Annotated[
    bool,
    typer.Option(
        "--tune", help="try steps at the sites first, which must allow it, too"
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="no encryption, and no keys needed: for trials"),
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
_LIMITS = "What this site allows"


def read_limits(**given: Any) -> Any:
    """Return how much a site tells, and from how many rows."""
    _require_flower()
    from fedbilevel.federation import SiteLimits

    return SiteLimits(**given)


LIMITS = Group(
    {
        "measure": option(
            str | None,
            None,
            "none, or scalars: losses and metrics; left out: scalars, or none where "
            "replies are masked or noisy",
            panel=_LIMITS,
        ),
        "max_exchanges": option(
            int | None, None, "replies that are given, and measurements", panel=_LIMITS
        ),
        "max_epsilon": option(
            float | None, None, "privacy that is spent, at --delta", panel=_LIMITS
        ),
        "minimum_batch": option(
            int, 1, "rows of a sample below which not to start", panel=_LIMITS
        ),
        "minimum_rows": option(
            int, 1, "rows of a level below which not to start", panel=_LIMITS
        ),
    },
    read_limits,
)
_SERVED = FEDERATED.without("data", *TABLE)
# A node is told when to end, and by whom it is measured.
_NODE = FEDERATED.without(
    *("rounds", "measure_every", "target", "stop_patience"),
    *("max_bytes", "max_samples", "max_seconds"),
).having(data=option(str | None, None, "file or folder of this site's own rows"))


def check_track(track: str | None, *, begun: bool) -> None:
    """Raise unless rounds can be written there; of a run that was begun some are."""
    if track is not None:
        from fedbilevel.tracking import check_tracking

        check_tracking(track, resume=begun)


def tried_at_sites(experiment: "Experiment", tuning: Any) -> dict[str, Any]:
    """Return what is tried at the sites; raise where it cannot be."""
    from fedbilevel.experiments.telling import require_tunable

    require_tunable(experiment)
    return {**asdict(tuning[0]), "rounds": tuning[1]}


def _folder_to_serve(given: checks.Given) -> None:
    """Raise at once if --out is finished, or no folder of a run at all."""
    out = given["out"]
    _folders.require_unfinished(out)
    if not (out / _folders.EXPERIMENT).exists():
        _folders.require_new(out)
    _folders.check_place(out)


@takes(
    _folder_to_serve,
    experiment=_SERVED,
    terms=TERMS.defaulting(deadline=600.0, patience=86400.0),
    tuning=SITE_TUNING,
)
def serve(
    experiment: "Experiment",
    terms: Any,
    tuning: Any,
    out: Annotated[Path, typer.Option(help="folder for checkpoints, logs and result")],
    address: Annotated[
        str, typer.Option(help="where the SuperLink listens, HOST:PORT")
    ] = "127.0.0.1:8000",
    certificates: Annotated[
        Path | None, typer.Option(help="folder with ca.crt, server.pem, server.key")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option(help="the server's key, made by ssh-keygen")
    ] = None,
    node_key: Annotated[
        list[Path] | None,
        typer.Option(help="public key of a client's node; repeat, in their order"),
    ] = None,
    preparation: Annotated[Path | None, typer.Option(help=TABLE["preparation"])] = None,
    tune: TuneAtSites = False,
    track: Track = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Serve a federation to sites; an interrupted one goes on where it was.

    The server has no rows. Settings must be those of the nodes. With --preparation, the
    file that they use, the folder holds a model for `predict` and `export`.
    """
    own = {"private-key": private_key, "node-key": node_key}
    _check_security(insecure, {"certificates": certificates}, own)
    _check_count(node_key or [], int(experiment.clients or 0))
    from fedbilevel._files import make_private_folder, private_files
    from fedbilevel.deployment.serving import serve_over_flower
    from fedbilevel.deployment.superlink import SuperLink
    from fedbilevel.experiments.provenance import require_served_again
    from fedbilevel.federation.sealing import KeyFiles

    require_served_again(experiment, out)
    check_track(track, begun=(out / _folders.FEDERATION).exists())
    if preparation is None and not as_json:
        _say_what_is_left(experiment)
    keys = KeyFiles(private_key, tuple(node_key or ())) if private_key else None

    link = SuperLink(address, out, certificates)
    with private_files(), watched(experiment.label, quiet=as_json) as watch:
        make_private_folder(out)
        experiment.save(out)
        watch.stage(WAITING)
        collect_as_usual()
        result = serve_over_flower(
            experiment,
            out,
            terms,
            link,
            keys=keys,
            watch=watch,
            say=watch.say,
            about=watch.stage,
            preparation=preparation,
            track=track,
            tuning=tried_at_sites(experiment, tuning) if tune else None,
        )
    show_result(result, out, as_json)


def _say_what_is_left(experiment: "Experiment") -> None:
    """Say that without a preparation there is no model, where there could be one."""
    from fedbilevel.experiments.leaving import takes_tables

    if takes_tables(experiment):
        Console(stderr=True).print(
            "Without --preparation the server does not know the columns: its folder "
            "will hold the point, and no model for `predict`.",
            highlight=False,
            soft_wrap=True,
        )


def _state_folder(given: checks.Given) -> None:
    """Raise unless the state can be kept where it is to be, in no folder of a run."""
    if (given["state"] / _folders.EXPERIMENT).exists():
        raise CheckpointError(
            f"--state {given['state']} belongs to a run. Choose another folder."
        )
    _folders.check_place(given["state"])


@takes(_state_folder, experiment=_NODE, limits=LIMITS)
def node(
    experiment: "Experiment",
    limits: Any,
    client: Annotated[int, typer.Option(help="number of this site, from 0")],
    superlink: Annotated[str, typer.Option(help="where the server is, HOST:PORT")],
    state: Annotated[Path, typer.Option(help="folder for what this site remembers")],
    root_certificates: Annotated[
        Path | None, typer.Option(help="certificate of the authority, ca.crt")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option(help="this site's key, made by ssh-keygen")
    ] = None,
    server_key: Annotated[
        Path | None, typer.Option(help="public key of the server, NAME.pub")
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
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="take steps from the server, of those that a search tries"
        ),
    ] = False,
    cores: Annotated[int, typer.Option(help="cores to compute on")] = 1,
) -> None:
    """Take part in a federation, with rows that never leave this site."""
    _require_flower()
    own = {"private-key": private_key, "server-key": server_key}
    _check_security(insecure, {"root-certificates": root_certificates}, own)
    if "data" not in experiment.options and not trial:
        # The task would take a set of its own, and nobody would notice.
        raise InvalidInputError("give --data, where the rows of this site are.")
    identity = _identity(experiment, client, private_key, site_key or [])
    from fedbilevel._files import make_private_folder, private_files
    from fedbilevel.experiments.sites import build_site
    from fedbilevel.federation.flower.node import Connection
    from fedbilevel.federation.notices import Sparing
    from fedbilevel.federation.sealing import KeyFiles, site_seal
    from fedbilevel.federation.wire import CHECKSUM
    from fedbilevel.runtime import configure

    seal = CHECKSUM
    if private_key and server_key:
        seal = site_seal(client, KeyFiles(private_key, (server_key,)))
    # Without certificates Flower takes any node, and one of a new name at once.
    flower_key = private_key if root_certificates else None
    link = Connection(superlink, root_certificates, flower_key, patience)
    configure(experiment.precision, cores=cores)
    console = Console(stderr=True)

    report = Sparing(lambda text: console.print(text, markup=False, soft_wrap=True))

    with private_files():
        make_private_folder(state)
        site = build_site(
            experiment,
            client,
            trial=trial,
            folder=state,
            report=report,
            seal=seal,
            limits=limits,
            identity=identity,
            minimum=minimum,
            tune=tune,
        )
        _take_part(site, link)


def _identity(
    experiment: "Experiment",
    client: int,
    private_key: Path | None,
    site_keys: list[Path],
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

    return SiteIdentity.read(client, private_key, site_keys)


def _take_part(site: Any, link: Any) -> None:
    from fedbilevel.federation.flower.node import serve_packets
    from fedbilevel.federation.notices import Attentive

    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: asked.append(signum))
    console = Console(stderr=True)
    console.print(f"Client {site.client} is ready, its state is in {site.folder}")
    attentive = Attentive(site)
    collect_as_usual()
    serve_packets(
        link,
        attentive.handle,
        largest=site.largest,
        asked_to_stop=lambda: bool(asked) or attentive.is_over,
        report=site.report,
    )
    console.print("The federation is over." if attentive.is_over else "Ended as asked.")


def replay(
    folder: Annotated[Path, typer.Argument(help="folder of a finished federation")],
    as_json: AsJson = False,
) -> None:
    """Repeat a federation in the simulator, with the clients that took part."""
    if not (folder / _folders.RESULT).exists():
        raise CheckpointError(f"{folder} holds no finished federation.")
    import numpy as np

    from fedbilevel.experiments import Experiment, federated
    from fedbilevel.runtime import configure
    from fedbilevel.studies.single import named_leaves

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


def _check_security(
    insecure: bool, certificates: Mapping[str, Any], keys: Mapping[str, Any]
) -> None:
    """Raise unless there is all that is needed, or none of it is wanted."""
    if insecure and any(certificates.values()):
        raise InvalidInputError("--insecure and certificates exclude each other.")
    needed = {**({} if insecure else certificates), **keys}
    if insecure and not any(keys.values()):
        return
    missing = " and ".join(f"--{name}" for name, given in needed.items() if not given)
    if missing:
        raise InvalidInputError(
            f"give {missing}, or --insecure alone to do without encryption and keys."
        )


def _check_count(node_keys: list[Path], clients: int) -> None:
    if node_keys and len(node_keys) != clients:
        raise InvalidInputError(
            f"{len(node_keys)} times --node-key for {clients} clients: give one for "
            "each, in their order."
        )
