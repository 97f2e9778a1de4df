"""Checks of a command's arguments that need no JAX, and of what code may run.

Code that a folder names runs only if the user agrees. Words of the command are
agreement: a task or algorithm that was typed is run. Code named by a folder comes from
the folder's author, perhaps another person.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedbilevel import _folders, _registry
from fedbilevel._schema import Settings, option, options_of
from fedbilevel._text import shown
from fedbilevel.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

Given = Mapping[str, Any]  # what was typed, by the names of a command's arguments
_CHOICES = {one.name: known.choices for one, known in options_of(Settings)}
RUNTIMES, PRECISIONS = _CHOICES["runtime"], _CHOICES["precision"]
TRUST_CODE = option(
    False,
    "run code that the folder names: a file of one's own, or an installed package's; "
    "without it a terminal is asked",
)


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


def place(name: str, *tests: Callable[[Path], None]) -> Callable[[Given], None]:
    """Return the check of an argument that is a path, if it is not left out."""

    def check(given: Given) -> None:
        if given[name] is not None:
            for test in tests:
                test(Path(given[name]))

    return check


client_states = place("client_states", _folders.check_place)
folder_to_make = place("out", _folders.require_new, _folders.check_place)
new_file = place("out", _folders.check_file)


def only_typed(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command run no code of a file but what its words name."""

    @functools.wraps(command)
    def called(**given: Any) -> None:
        agreed = {
            _registry.whole(word) for value in given.values() for word in _words(value)
        }
        trusts = given.get("trust_code")  # None where a command has no such option

        def agrees(name: str, kind: str) -> None:
            if not trusts and name not in agreed:
                _ask(name, kind, known=trusts is not None)
                agreed.add(name)

        with _registry.asking(agrees):
            command(**given)

    return called


def require_trust(experiment: "Experiment") -> None:
    """Raise unless the code that a folder's experiment names may run."""
    _registry.TASKS.require_agreement(experiment.task)
    if experiment.algorithm is not None:
        _registry.ALGORITHMS.require_agreement(experiment.algorithm)


def _ask(name: str, kind: str, *, known: bool) -> None:
    """Ask on a terminal, or raise; `known` says whether the command has the option."""
    what = f"the {kind} '{shown(name)}' is code that the folder names"
    if known and _is_terminal():
        if typer.confirm(f"{what[0].upper()}{what[1:]}. Run it?", err=True):
            return
        raise InvalidInputError(f"{what}. It was not run.")
    how = "add --trust-code" if known else "name it in the command"
    raise InvalidInputError(
        f"{what}, and not this command. It was not run. If you trust it, {how}."
    )


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _words(value: Any) -> Iterator[str]:
    """Yield what was typed: names are separated by commas, or options repeated."""
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str):
            yield from (text, *(part.strip() for part in text.split(",")))
