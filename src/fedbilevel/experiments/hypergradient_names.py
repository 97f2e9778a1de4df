"""Hypergradient estimators by the names that the command line has for them.

A method's own series is made of the options q and theta. Others take the same two:
theta is a lower step, or what stands for the inverse Hessian, and q a number of lower
steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from fedbilevel.errors import unknown_name
from fedbilevel.hypergradient import (
    DARTS,
    SAMA,
    AbstractHypergradient,
    ForwardGradient,
    Unrolled,
)

SERIES = "series"  # the method's own


class Rule(NamedTuple):
    """An estimator, and the option that sets each of its fields."""

    kind: type[AbstractHypergradient]
    options: Mapping[str, str]


HYPERGRADIENTS: Mapping[str, Rule] = {
    "darts": Rule(DARTS, {"gamma": "theta"}),
    "forward-gradient": Rule(
        ForwardGradient, {"steps": "q", "step": "theta", "directions": "directions"}
    ),
    "sama": Rule(SAMA, {"gamma": "theta"}),
    "unrolled": Rule(Unrolled, {"steps": "q", "step": "theta"}),
}


def named_hypergradient(
    name: str,
    given: Mapping[str, str],
    count: Callable[[str], int],
    number: Callable[[str], Any],
) -> AbstractHypergradient:
    """Build an estimator; `count` and `number` read an option that is given."""
    if name not in HYPERGRADIENTS:
        raise unknown_name("value of hypergradient", name, (SERIES, *HYPERGRADIENTS))
    rule = HYPERGRADIENTS[name]
    kinds = {one.name: one.type for one in fields(rule.kind)}
    values = {
        field: count(option) if kinds[field] is int else number(option)
        for field, option in rule.options.items()
        if option in given or option in ("q", "theta")
    }
    return rule.kind(**values)


def hypergradient_options(
    value: AbstractHypergradient, number: Callable[[Any], str]
) -> dict[str, str] | None:
    """Write an estimator as options that build it again, or None if it has no name."""
    for name, rule in HYPERGRADIENTS.items():
        if type(value) is rule.kind:
            held = {o: getattr(value, f) for f, o in rule.options.items()}
            texts = {
                o: str(v) if isinstance(v, int) else number(v) for o, v in held.items()
            }
            return {"hypergradient": name, **texts}
    return None
