"""Commands of a server of real sites: `serve`, `federate` on one machine, `replay`."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel import _folders
from fedbilevel._schema import Terms, option
from fedbilevel.cli import arguments, checks
from fedbilevel.cli.checks import TRUST_CODE, require_trust
from fedbilevel.cli.node import INSECURE, check_security, require_flower
from fedbilevel.cli.output import Console, print_json, show_result
from fedbilevel.cli.progress import watched
from fedbilevel.errors import CheckpointError, InvalidInputError, unknown_name
from fedbilevel.startup.own_process import collect_as_usual

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

KINDS = ("persistent", "stock")  # of nodes
_WAITING = "waiting for nodes"
_DEPLOYED = (
    "In a real deployment, on the server, behind the proxy of docs/deployment.md, and "
    "at every site:"
)
_NO_MODEL = (
    "Without --preparation the server does not know the columns: its folder will hold "
    "the point, and no model for `predict`."
)
_DRAWN_APART = (
    "With masks or noise sites draw rows and noise by secrets of their own. Where a "
    "batch is not of all rows, or noise is added, the difference is no rounding error."
)
TUNE_AT_SITES = option(False, "try steps at the sites first, which must allow it, too")
TERMS = arguments.declared(Terms)
_SERVED = arguments.FEDERATED.without("data", *arguments.TABLE)
_TRIED = arguments.FEDERATED.having(
    clients=option(
        None, "number of nodes, K; those the data name, or 4", typed=int | None
    )
)


def _check_track(track: str | None, *, begun: bool) -> None:
    """Raise unless rounds can be written there; of a run that was begun some are."""
    if track is not None:
        from fedbilevel.tracking import check_tracking

        check_tracking(track, resume=begun)


def _folder_to_serve(given: checks.Given) -> None:
    """Raise at once if --out is finished, or no folder of a run at all."""
    out = given["out"]
    _folders.require_unfinished(out)
    if not (out / _folders.EXPERIMENT).exists():
        _folders.require_new(out)
    _folders.check_place(out)


@arguments.takes(
    _folder_to_serve,
    require_flower,
    experiment=_SERVED,
    terms=TERMS.defaulting(deadline=600.0, patience=86400.0),
    tuning=arguments.SITE_TUNING,
)
def serve(
    experiment: "Experiment",
    terms: Any,
    tuning: Any,
    out: Path = option(MISSING, "folder for checkpoints, logs and result"),
    address: str = option("127.0.0.1:8000", "where the SuperLink listens, HOST:PORT"),
    certificates: Path | None = option(
        None, "folder with ca.crt, server.pem, server.key"
    ),
    private_key: Path | None = option(None, "the server's key, made by ssh-keygen"),
    node_key: list[Path] | None = option(
        None, "public key of a client's node; repeat, in their order"
    ),
    preparation: Path | None = option(None, arguments.TABLE["preparation"]),
    tune: bool = TUNE_AT_SITES,
    track: str | None = arguments.TRACK,
    insecure: bool = INSECURE,
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Serve a federation to sites; an interrupted one is continued.

    The server has no rows. Settings must be those of the nodes. With --preparation, the
    file that they use, the folder holds a model for `predict` and `export`.
    """
    own = {"private-key": private_key, "node-key": node_key}
    check_security(insecure, {"certificates": certificates}, own)
    if node_key and len(node_key) != experiment.clients:
        raise InvalidInputError(
            f"{len(node_key)} times --node-key for {experiment.clients} clients: give "
            "one for each, in their order."
        )
    from fedbilevel._files import make_private_folder, private_files
    from fedbilevel.datasets.encoding import read_preparation
    from fedbilevel.deployment.apps import Served
    from fedbilevel.deployment.serving import serve_over_flower
    from fedbilevel.deployment.superlink import SuperLink
    from fedbilevel.experiments.clients import counted
    from fedbilevel.experiments.run_folder import require_served_again
    from fedbilevel.experiments.served_model import blank_task
    from fedbilevel.federation.signatures import KeyFiles

    made = read_preparation(str(preparation)) if preparation is not None else None
    counting, _ = counted(experiment, made)
    require_served_again(counting, out)
    _check_track(track, begun=(out / _folders.FEDERATION).exists())
    if tune:
        experiment.require_tunable()
    if made is not None:
        blank_task(experiment, made)  # or why not
    if made is None and not as_json and "preparation" in experiment.task_options:
        _say(_NO_MODEL)
    keys = KeyFiles(private_key, tuple(node_key or ())) if private_key else None
    served = Served(
        experiment, out, terms, keys, preparation, track, tuning if tune else None
    )
    link = SuperLink(address, out, certificates)
    shown = watched(experiment.label, quiet=as_json, alone=False)
    with private_files(), shown as watch:
        make_private_folder(out)
        counting.save(out)
        watch.stage(_WAITING)
        collect_as_usual()
        result = serve_over_flower(
            served, link, watch=watch, say=watch.say, about=watch.stage
        )
    show_result(result, out, as_json)


def _kind_of_nodes(given: checks.Given) -> None:
    if given["nodes"] not in KINDS:
        raise unknown_name("kind of nodes", given["nodes"], KINDS)


@arguments.takes(
    _kind_of_nodes,
    checks.folder_to_make,
    require_flower,
    experiment=_TRIED,
    terms=TERMS,
    tuning=arguments.SITE_TUNING,
)
def federate(
    experiment: "Experiment",
    terms: Any,
    tuning: Any,
    plan: Path | None = arguments.PLAN_FILE,
    tune: bool = TUNE_AT_SITES,
    nodes: str = option(KINDS[0], " or ".join(KINDS)),
    out: Path | None = option(None, "new folder for checkpoints and result"),
    track: str | None = arguments.TRACK,
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Run a whole federation on this machine, with real processes, to try it out."""
    from fedbilevel._files import make_private_folder, private_files
    from fedbilevel.deployment import serving
    from fedbilevel.deployment.apps import Served
    from fedbilevel.experiments.agreement import counted_here, sized_here
    from fedbilevel.runtime import configure

    if plan is not None:
        from fedbilevel.experiments.theory import follow_file

        experiment = follow_file(plan, experiment)
    if tune:
        experiment.require_tunable()
    _check_track(track, begun=False)
    configure(experiment.precision)
    asked = sized_here(experiment)
    experiment, words = counted_here(asked)
    with private_files(), _folder_of_trial(out) as folder:
        make_private_folder(folder)
        experiment.save(folder)
        if not as_json:
            commands = "\n  ".join(serving.deployment_of(asked, tune=tune))
            _say(f"{_DEPLOYED}\n  {commands}")
            _say(f"{words[0].upper()}{words[1:]}.")
        tried = tuning if tune else None
        served = Served(experiment, folder, terms, track=track, tuning=tried)
        with watched(experiment.label, quiet=as_json, alone=False) as watch:
            watch.stage(_WAITING)
            result = serving.federate(
                served, nodes=nodes, watch=watch, say=watch.say, about=watch.stage
            )
        show_result(result, out, as_json)


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _folder_of_trial(out: Path | None) -> Iterator[Path]:
    """Return the folder of --out, or one that is removed in the end.

    The former is removed, too, if the trial could not begin by a mistake of its user:
    corrected, the same command must find no folder in use.
    """
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    try:
        yield out
    except InvalidInputError:
        if not (out / _folders.CHECKPOINT).exists():
            shutil.rmtree(out, ignore_errors=True)
        raise


@arguments.takes()
def replay(
    folder: Path = option(MISSING, "folder of a finished federation", spelled=""),
    trust_code: bool = TRUST_CODE,
    as_json: bool = arguments.AS_JSON,
) -> None:
    """Repeat a federation in the simulator, with the clients that took part."""
    del trust_code  # was heard before
    if not (folder / _folders.RESULT).exists():
        raise CheckpointError(f"{folder} holds no finished federation.")
    import numpy as np

    from fedbilevel.experiments import Experiment, federated
    from fedbilevel.runtime import configure
    from fedbilevel.studies.single import named_leaves

    experiment = Experiment.load(folder)
    require_trust(experiment)
    configure(experiment.precision)
    deployed, outcome, algorithm = federated.replay(folder)
    point = algorithm.point(outcome.state.server)
    simulated = {**named_leaves("x", point.x), **named_leaves("y", point.y)}
    apart = max(
        float(np.max(np.abs(deployed.point[name] - leaf), initial=0.0))
        for name, leaf in simulated.items()
    )
    if as_json:
        print_json({"largest_difference": apart})
        return
    Console().print(f"Largest difference of the final points: {apart:.3g}")
    if experiment.aggregate == "secure" or experiment.noise:
        Console().print(_DRAWN_APART)
