"""The site: pages made from the program, links that lead somewhere, no guests."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import equinox as eqx
import pytest
import typer.main

from fedbilevel import algorithms, errors, tasks
from fedbilevel.algorithms.wrappers import WRAPPERS
from fedbilevel.cli.app import app
from fedbilevel.evaluation.assessment import MEANINGS as OF_MODELS
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.options import options_of
from fedbilevel.report.page.sections import MEANINGS as OF_RUNS
from fedbilevel.runtime.job import OWN_COLUMNS
from fedbilevel.tasks._base import options_of as task_options

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return dict(loaded("pages").every_page())


def test_every_algorithm_and_task_has_a_page(pages):
    for name in algorithms.names():
        page = pages[f"algorithms/{name}.md"]
        assert algorithms.find(name).provenance in page
    for name in tasks.names():
        assert f"# {name}\n" in pages[f"tasks/{name}.md"]
        for option in task_options(tasks.find(name)):
            assert f"| `{option}` |" in pages[f"tasks/{name}.md"]
            assert f"| `{option}` |" in pages["options.md"]
        for option in options_of(algorithms.find("fedbio")):
            assert f"| `{option}` |" in pages["algorithms/fedbio.md"]
    assert "| `start` | `0.0` |" in pages["tasks/regularization.md"]


def test_every_command_and_public_name_is_there(pages):
    for one in app.registered_commands:
        assert f"## {one.name}\n" in pages["commands.md"]
    for name in ("LocalBSGVRM", "run", "compare", "ClientData", "Result"):
        assert f"## {name}\n" in pages["python.md"]
    # An address in memory would change with every build.
    assert " at 0x" not in pages["python.md"]


def test_every_method_says_what_it_does_costs_and_answers(pages):
    for name in algorithms.names():
        page, one = pages[f"algorithms/{name}.md"], algorithms.find(name)
        titles = re.findall(r"^## (.*)$", page, re.M)
        assert titles[:4] == ["Listing", "Program", "Cost", "Options"], name
        assert f"- **Answers:** {one.answers}: " in page
        assert f"- **How known:** {one.provenance}.\n" in page
        listing = page.partition("## Listing")[2].partition("## Program")[0]
        blocks = re.findall(r'<div class="listing".*?</div>', listing)
        assert blocks and all("<math>" in block for block in blocks), name
        for block in blocks:  # Each is closed where it ends.
            assert ElementTree.fromstring(block).tag == "div"
        cost = page.partition("## Cost")[2].partition("## Options")[0]
        counts = re.findall(r"^\| [\w ]+ \| [\d.,]+ \|$", cost, re.M)
        assert len(counts) >= 2, name
        # A listing is typeset, or it is none: no line of it is left as it was typed.
        assert "<-" not in listing and not re.search(r"\b[a-z]_\{", listing), name


def test_every_wrapper_metric_and_error_has_an_entry(pages):
    page = pages["wrappers.md"]
    for name, one in WRAPPERS.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert one.summary in section and f"--with {one.usage()}" in section
        for parameter in one.parameters:
            assert f"| `{parameter}` |" in section, (name, parameter)
    for name in {*OF_MODELS, *OF_RUNS, *OWN_COLUMNS} - {"round"}:
        assert f"| `{name}` |" in pages["metrics.md"], name
    table = loaded("reference").errors_table()
    raised = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, (errors.FedbilevelError, Warning))
    ]
    assert len(raised) > 15
    for one in raised:
        assert f"| `{one.__name__}` |" in table
    assert "## Classes" in loaded("pages").on_page_markdown("", named_page("errors.md"))


def named_page(name: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


QUICK = ("quadratic", "two-client", "minimax")


@pytest.mark.parametrize(
    "name",
    [
        one if one in QUICK else pytest.param(one, marks=pytest.mark.slow)
        for one in tasks.names()
    ],
)
def test_every_metric_of_a_task_has_an_entry(name, pages):
    task, _, _ = Experiment(name).build_task()
    frozen = [task.problem.frozen] if name == "reweighting" else []
    assert task.metrics is not None
    found = eqx.filter_eval_shape(task.metrics, task.x, task.y, *frozen)
    for metric in {task.headline, *found}:
        # A source of texts is whatever its file is called.
        if name == "reweighting" and metric.startswith("weight_"):
            metric = "weight_SOURCE"
        assert f"| `{metric}` |" in pages["metrics.md"], metric


def programs(pages: dict[str, str], name: str) -> tuple[str, str]:
    part = pages[f"algorithms/{name}.md"].partition("## Program")[2].partition("\n## ")
    (code,) = re.findall(r"```python\n(.*?)```", part[0], re.S)
    (line,) = re.findall(r"^    fedbilevel (.*)$", part[0], re.M)
    return code, line


def test_the_program_of_every_method_is_valid(pages):
    command = typer.main.get_command(app)
    for name in algorithms.names():
        code, line = programs(pages, name)
        made = code.partition("result = ")[2].partition(".run()")[0]
        one = eval(made, {"Experiment": Experiment})
        assert (one.task, one.algorithm) == ("quadratic", name)
        compile(code, name, "exec")
        group: Any = command
        word, *words = line.split()
        typed = group.commands[word].make_context(word, words).params
        assert (typed["task"], typed["algorithm"]) == ("quadratic", name)
        given = dict(pair.split("=") for pair in typed["settings"] or ())
        assert typed["rounds"] == one.rounds and given == one.options
        assert set(given) <= set(options_of(algorithms.find(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedbio-controls", "pbgd-free", "fedavg"])
def test_a_program_runs_as_the_page_has_it(name, pages, tmp_path):
    code, line = programs(pages, name)
    command = [sys.executable, "-m", "fedbilevel.cli", *line.split()]
    for started in ([sys.executable, "-c", code], command):
        done = subprocess.run(started, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "upper_loss" in done.stdout or "grad_norm_sq" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        one
        if one in ("fedbio", "fedavg", "pbgd-free")
        else pytest.param(one, marks=pytest.mark.exhaustive)
        for one in algorithms.names()
    ],
)
def test_costs_on_the_pages_are_those_that_are_counted(name):
    costs = loaded("costs")
    assert set(costs.known()) == set(algorithms.names())
    written, found = costs.known()[name], costs.counted(name)
    if all(isinstance(value, int) for value in written.values()):
        assert found == written
    else:  # lengths are drawn, other ones in another precision
        assert found == pytest.approx(written, rel=0.2)


def drawn(text: str) -> str:
    """Return what one reads of a drawn formula, scripts after their letters."""
    text = re.sub(r"<mspace[^>]*></mspace>", " ", text)
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_formulas_are_drawn_and_code_stays():
    draw = loaded("formulas").prose
    text = "With `own_lower` and rho1 < 1, x_t moves by eta_t^2 gy_k(x, y; .)."
    found = draw(text)
    assert drawn(found) == "With `own_lower` and ρ1<1, xt moves by ηt2 ∇ygk(x,y;·)."
    assert "<msub><mi>ρ</mi><mn>1</mn></msub>" in found
    assert "<msubsup><mi>η</mi><mrow><mi>t</mi></mrow><mrow><mn>2</mn></mrow>" in found
    assert found.count("<math>") == 3
    # Words that begin or end like letters, articles, names of options, and commands.
    same = "beetle, thetas, a client, lower_step, x_true, F2SA-p (arXiv 2302.06701)."
    assert draw(same) == same


def test_listings_are_aligned_where_they_were_typed_so():
    draw = loaded("listings").rendered
    text = """\
    u   = (1 - a) u
    y_s <- y - (x
                + z)         by hand
    until z:  u = 1
              y = 2

and

    fedbilevel run x_1"""
    listing, words, command = draw(text).split("\n\n")
    assert words == "and" and command == "    fedbilevel run x_1"
    cells = re.findall(r"grid-area: (\d+) / (\d+) / \d+ / (\d+)", listing)
    # One line less, as the third goes on with the second; the last is under `u = 1`.
    assert [row for row, _, _ in cells][-1] == "4"
    assert cells[-2][1] == cells[-1][1] != "1"
    assert "y−(x+z)" in drawn(listing)
    # Signs of two lines stand under each other, whatever they are.
    assert ("1", "2") in [cell[:2] for cell in cells]
    assert ("2", "2") in [cell[:2] for cell in cells]


def test_links_of_the_repository_become_those_of_the_site():
    turn = loaded("pages").relinked
    assert turn("[a](docs/data.md), [b](CONTRIBUTING.md)") == (
        "[a](data.md), [b](contributing.md)"
    )
    assert turn("[a](examples/x.py) [b](https://c.d)") == (
        "`examples/x.py` [b](https://c.d)"
    )


def test_the_house_has_arrows_that_nothing_else_implies():
    house = loaded("house")
    graph = {"top": {"middle", "low"}, "middle": {"low"}, "low": set(), "apart": set()}
    assert house.rows_of(graph) == [["top"], ["middle"], ["apart", "low"]]
    arrows = house.needed(graph)
    assert arrows == {
        "top": {"middle"},
        "middle": {"low"},
        "low": set(),
        "apart": set(),
    }
    found = house.imports(ROOT / "src" / "fedbilevel")
    assert "result" in found["report"] and "report" not in found["result"]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_nobody(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, env=quiet, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "algorithms" / "local-bsgvrm.html").exists()
    for path in tmp_path.rglob("*.html"):
        guests = re.findall(
            r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*"', path.read_text()
        )
        assert guests == [], path
    # What is searched lies in a script, which a page on a disk may read.
    index = (tmp_path / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = ")
    found = {one["location"] for one in json.loads(index.partition("= ")[2])["docs"]}
    for place in ("wrappers.html#half-space", "metrics.html", "errors.html#classes"):
        assert place in found
    assert {f"algorithms/{name}.html#listing" for name in algorithms.names()} <= found
    assert {f"tasks/{name}.html" for name in tasks.names()} <= found
