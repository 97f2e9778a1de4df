"""The site: pages made from the program, links that lead somewhere, no guests."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedbilevel import algorithms, tasks
from fedbilevel.cli.app import app

ROOT = Path(__file__).parent.parent


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
    assert "u<sub>t</sub> = (1 - a)" in pages["algorithms/local-bsgvrm.md"]
    for name in tasks.names():
        assert f"# {name}\n" in pages[f"tasks/{name}.md"]
    assert "| `start` | `0.0` |" in pages["tasks/regularization.md"]


def test_every_command_and_public_name_is_there(pages):
    for one in app.registered_commands:
        assert f"## {one.name}\n" in pages["commands.md"]
    for name in ("LocalBSGVRM", "run", "compare", "ClientData", "Result"):
        assert f"## {name}\n" in pages["python.md"]
    # An address in memory would change with every build.
    assert " at 0x" not in pages["python.md"]


def test_formulas_are_drawn_and_code_stays():
    draw = loaded("formulas").rendered
    text = "With `own_lower` and rho1 < 1, x_t moves.\n\n    u_{t+1} <- eta_t^2 <b>"
    assert draw(text) == (
        "With `own_lower` and ρ<sub>1</sub> < 1, x<sub>t</sub> moves.\n\n"
        '<pre class="formula">u<sub>t+1</sub> ← η<sub>t</sub><sup>2</sup> '
        "&lt;b&gt;</pre>"
    )
    # Words that begin or end like letters, names of options, and commands.
    same = "beetle, thetas, lower_step, x_true, meta\n\n    fedbilevel run x_1"
    assert draw(same) == same


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
