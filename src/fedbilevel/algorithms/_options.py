"""Reads the options of an algorithm as the command line writes them.

The step sizes come either in the paper's letters or as effective values. Effective
values have defaults (a task recommends them); letters that are not given are taken from
these at eta = 1.
"""

from collections.abc import Mapping
from typing import Any

from fedbilevel.errors import InvalidInputError, unknown_name
from fedbilevel.hypergradient import Neumann
from fedbilevel.schedules import parse_schedule

__all__ = [
    "EFFECTIVE",
    "LETTERS",
    "choice",
    "effective",
    "first_number",
    "integer",
    "is_alternating",
    "letters",
    "number",
    "optional_number",
    "series",
    "storm",
]

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


def optional_number(options: Mapping[str, str], name: str) -> float | None:
    """Read an option that may be left out."""
    return number(options, name) if name in options else None


def first_number(options: Mapping[str, str], *names: str) -> float:
    """Read the first option that is given: a letter before an effective value."""
    return number(options, next((n for n in names if n in options), names[-1]))


def choice(options: Mapping[str, str], name: str, among: tuple[str, ...]) -> str:
    """Read an option that is one of some words, the first if it is left out."""
    value = options.get(name, among[0])
    if value not in among:
        raise unknown_name(name, value, among)
    return value


def is_alternating(options: Mapping[str, str], default: str) -> bool:
    """Read the order of the moves."""
    words = ("simultaneous", "alternating")
    chosen = choice({"order": default, **options}, "order", words)
    return chosen == "alternating"


def series(options: Mapping[str, str]) -> Neumann:
    """Read the stochastic Neumann series."""
    return Neumann(integer(options, "q"), number(options, "theta"))


def storm(
    options: Mapping[str, str], clients: int, local_steps: int, third: bool
) -> dict[str, Any]:
    """Return the letters of FedBiOAcc, from effective values where not given.

    `a` gives the shape over t; x moves by eta a_t and forgets by c_nu a_t^2, y by
    gamma and c_omega, z by tau and c_q.
    """
    a = parse_schedule(
        options.get("a", "1"), clients=clients, local_steps=local_steps, rho1=1.0
    )
    first = float(a(0))
    names = [("eta", "c_nu", "upper"), ("gamma", "c_omega", "lower")]
    names += [("tau", "c_q", "auxiliary")] if third else []
    values: dict[str, Any] = {"a": a}
    for step, weight, level in names:
        plain = ("lower",) if level == "auxiliary" else ()
        for letter, kind, power in ((step, "step", 1), (weight, "weight", 2)):
            if letter in options:
                values[letter] = number(options, letter)
            else:
                found = first_number(options, *(f"{n}_{kind}" for n in (level, *plain)))
                values[letter] = found / first**power
    return values


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
