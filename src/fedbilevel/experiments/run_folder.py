"""The folder of a run: its lock, and the command that repeats it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel import _folders
from fedbilevel._files import naming_damage, write_atomically
from fedbilevel._schema import Tuning, checked, command_line
from fedbilevel.errors import CheckpointError
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.result import Result, to_plain
from fedbilevel.saved import Saved
from fedbilevel.studies.budgets import TRIALS


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a folder; raise with its name if it is damaged."""
    with naming_damage(path):
        return dict(json.loads(path.read_text()))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object into a folder, atomically."""
    text = json.dumps(to_plain(content), indent=2, allow_nan=False)
    write_atomically(path, f"{text}\n")


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Return the names under which two mappings hold different things."""
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def require_same_search(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise if the file of a search holds other settings."""
    if path.exists() and read_json(path) != json.loads(json.dumps(to_plain(settings))):
        raise CheckpointError(
            f"{path.parent} holds a search with other settings. Continue with those it "
            "was begun with, or choose a new folder."
        )


def require_extension(experiment: Experiment, folder: Path) -> None:
    """Raise unless a finished run is of this experiment, and more rounds are asked."""
    _require_same(experiment, folder)
    done = int(Result.load(folder).counts["rounds"])
    if experiment.rounds is None or experiment.rounds <= done:
        raise CheckpointError(
            f"{folder} holds this very run, finished after {done} rounds. Ask for more "
            f"than {done} --rounds to extend it, or choose another folder."
        )
    if (folder / _folders.FEDERATION).exists():
        raise CheckpointError(
            f"{folder} holds a federation, which a simulation cannot continue. Choose "
            "another folder."
        )


def require_served_again(experiment: Experiment, folder: Path) -> None:
    """Raise unless a folder is new, or holds this federation, begun and not ended."""
    _folders.require_unfinished(folder)
    if not (folder / _folders.EXPERIMENT).exists():
        _folders.open_folder(folder, resume=False)
        return
    is_federation = (folder / _folders.FEDERATION).exists()
    if (folder / _folders.CHECKPOINT).exists() and not is_federation:
        raise CheckpointError(
            f"{folder} holds a simulation. Continue it with `fedbilevel resume "
            f"{folder}`, and choose a new folder for the federation."
        )
    _require_same(experiment, folder)


def _require_same(experiment: Experiment, folder: Path) -> None:
    apart = Experiment.load(folder).differences(experiment)
    if apart:
        raise CheckpointError(
            f"{folder} holds another experiment: {', '.join(apart)}. Nothing was "
            "changed. Choose another folder, or the settings it was begun with."
        )


def command_of(saved: Saved) -> str | None:
    """Return the command that repeats what a folder holds; None if none began it."""
    if not saved.settings:
        return None
    if saved.compared:
        names = [*saved.results, *saved.diverged]
        return comparison_command(saved.settings, names)
    runtime = saved.every[0].config.get("runtime", "simulator")
    return run_command(saved.settings, str(runtime))


def run_command(settings: Mapping[str, Any], runtime: str) -> str:
    """Return what to type for a run; `runtime` is the one that it was made by."""
    experiment = _experiment(settings)
    if runtime in ("simulator", "reference"):
        return command_line("run", experiment.arguments())
    # Of a federation: `serve` needs the keys of its sites, a trial needs nothing.
    words = experiment.arguments(flags={"patience": "stop_patience"})
    return command_line("federate", words)


def comparison_command(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return what to type for a comparison of these algorithms."""
    try:
        experiment = _experiment(settings["experiment"])
        seeds, tuning = int(settings["seeds"]), settings.get("tuning")
        search = None if tuning is None else checked(Tuning, tuning)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"settings.json is damaged: {error}.") from error
    # Of a file a result has the name of the class alone.
    given = dict(settings.get("names") or {})
    chosen = [str(given.get(name, name)) for name in names]
    words = [*experiment.arguments(), "--algorithms", ",".join(chosen)]
    words += ["--seeds", str(seeds)]
    equal = str(settings.get("equal", TRIALS))
    words += [] if equal == TRIALS else ["--equal", equal]
    tuned = [] if search is None else ["--tune", *search.arguments()]
    return command_line("compare", [*words, *tuned])


def _experiment(settings: Mapping[str, Any]) -> Experiment:
    try:
        return checked(Experiment, settings)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the saved settings are damaged: {error}.") from error
