"""Checks of a command's arguments that need no JAX."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbilevel import _folders, _registry
from fedbilevel._schema import Settings, options_of
from fedbilevel.errors import InvalidInputError, unknown_name

Given = Mapping[str, Any]  # what was typed, by the names of a command's arguments
_CHOICES = {one.name: known.choices for one, known in options_of(Settings)}
RUNTIMES, PRECISIONS = _CHOICES["runtime"], _CHOICES["precision"]


def names(given: Given) -> None:
    """Raise if a task, an algorithm, a runtime or a precision has an unknown name."""
    _known("task", given.get("task"), _registry.TASKS.known())
    known = _registry.ALGORITHMS.known()
    _known("algorithm", given.get("algorithm"), known)
    for name in (given.get("names") or "").split(","):
        _known("algorithm", name.strip() or None, known)
    _known("runtime", given.get("runtime"), RUNTIMES)
    if given.get("precision", PRECISIONS[0]) not in PRECISIONS:
        known = " or ".join(PRECISIONS)
        raise InvalidInputError(f"precision '{given['precision']}': choose {known}.")


def _known(kind: str, name: str | None, known: Any) -> None:
    own = name is not None and _registry.is_file(name)
    if name is not None and not own and name not in known:
        raise unknown_name(kind, name, known)


def data(given: Given) -> None:
    """Raise if --data is a path where there is nothing to read.

    An unknown option of --set is refused before, and only tasks know theirs.
    """
    source = given.get("data")
    if source is None or given.get("settings"):
        return
    path = Path(source).expanduser()
    if path.exists():
        if not os.access(path, os.R_OK):
            raise InvalidInputError(f"{path} cannot be read: permission denied.")
    elif ":" not in source and (os.sep in source or path.suffix):
        raise InvalidInputError(f"there is no file or folder {path}. Check the path.")


def client_states(given: Given) -> None:
    """Raise unless --client-states is left out, or a folder that can be written."""
    if given["client_states"] is not None:
        _folders.check_place(Path(given["client_states"]))


def folder_to_make(given: Given) -> None:
    """Raise unless --out is left out, or a new folder that can be made."""
    if given["out"] is not None:
        _folders.open_folder(given["out"], resume=False)
        _folders.check_place(given["out"])


def new_file(given: Given) -> None:
    """Raise unless --out is left out, or a file that harms no run."""
    if given["out"] is not None:
        _folders.check_file(given["out"])
