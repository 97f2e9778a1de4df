"""Pages of the site that are made from the program itself; MkDocs calls it."""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import click
import typer.main

import fedbilevel
from fedbilevel import algorithms, tasks
from fedbilevel._schema import Limits, Settings, Terms, Tuning
from fedbilevel._schema import options_of as options_of_schema
from fedbilevel.cli.app import app
from fedbilevel.experiments.options import options_of
from fedbilevel.experiments.traits import QUESTIONS, question_of
from fedbilevel.tasks._base import options_of as task_options

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

from costs import cost_of, costs_page  # noqa: E402
from formulas import prose  # noqa: E402
from house import drawn  # noqa: E402
from listings import rendered  # noqa: E402
from methods import measured_of, measured_page  # noqa: E402
from reference import (  # noqa: E402
    errors_table,
    metrics_page,
    program_of,
    shown,
    table,
    wrappers_page,
)

# What several commands take, by who reads it.
SCHEMA = {
    "Options of experiments": Settings,
    "Options of searches": Tuning,
    "Options of servers": Terms,
    "Options of sites": Limits,
}
# Texts that lie outside of docs, and their names on the site.
COPIED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
}


# What a method is made of, in the order of the guide.
CONTRACT = ("AbstractAlgorithm", "OneLoop", "Phase", "Repeat", "Turn", "ServerTurn")
CONTRACT += ("Each", "Gathered")

# The page that lists the members of a section.
LISTED = {"Algorithms": "methods.md", "Tasks": "which-task.md"}
# Pages of the reference that have one page for all that they list.
MADE = {"Wrappers": "wrappers.md", "Metrics": "metrics.md", "Costs": "costs.md"}
_PROBLEM = re.compile(r"^    min_x .*$", re.M)
# What begins a paragraph of its own in docstrings of methods.
_TOLD = re.compile(r"\n(?=(?:Deviations|Readings|References?|Exchanges a round):)")


NOTATION = prose(
    "*Notation:* f is the upper loss and g the lower one, of client k or i; fx and fy "
    "are gradients, hvp[z] and jvp[z] products with second derivatives; zeta and xi "
    "are samples, a dot is a sample of its own; mean_k is the mean over clients. "
    "[The problem](../index.md) has x above and y below."
)


def on_config(config: Any) -> Any:
    """Put the pages that are made from the program first into the reference."""
    (shelf,) = (one["Reference"] for one in config.nav if "Reference" in one)
    for title, address in reversed(MADE.items()):
        shelf.insert(0, {title: address})
    for title, names in reversed(sections().items()):
        pages = [{name: f"{title.lower()}/{name}.md"} for name in names]
        shelf.insert(0, {title: [LISTED[title], *pages]})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add what the repository has not: links of methods, the classes of errors."""
    if page.file.src_uri == "errors.md":
        return f"{markdown}{errors_table()}"
    if page.file.src_uri != LISTED["Algorithms"]:
        return markdown
    return re.sub(
        r"^\| `([\w-]+)` \|", r"| [\1](algorithms/\1.md) |", markdown, flags=re.M
    )


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of docs."""
    from mkdocs.structure.files import File

    for address, text in every_page():
        files.append(File.generated(config, address, content=text))
    return files


def sections() -> dict[str, list[str]]:
    """Return the names that have a page each."""
    return {"Algorithms": algorithms.names(), "Tasks": tasks.names()}


def every_page() -> Iterator[tuple[str, str]]:
    """Return every page that is made, with its address."""
    for address, source in COPIED.items():
        text = relinked((ROOT / source).read_text())
        # The problem of the overview, as the pages of methods have it.
        yield address, _PROBLEM.sub(lambda one: rendered(one.group()), text)
    for title, names in sections().items():
        make = algorithm_page if title == "Algorithms" else task_page
        for name in names:
            yield f"{title.lower()}/{name}.md", make(name)
    yield "field.md", measured_page()
    yield MADE["Wrappers"], wrappers_page()
    yield MADE["Metrics"], metrics_page()
    yield MADE["Costs"], costs_page()
    yield "options.md", options_page()
    yield "own-model.md", example_page()
    yield "notebook.md", notebook_page()
    yield "python.md", python_page()
    yield "contract.md", contract_page()
    yield "commands.md", commands_page()
    house = "# The architecture\n\nA line goes down to what a part imports."
    yield "house.md", f"{house}\n\n{drawn(ROOT / 'src' / 'fedbilevel')}\n"


def relinked(text: str) -> str:
    """Turn links of the repository into those of the site, or into plain text."""
    places = {source: address for address, source in COPIED.items()}
    places["examples/own_model.py"] = "own-model.md"

    def turned(match: re.Match[str]) -> str:
        shown, target = match.groups()
        if target.startswith(("http", "#")):
            return match.group()
        source, mark, anchor = target.partition("#")
        place = places.get(source) or source.removeprefix("docs/")
        inside = source in places or source.startswith("docs/")
        return f"[{shown}]({place}{mark}{anchor})" if inside else f"`{target}`"

    return re.sub(r"\[([^]]*)\]\(([^)]*)\)", turned, text)


def algorithm_page(name: str) -> str:
    """Return what a method is and costs, a program, its options, and how it did."""
    one = algorithms.find(name)
    question = QUESTIONS[question_of(one)]
    facts = [
        ("Answers", f"{one.answers}: {question}"),
        ("How known", one.provenance),
        ("Reference", one.reference),
    ]
    stated = "\n".join(f"- **{fact}:** {text}." for fact, text in facts)
    rows = [
        (f"`{option.name}`", option.kind, shown(option.default), option.meaning)
        for option in options_of(one).values()
    ]
    options = table(("option", "type", "default", "meaning"), rows)
    listing = rendered(_TOLD.sub("\n\n", one.about))
    return (
        f"# {name}\n\n{prose(one.summary)}\n\n{stated}\n\n"
        f"## Listing\n\n{listing}\n\n{NOTATION}\n\n## Program\n\n"
        f"{program_of(name)}\n## Cost\n\n{cost_of(name)}\n"
        f"## Options\n\nGive one with `--set NAME=VALUE`.\n\n{options}\n"
        f"    fedbilevel list algorithms {name}\n\n{measured_of(name)}"
    )


def task_page(name: str) -> str:
    """Return what a task is, and its options."""
    make = tasks.find(name)
    module = importlib.import_module(make.__module__)
    rows = [
        (f"`{option}`", shown(default), meaning)
        for option, (default, meaning) in task_options(make).items()
    ]
    return (
        f"# {name}\n\n{rendered(_text(module))}\n\n"
        f"{rendered(inspect.getdoc(make) or '')}\n\n## Options\n\n"
        f"{table(('option', 'default', 'meaning'), rows)}\n"
        f"    fedbilevel run {name}\n    fedbilevel list tasks {name}\n"
    )


def options_page() -> str:
    """Return every option of every task, and those that are common to commands.

    Options of tasks have one row for each meaning and default.
    """
    holders: dict[tuple[str, str, str], list[str]] = {}
    for name in tasks.names():
        for option, (default, meaning) in task_options(tasks.find(name)).items():
            row = (f"`{option}`", meaning, shown(default))
            holders.setdefault(row, []).append(f"[{name}](tasks/{name}.md)")
    rows = [(*row, ", ".join(holders[row])) for row in sorted(holders)]
    return (
        "# Options\n\n## Options of tasks\n\nGive one with `--set NAME=VALUE`. "
        "`data`, `label`, `site`, `group`, `ignore`, `missing` and `preparation` have "
        "flags of their own, `--data` and so on. Options of algorithms are on the "
        "pages of the [algorithms](methods.md).\n\n"
        f"{table(('option', 'meaning', 'default', 'tasks'), rows)}"
        f"{''.join(_declared(title, kind) for title, kind in SCHEMA.items())}"
    )


def _declared(title: str, kind: type) -> str:
    """Return the options that a dataclass declares, and who must agree on each."""
    rows = []
    for one, known in options_of_schema(kind):
        flag = (known.flag or one.name).replace("_", "-")
        given = f"`{flag.upper()}`" if one.default is MISSING else f"`--{flag}`"
        default = None if one.default in (MISSING, ()) else one.default
        rows.append((given, known.meaning, shown(default), known.agree))
    head = ("option", "meaning", "default", "must agree")
    return f"\n## {title}\n\n{table(head, rows)}"


def example_page() -> str:
    """Return the example with a model of one's own, and where to read on."""
    code = (ROOT / "examples" / "own_model.py").read_text()
    return (
        "# Your own losses and model\n\nThe smallest program is in "
        "[the overview](index.md#in-python). This one does all that a "
        "study needs; it is `examples/own_model.py`, and the tests run it as it is. "
        "[Own tasks](own-tasks.md) says how the command line takes such a problem, "
        "[Use a result](use-a-result.md) what to do with what comes out.\n\n"
        f"```python\n{code}```\n"
    )


def notebook_page() -> str:
    """Return the cells of the notebook, texts as they are and code as blocks."""
    place = ROOT / "examples" / "first_run.ipynb"
    parts = [
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell in json.loads(place.read_text())["cells"]
        for text in ["".join(cell["source"])]
    ]
    where = "This page is the notebook `examples/first_run.ipynb`; the tests run it."
    return "\n\n".join([*parts, where]) + "\n"


def python_page() -> str:
    """Return every public name with its signature and its docstring."""
    parts = ["# Python\n\nAll of these are imported from `fedbilevel`.\n"]
    for name in sorted(dir(fedbilevel), key=str.lower):
        one = getattr(fedbilevel, name)
        if name.startswith("_") or inspect.ismodule(one) or not callable(one):
            continue
        signature = re.sub(r" at 0x\w+", "", str(inspect.signature(one)))
        text = inspect.getdoc(one) or ""
        parts.append(f"## {name}\n\n```python\n{name}{signature}\n```\n\n{text}\n")
    return "\n".join(parts)


def contract_page() -> str:
    """Return what a method states and may ask for, from the classes it derives from."""
    parts = [
        "# The contract of a method\n\nFor people who "
        "[add a method](add-an-algorithm.md). All of these are imported from "
        "`fedbilevel.algorithms`.\n"
    ]
    for name in CONTRACT:
        text = inspect.getdoc(getattr(algorithms, name)) or ""
        parts.append(f"## {name}\n\n{text}\n")
    return "\n".join(parts)


def commands_page() -> str:
    """Return every command with its options."""
    parts = ["# Commands\n"]
    group = typer.main.get_command(app)
    for name, command in getattr(group, "commands", {}).items():
        rows = []
        for one in command.params:
            words = ", ".join(one.opts) if isinstance(one, click.Option) else one.name
            rows.append((f"`{words}`", str(getattr(one, "help", "") or "")))
        about = f"## {name}\n\n{command.help}\n\n    {_example(command)}"
        parts.append(f"{about}\n\n{table(('option', 'meaning'), rows)}")
    return "\n".join(parts)


def _example(command: click.Command) -> str:
    return str(command.epilog or "").removeprefix("Example: ")


def _text(module: Any) -> str:
    return inspect.getdoc(module) or ""
