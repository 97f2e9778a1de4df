"""Whether an experiment may go on in a folder: only in its own, and never unsaid."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from fedbilevel._folders import (
    CHECKPOINT,
    EXPERIMENT,
    FEDERATION,
    open_folder,
    require_unfinished,
)
from fedbilevel.errors import CheckpointError
from fedbilevel.experiments.experiment import LENGTH, Experiment
from fedbilevel.result import Result

__all__ = ["require_extension", "require_served_again"]

# How often a run is kept, and where its states are, changes no number of it, either.
_KEPT = ("client_states", "checkpoint_rounds", "checkpoint_seconds")


def require_extension(experiment: Experiment, folder: Path) -> None:
    """Raise unless a finished run is of this experiment, and more rounds are asked."""
    _require_same(experiment, folder)
    done = int(Result.load(folder).counts["rounds"])
    if experiment.rounds is None or experiment.rounds <= done:
        raise CheckpointError(
            f"{folder} holds this very run, finished after {done} rounds. Ask for more "
            f"than {done} --rounds to extend it, or choose another folder."
        )
    if (folder / FEDERATION).exists():
        raise CheckpointError(
            f"{folder} holds a federation, which a simulation cannot go on with. "
            "Choose another folder."
        )


def require_served_again(experiment: Experiment, folder: Path) -> None:
    """Raise unless a folder is new, or holds this federation, begun and not ended."""
    require_unfinished(folder)
    if not (folder / EXPERIMENT).exists():
        open_folder(folder, resume=False)
        return
    if (folder / CHECKPOINT).exists() and not (folder / FEDERATION).exists():
        raise CheckpointError(
            f"{folder} holds a simulation. Continue it with `fedbilevel resume "
            f"{folder}`, and choose a new folder for the federation."
        )
    _require_same(experiment, folder)


def _require_same(experiment: Experiment, folder: Path) -> None:
    held = Experiment.load(folder)
    apart = []
    for name in (one.name for one in fields(Experiment)):
        here, there = getattr(experiment, name), getattr(held, name)
        if name == "options":
            apart += _unlike(there, here)
        elif name not in (*LENGTH, *_KEPT) and here != there:
            apart.append(f"{name} is {there} there and {here} here")
    if apart:
        raise CheckpointError(
            f"{folder} holds another experiment: {', '.join(apart)}. Nothing was "
            "changed. Choose another folder, or the settings it was begun with."
        )


def _unlike(there: Any, here: Any) -> list[str]:
    return [
        f"{name} is {there.get(name, 'left out')} there and "
        f"{here.get(name, 'left out')} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]
