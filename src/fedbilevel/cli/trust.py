"""Code that a folder names runs only if the user agrees.

Words of the command are agreement: a task or algorithm that was typed is run. Code
named by a folder comes from the folder's author, perhaps another person.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from fedbilevel import _registry
from fedbilevel._schema import option
from fedbilevel._text import shown
from fedbilevel.errors import InvalidInputError

if TYPE_CHECKING:
    from fedbilevel.experiments import Experiment

TRUST_CODE = option(
    False,
    "run code that the folder names: a file of one's own, or an installed package's; "
    "without it a terminal is asked",
)


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
