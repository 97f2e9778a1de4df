"""Our ServerApp and ClientApp, as Flower loads them into its processes.

Both read their settings from the run's configuration: the experiment as JSON text, and
for the server where its folder and its keys are and how long it waits. Where the keys
of a site are is in the configuration of its node.
"""

import functools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedbilevel._files import write_atomically
from fedbilevel._schema import checked
from fedbilevel.datasets.encoding import read_preparation
from fedbilevel.deployment.processes import read_json
from fedbilevel.errors import FedbilevelError, InvalidInputError, sentence_of
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.federated_tuning import tune_at_sites
from fedbilevel.experiments.searching import Tuning
from fedbilevel.experiments.sites import build_site, local_options, without_files
from fedbilevel.federation import Site, SiteLimits, Terms
from fedbilevel.federation.flower.grid import GridTransport
from fedbilevel.federation.flower.messages import as_content, packet_of
from fedbilevel.federation.signatures import (
    KeyFiles,
    SiteIdentity,
    server_seal,
    site_seal,
)
from fedbilevel.runtime import configure
from fedbilevel.tracking import from_anywhere, tracker

PROCESS, PROGRESS, ERROR, LOG = (
    "server.pid",
    "progress.json",
    "error.txt",
    "server.log",
)
_GRACE = 10.0  # seconds to end when asked; what was kept stays whole, however it ends
server_app, client_app = ServerApp(), ClientApp()


@dataclass(frozen=True)
class Served:
    """What a server runs: an experiment, and all that its process must know besides.

    `folder` is the run's. With `keys` packets are signed. The file `preparation` says
    how all sites prepare their columns; with it a model is left. `track`, KIND:PLACE,
    is where every measured round is written. `tuning` has the fields of a `Tuning`, and
    the `rounds` of a trial: with it steps are tried at the sites first.
    """

    experiment: Experiment
    folder: Path
    terms: Terms
    keys: KeyFiles | None = None
    preparation: Path | None = None
    track: str | None = None
    tuning: Mapping[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        """Return it as the configuration of a run: of files only the paths."""
        keys, place = self.keys, self.preparation
        peers = [str(path.resolve()) for path in keys.peers] if keys else []
        return {
            "private_key": str(keys.private.resolve()) if keys else "",
            "node_keys": json.dumps(peers),
            "experiment": json.dumps(asdict(self.experiment)),
            "folder": str(self.folder.resolve()),
            "preparation": str(place.resolve()) if place else "",
            "track": from_anywhere(self.track) if self.track else "",
            "tuning": json.dumps(self.tuning),
            **asdict(self.terms),
            "keys": " ".join(self.terms.keys),
        }

    @staticmethod
    def read(config: Mapping[str, Any]) -> "Served":
        """Read the configuration of a run."""
        texts = {name: str(value) for name, value in config.items()}
        numbers = {name: config[name] for name in ("deadline", "patience", "tolerance")}
        peers, keys = tuple(map(Path, json.loads(texts["node_keys"]))), None
        if texts["private_key"]:
            keys = KeyFiles(Path(texts["private_key"]), peers)
        return Served(
            checked(Experiment, json.loads(texts["experiment"])),
            Path(texts["folder"]),
            Terms(
                **{name: float(value) for name, value in numbers.items()},
                minimum=int(config["minimum"]),
                keys=tuple(texts["keys"].split()),
            ),
            keys,
            Path(texts["preparation"]) if texts["preparation"] else None,
            texts["track"] or None,
            json.loads(texts["tuning"]),
        )


@server_app.main()
def _serve(grid: Grid, context: Context) -> None:
    served = Served.read(context.run_config)
    experiment, folder, terms = served.experiment, served.folder, served.terms
    (folder / PROCESS).write_text(str(os.getpid()))
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        del frame
        asked.append(number)
        # It may be compiling, or calling a SuperLink that is gone.
        timer = threading.Timer(_GRACE, os._exit, (0,))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)

    def halt() -> None:
        if asked:
            raise KeyboardInterrupt

    progress = _Progress(folder / PROGRESS)

    def watch(done: int, total: int, newest: dict[str, float]) -> None:
        progress.write(done=done, total=total, newest=newest)
        halt()

    # One core: the server adds up and waits, the cores are for those who compute.
    configure(experiment.precision, cores=1)
    try:
        with (
            (folder / LOG).open("a", buffering=1) as log,
            # Whether the place is free was asked before; one served again appends.
            tracker(served.track, about=experiment.chosen(), resume=True)
            if served.track is not None
            else nullcontext(None) as on_round,
        ):
            say = functools.partial(print, file=log)
            common = (GridTransport(grid, halt), experiment, folder, terms)
            more = {"seal": server_seal(served.keys), "report": say, "watch": watch}
            steps, place = None, served.preparation
            if served.tuning is not None:
                search = dict(served.tuning)
                rounds, tuning = search.pop("rounds"), Tuning(**search)
                steps = tune_at_sites(*common, tuning, rounds, **more)
            serve(
                *common,
                **more,
                steps=steps,
                made=lambda exchange: progress.write(exchange=exchange),
                preparation=read_preparation(str(place)) if place else None,
                on_round=on_round,
            )
    except KeyboardInterrupt:
        sys.exit(0)  # the last round is kept
    except Exception as error:
        write_atomically(folder / ERROR, _described(error))
        raise


class _Progress:
    """Writes how far a run is, for whoever shows it; knows what was written before."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict(read_json(path))

    def write(self, **news: Any) -> None:
        """Write what is new, and what was known before."""
        self.known |= news
        self.path.write_text(json.dumps(self.known))


def _described(error: Exception) -> str:
    """Say what happened, with the traceback of what nobody expected."""
    if isinstance(error, FedbilevelError):
        return str(error)
    return sentence_of(error) if isinstance(error, OSError) else traceback.format_exc()


@client_app.train()
def _take_part(message: Message, context: Context) -> Message:
    site = _site(
        str(context.run_config["experiment"]),
        tuple(sorted((str(k), str(v)) for k, v in context.node_config.items())),
    )
    packet = packet_of(message, site.largest)
    return Message(content=as_content(site.handle(packet)), reply_to=message)


@functools.cache
def _site(text: str, node: tuple[tuple[str, str], ...]) -> Site:
    """Build the site of this process; `node` is what its operator configured.

    Flower would hide why that is impossible, so it is written beside its state.
    """
    held = dict(node)
    try:
        return _built(json.loads(text), held)
    except FedbilevelError as error:
        sentence = str(error).encode()
        path = Path(held["state"]) / ERROR
        write_atomically(path, sentence, mode=0o600)
        raise


def _built(settings: dict[str, Any], held: Mapping[str, str]) -> Site:
    settings = without_files(settings, held)
    known = local_options(settings["task"])
    own = {name: held[name] for name in known if name in held}
    settings["options"] = {**settings["options"], **own}
    try:
        experiment = checked(Experiment, settings)
    except TypeError as error:
        raise InvalidInputError(f"the settings of the server: {error}.") from error
    configure(experiment.precision, cores=1)
    client, keys = int(held["client"]), None
    if "private_key" in held:
        keys = KeyFiles(Path(held["private_key"]), (Path(held["server_key"]),))
    (Path(held["state"]) / ERROR).unlink(missing_ok=True)
    return build_site(
        experiment,
        client,
        trial=held.get("trial") == "true",
        folder=Path(held["state"]),
        holds=False,
        seal=site_seal(client, keys),
        limits=SiteLimits.read(dict(held)),
        identity=_identity(client, held),
        minimum=int(held.get("minimum", 2)),
    )


def _identity(client: int, held: Mapping[str, str]) -> SiteIdentity | None:
    if "site_keys" not in held:
        return None
    public = [Path(path) for path in held["site_keys"].split(os.pathsep)]
    return SiteIdentity.read(client, Path(held["private_key"]), public)
