"""Our ServerApp and ClientApp, and the process of the server.

    FEDBILEVEL_TOKEN=... python -m fedbilevel.deployment.apps ADDRESS FOLDER RUN [CA]

takes the run's task from the SuperLink, and serves it. Flower would start it by its
SuperExec, with the task's token on the command line, where every user of the machine
can read it, and would run whatever program the SuperLink holds. This process asks for
the task itself, keeps its token in memory, and serves what is installed here; settings
come from its folder. A ClientApp is loaded by Flower, in nodes of its own.

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
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto import runtime_pb2
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import interceptors
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedbilevel._files import write_atomically
from fedbilevel._schema import checked
from fedbilevel.datasets.encoding import read_preparation
from fedbilevel.deployment.processes import TOKEN, read_json
from fedbilevel.errors import FedbilevelError, InvalidInputError, sentence_of
from fedbilevel.experiments import Experiment
from fedbilevel.experiments.agreement import local_options, without_files
from fedbilevel.experiments.clients import counted
from fedbilevel.experiments.federated import serve
from fedbilevel.experiments.federated_tuning import tune_at_sites
from fedbilevel.experiments.sites import build_site
from fedbilevel.experiments.tuning import Tuning
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

PROCESS, PROGRESS = "server.pid", "progress.json"
ERROR, LOG = "error.txt", "server.log"
_LOOK = 0.2  # seconds between two looks for the task
_GRACE = 3.0  # seconds to end when asked; what was kept stays whole, however it ends
server_app, client_app = ServerApp(), ClientApp()


@dataclass(frozen=True)
class Served:
    """The work of a server: an experiment, and the settings of its process.

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
        held = asdict(self)
        held["track"] = from_anywhere(self.track) if self.track else None
        experiment = json.dumps(held.pop("experiment"))
        served = json.dumps(held, default=lambda path: str(path.resolve()))
        return {"experiment": experiment, "served": served}

    @staticmethod
    def read(config: Mapping[str, Any]) -> "Served":
        """Read the configuration of a run."""
        held, experiment = (json.loads(config[n]) for n in ("served", "experiment"))
        keys, place, terms = held["keys"], held["preparation"], held["terms"]
        if keys is not None:
            keys = KeyFiles(Path(keys["private"]), tuple(map(Path, keys["peers"])))
        return Served(
            checked(Experiment, experiment),
            Path(held["folder"]),
            Terms(**{**terms, "keys": tuple(terms["keys"])}),
            keys,
            Path(place) if place else None,
            held["track"],
            held["tuning"],
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

    # One core: the server adds up and waits, the cores are for the sites.
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
            place = served.preparation
            made = read_preparation(str(place)) if place else None
            experiment, words = counted(experiment, made)
            if served.experiment.weights is None:
                say(f"{words[0].upper()}{words[1:]}.")
            common = (GridTransport(grid, halt), experiment, folder, terms)
            more = {"seal": server_seal(served.keys), "report": say, "watch": watch}
            steps = None
            if served.tuning is not None:
                search = dict(served.tuning)
                rounds, tuning = search.pop("rounds"), Tuning(**search)
                steps = tune_at_sites(*common, tuning, rounds, **more)
            serve(
                *common,
                **more,
                steps=steps,
                made=lambda exchange: progress.write(exchange=exchange),
                preparation=made,
                on_round=on_round,
            )
    except KeyboardInterrupt:
        sys.exit(0)  # the last round is kept
    except Exception as error:
        write_atomically(folder / ERROR, _described(error))
        raise


class _Progress:
    """Writes how far a run is, for displays; knows what was written before."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict(read_json(path))

    def write(self, **news: Any) -> None:
        """Write what is new, and what was known before."""
        self.known |= news
        self.path.write_text(json.dumps(self.known))


def _described(error: Exception) -> str:
    """Describe an error, with the traceback of an unexpected one."""
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
        write_atomically(Path(held["state"]) / ERROR, str(error), mode=0o600)
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
    client, keys, identity = int(held["client"]), None, None
    if "private_key" in held:
        keys = KeyFiles(Path(held["private_key"]), (Path(held["server_key"]),))
    if "site_keys" in held:
        public = [Path(path) for path in held["site_keys"].split(os.pathsep)]
        identity = SiteIdentity.read(client, Path(held["private_key"]), public)
    (Path(held["state"]) / ERROR).unlink(missing_ok=True)
    return build_site(
        experiment,
        client,
        trial=held.get("trial") == "true",
        folder=Path(held["state"]),
        holds=False,
        seal=site_seal(client, keys),
        limits=SiteLimits.read(dict(held)),
        identity=identity,
        minimum=int(held.get("minimum", 2)),
    )


@dataclass(frozen=True)
class _Bearer:
    """Brings the token of the SuperLink's guard."""

    token: str

    def intercept(
        self, context: ProtobufRequestContext, call_next: ProtobufCall
    ) -> httpx.Response:
        """Add the token to a call."""
        add_headers(context.request, {"Authorization": f"Bearer {self.token}"})
        return call_next(context)


def _client(address: str, root: bytes | None, *more: Any) -> RuntimeHttpClient:
    version = interceptors.RuntimeVersionHttpInterceptor("flwr-serverapp")
    return RuntimeHttpClient.from_server_address(
        address,
        insecure=root is None,
        root_certificates=root,
        interceptors=[version, *more],
        retry_invoker=make_simple_http_retry_invoker(),
    )


def _task_token(client: RuntimeHttpClient, run: int) -> str:
    """Wait for the task of a run; tasks of runs that are not awaited are dropped."""
    asked = runtime_pb2.AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    while True:
        answer = client.AcquireTask(asked)
        if answer.HasField("task") and answer.task.run_id == run:
            return answer.token
        time.sleep(_LOOK)


def main(arguments: Sequence[str]) -> None:
    """Serve one run to its end."""
    address, folder, run, *certificate = arguments
    bearer = _Bearer(os.environ.pop(TOKEN))
    root = Path(certificate[0]).read_bytes() if certificate else None
    asking = _client(address, root, bearer)
    token = _task_token(asking, int(run))
    asking.close()
    grid = HttpGrid(address, root is None, root, token=token)
    known = interceptors.RuntimeTokenHttpInterceptor(token)
    client = _client(address, root, bearer, known)
    grid._client = client
    HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
    given = client.PullTaskInput(runtime_pb2.PullTaskInputRequest())
    grid.set_run(run_from_proto(given.run))
    TaskIdentity.task_id = given.task_id
    TaskIdentity.run_id = given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    context = context_from_proto(given.context)
    project = tomllib.loads((Path(folder) / "app" / "pyproject.toml").read_text())
    context.run_config = project["tool"]["flwr"]["app"]["config"]
    status = SubStatus.FAILED
    try:
        server_app(grid, context)
        status = SubStatus.COMPLETED
    finally:
        _finish(client, status)


def _finish(client: RuntimeHttpClient, status: str) -> None:
    """Report to the SuperLink how the task ended, if it is there."""
    if client._retry_invoker is not None:
        client._retry_invoker.max_tries = 1
    try:
        client.PushTaskOutput(runtime_pb2.PushTaskOutputRequest(sub_status=status))
    except httpx.HTTPError:
        pass  # it notices that the task is not worked on
    finally:
        client.close()


if __name__ == "__main__":
    main(sys.argv[1:])
