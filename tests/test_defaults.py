"""Defaults are promises: whoever gives nothing gets the same as before.

`reference/defaults.json` has them all. Where one is changed on purpose, the file is
changed by hand, and the changelog says so.
"""

import json
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fedbilevel import algorithms, tasks
from fedbilevel.algorithms.wrappers import WRAPPERS
from fedbilevel.experiments.options import options_of
from fedbilevel.hypergradient import AbstractHypergradient
from fedbilevel.tasks._base import option_defaults

KNOWN = json.loads((Path(__file__).parent / "reference" / "defaults.json").read_text())
ESTIMATORS = {
    name: one
    for name, one in vars(import_module("fedbilevel.hypergradient")).items()
    if isinstance(one, type) and issubclass(one, AbstractHypergradient)
}


def of_fields(held: Any) -> dict[str, Any]:
    return {one.name: one.default for one in held if one.default is not MISSING}


def of_method(name: str) -> dict[str, Any]:
    found = options_of(algorithms.find(name))
    return {option: str(one.default) for option, one in found.items()}


def of_task(name: str) -> dict[str, Any]:
    return option_defaults(tasks.find(name))


def of_wrapper(name: str) -> dict[str, Any]:
    return of_fields(WRAPPERS[name].parameters.values())


def of_estimator(name: str) -> dict[str, Any]:
    return of_fields(fields(ESTIMATORS[name]))


KINDS = {
    "methods": (algorithms.names, of_method),
    "tasks": (tasks.names, of_task),
    "wrappers": (lambda: WRAPPERS, of_wrapper),
    "hypergradients": (lambda: ESTIMATORS, of_estimator),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_is_the_one_that_was_promised(kind):
    names, of = KINDS[kind]
    found = {name: of(name) for name in sorted(names())}
    assert json.loads(json.dumps(found, default=str)) == KNOWN[kind]
