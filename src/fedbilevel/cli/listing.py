"""Commands that show what there is, `list`, and which method fits, `recommend`."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedbilevel._schema import option
from fedbilevel._table_choices import listed_names
from fedbilevel.cli.arguments import AS_JSON, takes
from fedbilevel.cli.output import Console, print_json
from fedbilevel.cli.progress import status
from fedbilevel.errors import InvalidInputError, unknown_name

# The same words as in `fedbilevel.experiments.traits`, which loads JAX.
_WORDS = (
    "any of hessian, alike-clients, more-exchanges, all-clients, single-replies, "
    "separated by commas"
)
Rows = Iterable[Sequence[str]]
_QUESTION = option(None, "shared-y, own-y, single-level or single-machine")


@takes()
def list_entries(
    kind: str | None = option(
        None, "tasks, algorithms, wrappers or data; all if left out", spelled=""
    ),
    name: str | None = option(
        None, "one of them, to be shown with its options", spelled=""
    ),
    question: str | None = _QUESTION,
    needs: str | None = option(None, _WORDS, metavar="WORDS"),
    without: str | None = option(None, "the same, not needed", metavar="WORDS"),
    known: str | None = option(None, "read, partly or reconstructed"),
) -> None:
    """Show the tasks, algorithms, wrappers and data there are, and the options of one.

    Algorithms can be chosen by the question that they answer, by what they need or do
    without, and by how they are known.
    """
    if kind is not None and kind not in _TABLES:
        raise unknown_name("list", kind, _TABLES)
    asked = {
        "question": question,
        "needs": [*listed_names(needs or "")],
        "without": [*listed_names(without or "")],
        "known": known,
    }
    given = [f"--{name}" for name, value in asked.items() if value]
    if given:
        if kind != "algorithms" or name is not None:
            raise InvalidInputError(
                f"{given[0]} chooses among all algorithms: `fedbilevel list "
                f"algorithms {given[0]} ...`."
            )
        _show(_chosen_table(asked, given))
    elif kind is None or name is None:
        for one in [kind] if kind else _TABLES:
            _show(_TABLES[one]())
    elif kind in _DETAILS:
        _DETAILS[kind](name)
    else:
        raise InvalidInputError(
            f"nothing more is known of '{name}'. A task or an algorithm has options: "
            "`fedbilevel list tasks NAME`."
        )


@takes()
def recommend(
    task: str | None = option(None, "a task; any problem if left out", spelled=""),
    clients: int | None = option(None, "how many there are"),
    participants: int | None = option(None, "clients that take part in an exchange"),
    differ: bool | None = option(
        None, "what clients hold; they may differ", spelled="--differ/--alike"
    ),
    no_hessian: bool = option(False, "gradients are all that can be had"),
    few_rounds: bool = option(False, "what is reached early counts"),
    question: str | None = _QUESTION,
    as_json: bool = AS_JSON,
) -> None:
    """Name the two or three methods that fit, with the reason and what was measured."""
    from fedbilevel.experiments.recommendation import Situation
    from fedbilevel.experiments.recommendation import recommend as found_for

    situation = Situation(
        clients, participants, differ, not no_hessian, few_rounds, question
    )
    with status("tracing what algorithms need"):
        found = found_for(task, situation)
    if as_json:
        print_json({"recommended": [one._asdict() for one in found]})
        return
    for number, one in enumerate(found, 1):
        _print(f"{number}. {one.name}: {one.summary}")
        _print(f"Why: it {', and '.join(one.reasons)}.", indent=3)
        _print(f"How known: {one.known}.", indent=3)
        _print(f"Measured: {one.measured}.", indent=3)
        if task is not None:
            _print(f"Try: fedbilevel run {task} --algorithm {one.name}", indent=3)


def _chosen_table(asked: dict[str, Any], given: list[str]) -> Table:
    """Return the table of the algorithms that are as asked."""
    from fedbilevel.experiments.traits import fitting

    with status("tracing what algorithms need"):
        found = fitting(**asked)
    if not found:
        raise InvalidInputError(
            f"no algorithm is all of that. Leave out one of {', '.join(given)}."
        )
    return _algorithms(f"Algorithms: {len(found)}", map(_about, found))


def _about(entry: Any) -> tuple[str, ...]:
    about = entry.summary, entry.answers, entry.reference, entry.provenance
    return entry.name, *about


def _algorithms(title: str, rows: Rows) -> Table:
    caption = "`fedbilevel list algorithms NAME` shows the options of one."
    headings = ("algorithm", "what it is", "answers", "reference", "how known")
    return _table(title, caption, headings, rows)


def _rows_of(registry: Any, row: Callable[[str], Sequence[str]]) -> Rows:
    """Return a row for every name, be it why nothing can be said of it."""
    for name in (*registry.names(), *registry.installed()):
        try:
            yield row(name)
        except InvalidInputError as error:  # of a package that somebody installed
            yield name, str(error)


def _algorithm_table() -> Table:
    from fedbilevel import algorithms

    rows = _rows_of(algorithms, lambda name: _about(algorithms.find(name)))
    return _algorithms("Algorithms", rows)


def _show_algorithm(name: str) -> None:
    from fedbilevel import algorithms
    from fedbilevel.experiments.options import options_of

    entry = algorithms.find(name)
    about = {
        entry.name: entry.summary,
        "Answers": entry.answers,
        "Reference": entry.reference,
        "How known": entry.provenance,
        "Needs": _needs(name),
    }
    for label, text in about.items():
        if text:
            _print(f"{label}: {text}")
    caption = (
        "Give one with --set OPTION=VALUE. An omitted option without a default takes "
        "the task's recommended value."
    )
    if "local_steps" in entry.parameters:
        caption += " --local-steps is p."
    known = options_of(entry).values()
    rows = ((one.name, one.kind, one.default, one.meaning) for one in known)
    _show(_table("Options", caption, _OPTION, rows))


def _needs(name: str) -> str:
    """Say what a method needs; nothing of one that cannot be built by its name alone.

    A user's own file is not traced when it is only to be shown.
    """
    from fedbilevel import algorithms
    from fedbilevel.experiments.traits import TRAITS, traits_of

    if algorithms.is_file(name):
        return ""
    try:
        words = traits_of(name)
    except InvalidInputError:
        return ""
    return "; ".join(f"{TRAITS[word]} ({word})" for word in words) or "gradients alone"


def _task_table() -> Table:
    from fedbilevel import tasks
    from fedbilevel.tasks._base import option_defaults

    def row(name: str) -> tuple[str, ...]:
        options = option_defaults(tasks.find(name)).items()
        known = ", ".join(f"{option}={default}" for option, default in options)
        return name, _task_text(name), known

    caption = "`fedbilevel list tasks NAME` says more of one."
    headings = ("task", "what it is", "options (defaults)")
    return _table("Tasks", caption, headings, _rows_of(tasks, row))


def _show_task(name: str) -> None:
    from fedbilevel import tasks
    from fedbilevel.tasks._base import options_of

    make = tasks.find(name)
    _print(f"{tasks.label(name)}: {_task_text(name)}")
    if more := inspect.getdoc(make):
        _print(more)
    rows = (
        (one, _KINDS[type(default)], str(default), meaning)
        for one, (default, meaning) in options_of(make).items()
    )
    how = "Give one with --set OPTION=VALUE."
    _show(_table("Options", how, _OPTION, rows, whole=3))


def _data_table() -> Table:
    from fedbilevel import datasets

    how = "A name, or a file or folder that is laid out so."
    rows = ((name,) for name in (*datasets.names(), *datasets.LAYOUTS))
    return _table("Data", how, ("--data",), rows, whole=0)


def _wrapper_table() -> Table:
    from fedbilevel.algorithms.wrappers import WRAPPERS

    how = (
        "Give one with --with NAME or NAME=VALUE. Repeat it, the innermost first. "
        "Values in brackets may be left out."
    )
    rows = ((one.usage(), one.summary) for one in WRAPPERS.values())
    return _table("Wrappers", how, ("--with", "what it does"), rows)


_TABLES: dict[str, Callable[[], Table]] = {
    "tasks": _task_table,
    "algorithms": _algorithm_table,
    "wrappers": _wrapper_table,
    "data": _data_table,
}
_DETAILS: dict[str, Callable[[str], None]] = {
    "tasks": _show_task,
    "algorithms": _show_algorithm,
}
_OPTION = ("option", "type", "default", "meaning")
_CUT = "…"  # by which a table shows that a word did not fit
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def _table(
    title: str, caption: str, headings: Sequence[str], rows: Rows, whole: int = 1
) -> Table:
    """Return a table; words of so many columns are never broken."""
    from fedbilevel.report.tables import table_of

    texts = range(len(headings))
    return table_of(title, headings, rows, texts, slice(whole), caption=caption)


def _show(table: Table) -> None:
    """Print a table, or its rows one by one where it would cut words off."""
    console = Console()
    with console.capture() as drawn:
        console.print(table)
    if _CUT not in drawn.get():
        console.print(table)
        return
    _print(str(table.title))
    _, *headings = (str(column.header) for column in table.columns)
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        _print(str(first))
        for heading, cell in zip(headings, others, strict=True):
            if cell:
                _print(f"{heading}: {cell}", indent=2)
    _print(str(table.caption))


def _print(text: str, indent: int = 0) -> None:
    Console().print(Padding(Text(text), (0, 0, 0, indent), expand=False))


def _task_text(name: str) -> str:
    """Return the first paragraph of the text of a task's module."""
    from fedbilevel import tasks

    module = importlib.import_module(tasks.find(name).__module__)
    text = inspect.getdoc(module) or ""
    return " ".join(text.split("\n\n")[0].split())
