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
from fedbilevel.tasks._base import options_of as task_options

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

from formulas import rendered  # noqa: E402
from house import drawn  # noqa: E402
from methods import measured_of, measured_page  # noqa: E402

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


# The page that lists the members of a section.
LISTED = {"Algorithms": "methods.md", "Tasks": "which-task.md"}


def on_config(config: Any) -> Any:
    """Put the pages of algorithms and of tasks first into the reference."""
    (shelf,) = (one["Reference"] for one in config.nav if "Reference" in one)
    for title, names in reversed(sections().items()):
        pages = [{name: f"{title.lower()}/{name}.md"} for name in names]
        shelf.insert(0, {title: [LISTED[title], *pages]})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the table of methods lead to their pages, which the repository has not."""
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
        yield address, relinked((ROOT / source).read_text())
    for title, names in sections().items():
        make = algorithm_page if title == "Algorithms" else task_page
        for name in names:
            yield f"{title.lower()}/{name}.md", make(name)
    yield "field.md", measured_page()
    yield "options.md", options_page()
    yield "own-model.md", example_page()
    yield "notebook.md", notebook_page()
    yield "python.md", python_page()
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
    """Return what an algorithm is, how far it is known, and its options."""
    one = algorithms.find(name)
    rows = [
        (f"`{option.name}`", option.kind, _default(option.default), option.meaning)
        for option in options_of(one).values()
    ]
    head = ("option", "type", "default", "meaning")
    about = rendered(inspect.cleandoc(one.about))
    return (
        f"# {name}\n\n{one.summary}\n\n"
        f"Answers: {one.answers}. Reference: {one.reference}. How known: "
        f"{one.provenance}.\n\n{about}\n\n## Options\n\n"
        f"{_table(head, rows)}\n    fedbilevel list algorithms {name}\n"
        f"    fedbilevel run quadratic --algorithm {name}\n\n{measured_of(name)}"
    )


def task_page(name: str) -> str:
    """Return what a task is, and its options."""
    make = tasks.find(name)
    module = importlib.import_module(make.__module__)
    rows = [
        (f"`{option}`", _default(default), meaning)
        for option, (default, meaning) in task_options(make).items()
    ]
    return (
        f"# {name}\n\n{rendered(_text(module))}\n\n"
        f"{rendered(inspect.getdoc(make) or '')}\n\n## Options\n\n"
        f"{_table(('option', 'default', 'meaning'), rows)}\n"
        f"    fedbilevel run {name}\n    fedbilevel list tasks {name}\n"
    )


def options_page() -> str:
    """Return every option of every task, and those that are common to commands.

    Options of tasks have one row for each meaning and default.
    """
    holders: dict[tuple[str, str, str], list[str]] = {}
    for name in tasks.names():
        for option, (default, meaning) in task_options(tasks.find(name)).items():
            row = (f"`{option}`", meaning, _default(default))
            holders.setdefault(row, []).append(f"[{name}](tasks/{name}.md)")
    rows = [(*row, ", ".join(holders[row])) for row in sorted(holders)]
    return (
        "# Options\n\n## Options of tasks\n\nGive one with `--set NAME=VALUE`. "
        "`data`, `label`, `site`, `group`, `ignore`, `missing` and `preparation` have "
        "flags of their own, `--data` and so on. Options of algorithms are on the "
        "pages of the [algorithms](methods.md).\n\n"
        f"{_table(('option', 'meaning', 'default', 'tasks'), rows)}"
        f"{''.join(_declared(title, kind) for title, kind in SCHEMA.items())}"
    )


def _declared(title: str, kind: type) -> str:
    """Return the options that a dataclass declares, and who must agree on each."""
    rows = []
    for one, known in options_of_schema(kind):
        flag = (known.flag or one.name).replace("_", "-")
        given = f"`{flag.upper()}`" if one.default is MISSING else f"`--{flag}`"
        default = None if one.default in (MISSING, ()) else one.default
        rows.append((given, known.meaning, _default(default), known.agree))
    table = _table(("option", "meaning", "default", "must agree"), rows)
    return f"\n## {title}\n\n{table}"


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


def commands_page() -> str:
    """Return every command with its options."""
    parts = ["# Commands\n"]
    group = typer.main.get_command(app)
    for name, command in getattr(group, "commands", {}).items():
        rows = []
        for one in command.params:
            words = ", ".join(one.opts) if isinstance(one, click.Option) else one.name
            rows.append((f"`{words}`", str(getattr(one, "help", "") or "")))
        table = _table(("option", "meaning"), rows)
        parts.append(
            f"## {name}\n\n{command.help}\n\n    {_example(command)}\n\n{table}"
        )
    return "\n".join(parts)


def _example(command: click.Command) -> str:
    return str(command.epilog or "").removeprefix("Example: ")


def _text(module: Any) -> str:
    return inspect.getdoc(module) or ""


def _default(value: Any) -> str:
    shown = str(value).lower() if isinstance(value, bool) else value
    return "" if value in ("", None) else f"`{shown}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(c) for c in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
