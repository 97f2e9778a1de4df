"""The command `federate`: a whole federation on this machine, to try it out."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedbilevel import _folders
from fedbilevel.cli import checks
from fedbilevel.cli.arguments import (
    FEDERATED,
    SITE_TUNING,
    AsJson,
    NewFolder,
    PlanFile,
    Track,
    option,
    takes,
)
from fedbilevel.cli.federation import (
    TERMS,
    WAITING,
    TuneAtSites,
    check_track,
    tried_at_sites,
)
from fedbilevel.cli.output import show_result
from fedbilevel.cli.progress import watched
from fedbilevel.cli.theory import follow_file
from fedbilevel.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

__all__ = ["KINDS", "federate"]

KINDS = ("persistent", "stock")
_TRIED = FEDERATED.having(clients=option(int, 4, "number of nodes, K"))


def _kind_of_nodes(given: checks.Given) -> None:
    if given["nodes"] not in KINDS:
        raise unknown_name("kind of nodes", given["nodes"], KINDS)


@takes(
    _kind_of_nodes,
    checks.folder_to_make,
    experiment=_TRIED,
    terms=TERMS,
    tuning=SITE_TUNING,
)
def federate(
    experiment: "Experiment",
    terms: Any,
    tuning: Any,
    plan: PlanFile = None,
    tune: TuneAtSites = False,
    nodes: Annotated[str, typer.Option(help=" or ".join(KINDS))] = KINDS[0],
    out: NewFolder = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Run a whole federation on this machine, with real processes, to try it out."""
    if plan is not None:
        experiment = follow_file(plan, experiment)
    from fedbilevel._files import private_files

    check_track(track, begun=False)
    own = {"nodes": nodes, "track": track, "as_json": as_json}
    own["tuning"] = tried_at_sites(experiment, tuning) if tune else None
    if out is not None:
        with private_files(), _no_folder_in_the_way(out):
            _federate(experiment, out, terms, **own, kept=True)
        return
    with private_files(), tempfile.TemporaryDirectory() as folder:
        _federate(experiment, Path(folder), terms, **own, kept=False)


@contextmanager
def _no_folder_in_the_way(folder: Path) -> Iterator[None]:
    """Remove a folder of ours if the trial could not begin by a mistake of its user.

    Corrected, the same command must not be told that its folder is in use.
    """
    try:
        yield
    except InvalidInputError:
        if not (folder / _folders.CHECKPOINT).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _federate(
    experiment: "Experiment",
    folder: Path,
    terms: Any,
    *,
    nodes: str,
    track: str | None,
    tuning: Mapping[str, Any] | None,
    as_json: bool,
    kept: bool,
) -> None:
    from fedbilevel._files import make_private_folder
    from fedbilevel.deployment import trial

    make_private_folder(folder)
    experiment.save(folder)
    if not as_json:
        lines = trial.deployment_of(experiment)
        lines = [f"{line} --tune" if tuning else line for line in lines]
        text = (
            "In a real deployment, on the server, behind the proxy of "
            "docs/deployment.md, and at every site:\n  "
        )
        Console(stderr=True).print(
            text + "\n  ".join(lines), markup=False, soft_wrap=True
        )
    with watched(experiment.label, quiet=as_json) as watch:
        watch.stage(WAITING)
        result = trial.federate(
            experiment,
            folder,
            terms,
            nodes=nodes,
            watch=watch,
            say=watch.say,
            about=watch.stage,
            track=track,
            tuning=tuning,
        )
    show_result(result, folder if kept else None, as_json)
