"""What `check-theory` recommends is what it accepts, when typed as it was printed."""

import json
import re

import pytest
from typer.testing import CliRunner

from fedbilevel.cli.app import app
from fedbilevel.theory.theorems import _written
from tests.cases import some_of

# Given all of them, nothing is run: the limits are those of the theorem alone.
CONSTANTS = {"l0": 1, "l1": 2, "l21": 1, "l22": 1, "mu": 0.5, "sigma": 1}
CONSTANTS |= {"phi0": 1, "y0": 1}
GIVEN = [word for n, v in CONSTANTS.items() for word in ("--constant", f"{n}={v}")]


def check(*words: str) -> str:
    arguments = ("check-theory", "quadratic", "--clients", "2", *words, *GIVEN)
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("precision", some_of(["float32", "float64"], 1))
@pytest.mark.parametrize("algorithm", ["local-bsgm", "local-bsgvrm"])
def test_recommended_steps_are_accepted(algorithm, precision):
    # Small weights and steps of x, so that `eta < 1` is what binds in theorem 1.
    chosen = ("--algorithm", algorithm, "--set", "alpha=0.01", "--set", "beta=0.01")
    chosen += ("--set", "theta=0.1", "--precision", precision)
    printed = check(*chosen)
    (line,) = [one for one in printed.splitlines() if one.startswith("The largest")]
    steps = dict(re.findall(r"(\w+) = (\S+?)(?:,|$)", line))
    assert sorted(steps) == ["alpha", "beta", "eta", "rho1", "rho2"]
    typed = [word for n, v in steps.items() for word in ("--set", f"{n}={v}")]
    found = json.loads(check(*chosen, *typed, "--json"))
    assert [one["name"] for one in found["conditions"] if not one["holds"]] == []
    assert found["holds"]


@pytest.mark.parametrize(
    ("limit", "strict", "expected"),
    [
        (1.0, True, 0.999),
        (1.0, False, 1.0),
        (0.123456, False, 0.1234),
        (0.123456, True, 0.1234),
        (99999.0, False, 99990.0),
        (3e-7, True, 2.999e-07),
        (float("inf"), True, float("inf")),
    ],
)
def test_a_limit_of_few_digits_is_not_above_it(limit, strict, expected):
    assert _written(limit, 4, strict) == expected
