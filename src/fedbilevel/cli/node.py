"""The command `node`: one site of a federation, with rows that never leave it."""

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel import _folders
from fedbilevel._schema import SITES, Limits, Settings, option, options_of
from fedbilevel.cli import checks
from fedbilevel.cli.arguments import FEDERATED, declared, takes
from fedbilevel.cli.output import Console
from fedbilevel.cli.progress import ending_soon
from fedbilevel.errors import CheckpointError, InvalidInputError, needed
from fedbilevel.startup.own_process import collect_as_usual

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

INSECURE = option(False, "no encryption, and no keys needed: for trials")
_AGAIN = 60.0  # seconds after which the same is said again
# The server says when a node ends, and how often it measures.
_SERVERS = {one.name for one, known in options_of(Settings) if known.agree != SITES}
_NODE = FEDERATED.without(*_SERVERS, "stop_patience").having(
    data=option(None, "file or folder of this site's own rows", typed=str | None)
)


def require_flower(given: checks.Given) -> None:
    """Raise unless Flower is installed, whatever else is given."""
    del given
    sentence = "a federation needs Flower. Install it with "
    needed("flwr", f"{sentence}`pip install 'fedbilevel[flower]'`.")


def _state_folder(given: checks.Given) -> None:
    """Raise unless the state can be kept where it is to be, in no folder of a run."""
    if (given["state"] / _folders.EXPERIMENT).exists():
        raise CheckpointError(
            f"--state {given['state']} belongs to a run. Choose another folder."
        )
    _folders.check_place(given["state"])


@takes(_state_folder, require_flower, experiment=_NODE, limits=declared(Limits))
def node(
    experiment: "Experiment",
    limits: Limits,
    client: int = option(MISSING, "number of this site, from 0"),
    superlink: str = option(MISSING, "where the server is, HOST:PORT"),
    state: Path = option(MISSING, "folder for what this site remembers"),
    root_certificates: Path | None = option(
        None, "certificate of the authority, ca.crt"
    ),
    private_key: Path | None = option(None, "this site's key, made by ssh-keygen"),
    server_key: Path | None = option(None, "public key of the server, NAME.pub"),
    site_key: list[Path] | None = option(
        None,
        "with a secure mean, public key of a client's node; repeat for all, in their "
        "order",
    ),
    minimum: int = option(
        2, "fewest sites in a secure sum that this one takes part in"
    ),
    insecure: bool = INSECURE,
    patience: float = option(86400.0, "seconds without a connection before giving up"),
    trial: bool = option(False, "take this client's share of data of all clients"),
    tune: bool = option(
        False, "take steps from the server, of those that a search tries"
    ),
    cores: int = option(1, "cores to compute on"),
) -> None:
    """Take part in a federation, with rows that never leave this site."""
    own = {"private-key": private_key, "server-key": server_key}
    check_security(insecure, {"root-certificates": root_certificates}, own)
    if "data" not in experiment.options and not trial:
        # The task would silently take its default data set.
        raise InvalidInputError("give --data, where the rows of this site are.")
    identity = _identity(experiment, client, private_key, site_key or [])
    from fedbilevel._files import make_private_folder, private_files
    from fedbilevel.experiments.sites import build_site
    from fedbilevel.federation import SiteLimits
    from fedbilevel.federation.flower.node import Connection
    from fedbilevel.federation.signatures import KeyFiles, site_seal
    from fedbilevel.runtime import configure

    keys = KeyFiles(private_key, (server_key,)) if private_key and server_key else None
    # Without certificates Flower takes any node, and one of a new name at once.
    flower_key = private_key if root_certificates else None
    link = Connection(superlink, root_certificates, flower_key, patience)
    configure(experiment.precision, cores=cores)
    say = partial(Console(stderr=True).print, markup=False, soft_wrap=True)
    with private_files():
        make_private_folder(state)
        with ending_soon(lambda: True):  # it compiles checks, and holds no round
            site = build_site(
                experiment,
                client,
                trial=trial,
                folder=state,
                report=sparing(say),
                seal=site_seal(client, keys),
                limits=SiteLimits(**vars(limits)),
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
    from fedbilevel.federation.signatures import SiteIdentity

    return SiteIdentity.read(client, private_key, site_keys)


def sparing(
    say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """Return how to say a thing once, and again only after a minute."""
    said: dict[str, float] = {}

    def once(text: str) -> None:
        now = clock()
        for old in [one for one, at in said.items() if now - at >= _AGAIN]:
            del said[old]
        if text not in said:
            said[text] = now
            say(text)

    return once


def _take_part(site: Any, link: Any) -> None:
    from fedbilevel.federation.flower.node import serve_packets
    from fedbilevel.runtime.progress import COMPILING, reporting

    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: asked.append(signum))
    console = Console(stderr=True)
    console.print(f"Client {site.client} is ready, its state is in {site.folder}")
    collect_as_usual()
    stage = deque([""], maxlen=1)
    with reporting(stage.append), ending_soon(lambda: stage[0] == COMPILING):
        serve_packets(
            link,
            site.handle,
            largest=site.largest,
            asked_to_stop=lambda: bool(asked) or site.is_over,
            report=site.report,
        )
    console.print("The federation is over." if site.is_over else "Ended as asked.")


def check_security(
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
