"""The notebook of the tutorials runs from top to bottom and shows what it says.

Its cells are plain Python, so that they are run here one after the other, in one set of
names. A kernel would bring a dozen packages and prove nothing more.
"""

import ast
import json
from pathlib import Path
from typing import Any

import jax
import pytest

PLACE = Path(__file__).parent.parent / "examples" / "first_run.ipynb"
CELLS = json.loads(PLACE.read_text())["cells"]


def shown_by(code: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last line, which a notebook displays."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_nothing_of_a_run_is_kept_in_the_file():
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code)


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says():
    names: dict[str, Any] = {}
    code = ["".join(one["source"]) for one in CELLS if one["cell_type"] == "code"]
    shown = [shown_by(one, names) for one in code]
    problem, data, result, strengths, compared = shown[1:]
    assert repr(problem) == "Problem(upper=judge, lower=train)"
    assert "80 rows, 30 to 50 a client" in repr(data)
    assert "upper_loss" in result._repr_html_()
    assert strengths.argmin() == 0
    ranked = compared._repr_html_()
    assert 0 < ranked.index("fedbio-controls") < ranked.index("fedavg")
    assert isinstance(strengths, jax.Array)
