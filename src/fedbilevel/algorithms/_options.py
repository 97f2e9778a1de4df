"""Reads the options of an algorithm as the command line writes them.

The step sizes come either in the paper's letters or as effective values. Effective
values have defaults (a task recommends them); letters that are not given are taken from
these at eta = 1.
"""

from collections.abc import Mapping
from typing import Any

from fedbilevel.errors import InvalidInputError
from fedbilevel.schedules import parse_schedule

__all__ = ["EFFECTIVE", "LETTERS", "effective", "integer", "letters", "number"]

LETTERS = ("eta", "alpha", "beta", "rho1", "rho2")
EFFECTIVE = ("upper_step", "lower_step", "upper_weight", "lower_weight")
_SAME = dict(
    zip(
        ("rho1", "rho2", "alpha", "beta"),
        EFFECTIVE,
        strict=True,
    )
)


def number(options: Mapping[str, str], name: str) -> float:
    """Read an option as a number."""
    try:
        return float(options[name])
    except ValueError:
        raise InvalidInputError(
            f"option {name}='{options[name]}' is not a number."
        ) from None


def integer(options: Mapping[str, str], name: str) -> int:
    """Read an option as a whole number."""
    try:
        return int(options[name])
    except ValueError:
        raise InvalidInputError(
            f"option {name}='{options[name]}' is not a whole number."
        ) from None


def letters(
    options: Mapping[str, str], clients: int, local_steps: int
) -> dict[str, Any] | None:
    """Return the paper's letters if any of them is given, else None.

    A decaying eta alone is only a shape and leaves the effective values in force.
    """
    given = [name for name in LETTERS if name in options]
    if not given or (given == ["eta"] and options["eta"].startswith("decay")):
        return None
    values = {
        letter: number(options, letter if letter in options else plain)
        for letter, plain in _SAME.items()
    }
    eta = parse_schedule(
        options.get("eta", "1"),
        clients=clients,
        local_steps=local_steps,
        rho1=values["rho1"],
    )
    return {"eta": eta, **values}


def effective(
    options: Mapping[str, str], clients: int, local_steps: int
) -> dict[str, Any]:
    """Return the effective values, and the shape of eta where one is given."""
    values: dict[str, Any] = {name: number(options, name) for name in EFFECTIVE}
    if "eta" in options:
        values["eta"] = parse_schedule(
            options["eta"], clients=clients, local_steps=local_steps, rho1=1.0
        )
    return values
