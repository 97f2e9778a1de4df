"""The files of a run folder, whose it is, and how a run in it is continued.

No command writes where something else was kept. Needs neither JAX nor NumPy, so that
a wrong folder is reported at once.
"""

import errno
import os
import secrets
import shlex
from collections.abc import Collection
from pathlib import Path

from fedbilevel.errors import CheckpointError, sentence_of

# The last of these is there once the run is finished.
COLUMNS, POINT, RESULT = "columns.npz", "point.npz", "result.json"
QUALITY = "quality.json"  # where rows were kept apart that say how good a model is
LAST = "last_point.npz"  # where the point of the result is a better one
MODEL, WEIGHTS = "model.json", "model.safetensors"
CHECKPOINT = "checkpoint.npz"  # as soon as a round is kept
EXPERIMENT = "experiment.json"  # is in every folder of a run by a command
FEDERATION = "federation.json"  # and this, if it is one of sites
TRIAL_KEYS = "keys"  # made by `federate` for nodes that end with it
COMPARISON = "settings.json"  # of `fedbilevel compare`
COMPARED = "comparison.json"  # once all algorithms have finished
SEARCH, TUNED = "search.json", "tuned.json"  # of `fedbilevel tune`: asked, and found
TUNING = "tuning"  # the folder of a search, in that of a run or of one compared

_IN_PYTHON = "It was begun in Python. Continue it there"
_IS_SERVED = "Continue it with the command that began it, `fedbilevel serve`."
_IS_TRIAL = (
    "It is a trial by `fedbilevel federate`, which ended with its nodes and cannot be "
    "continued. Start another one in a new folder."
)


def how_to_continue(folder: Path) -> str:
    """Say how to continue the run in a folder, or nothing where there is none.

    What a command began, a command continues; what was begun in Python is made of
    objects that no command can build again.
    """
    finished = (folder / RESULT).exists()
    if (folder / FEDERATION).exists():
        is_trial = (folder / TRIAL_KEYS).exists()
        return "" if finished else _IS_TRIAL if is_trial else _IS_SERVED
    if (folder / EXPERIMENT).exists() and finished:
        return "The command that began it extends it, with more --rounds."
    if (folder / EXPERIMENT).exists():
        return f"Continue it with `fedbilevel resume {shlex.quote(str(folder))}`."
    if (folder / COMPARISON).exists():
        return "Continue it with the command that began it and --resume."
    if (folder / SEARCH).exists() or (folder / TUNING / SEARCH).exists():
        return "Continue it with the command that began it."
    if (folder / CHECKPOINT).exists() or any(folder.glob(f"*/{CHECKPOINT}")):
        return (
            f"{_IN_PYTHON}, with the same call and `keeping=Keeping({str(folder)!r})`."
        )
    return ""


def _names_in(folder: Path) -> set[str]:
    """Return what is in a folder, if it is there; raise if a file is in its place."""
    if folder.is_dir():
        return {one.name for one in folder.iterdir()}
    if os.path.lexists(folder):
        error = NotADirectoryError(errno.ENOTDIR, "", str(folder))
        raise CheckpointError(sentence_of(error))
    return set()


def open_folder(folder: Path, resume: bool | None) -> None:
    """Raise if a new run would meet files of another, or there is nothing to resume.

    With None a run that was begun in Python is continued, and else there is a new one.
    """
    if resume is None and how_to_continue(folder).startswith(_IN_PYTHON):
        return
    if resume and not folder.is_dir():
        raise CheckpointError(f"{folder} is not a run folder: it does not exist.")
    if not resume:
        require_new(folder)


def require_new(folder: Path) -> None:
    """Raise if a folder has something in it."""
    if _names_in(folder):
        how = how_to_continue(folder)
        kept = f" The run in it is kept. {how}" if how else ""
        raise CheckpointError(
            f"{folder} exists and is not empty. Choose another folder, or remove it."
            f"{kept}"
        )


def require_unfinished(folder: Path) -> None:
    """Raise if a folder holds a run that is over."""
    if (folder / RESULT).exists():
        raise CheckpointError(
            f"{folder} holds a finished run. Nothing was changed: choose a new folder."
        )


def require_own(folder: Path, names: Collection[str]) -> None:
    """Raise if a folder has files beyond those that would be written there."""
    if _names_in(folder) - set(names):
        raise CheckpointError(
            f"{folder} exists and holds something else. Choose another folder."
        )


def check_place(folder: Path, file: Path | None = None) -> None:
    """Raise unless a folder, or a file in it, is there and can be written, or made."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    probe = there / f".{secrets.token_hex(8)}"
    try:
        # Permissions do not show it on a disk that is read-only, nor below /proc.
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise CheckpointError(
                f"{file or folder} cannot be made: {there} takes no files or folders. "
                "Choose another place."
            ) from error
        named = OSError(error.errno, error.strerror, str(there))
        raise CheckpointError(sentence_of(named)) from error


def check_file(path: Path) -> None:
    """Raise unless a file can be written there without harm to a run."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder. Name a file.")
    if (path.parent / EXPERIMENT).exists():
        raise CheckpointError(
            f"{path.parent} belongs to a run. Choose another place for {path.name}."
        )
    check_place(path.parent, path)


def require_new_file(path: Path) -> None:
    """Raise if something is there already, or no file can be made there."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists. Choose another file, or remove it.")
    check_place(path.parent, path)
