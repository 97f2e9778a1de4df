"""Federated bilevel algorithms: families in folders, presets, and wrappers.

Every public module of a family is a method, and so is every entry of `presets.py`. This
package exports the parts that a new method is made of: the contract, the loop of local
steps, and the parts that methods share. Methods are also attributes of this package,
loaded when they are asked for.
"""

import ast
import importlib
import sys
from dataclasses import Field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedbilevel import _registry
from fedbilevel._registry import ALGORITHMS
from fedbilevel._registry import identity as identity
from fedbilevel._registry import is_file as is_file
from fedbilevel._registry import label as label
from fedbilevel._types import Key as Key
from fedbilevel._types import Lower as Lower
from fedbilevel._types import Number as Number
from fedbilevel._types import Pair as Pair
from fedbilevel._types import Triple as Triple
from fedbilevel._types import Upper as Upper
from fedbilevel.algorithms.base import AbstractAlgorithm as AbstractAlgorithm
from fedbilevel.algorithms.base import Each as Each
from fedbilevel.algorithms.base import Gathered as Gathered
from fedbilevel.algorithms.base import Phase as Phase
from fedbilevel.algorithms.base import Phases as Phases
from fedbilevel.algorithms.base import Pointed as Pointed
from fedbilevel.algorithms.base import Repeat as Repeat
from fedbilevel.algorithms.base import SeesTurn as SeesTurn
from fedbilevel.algorithms.base import ServerTurn as ServerTurn
from fedbilevel.algorithms.base import Turn as Turn
from fedbilevel.algorithms.base import declared
from fedbilevel.algorithms.base import every_phase as every_phase
from fedbilevel.algorithms.base import with_turn as with_turn
from fedbilevel.algorithms.directions import both_samples as both_samples
from fedbilevel.algorithms.directions import (
    hypergradient_and_slope as hypergradient_and_slope,
)
from fedbilevel.algorithms.directions import lower_slope as lower_slope
from fedbilevel.algorithms.directions import three_directions as three_directions
from fedbilevel.algorithms.directions import with_z as with_z
from fedbilevel.algorithms.one_loop import OneLoop as OneLoop
from fedbilevel.algorithms.parts import Iterate as Iterate
from fedbilevel.algorithms.parts import Memory as Memory
from fedbilevel.algorithms.parts import Part as Part
from fedbilevel.algorithms.parts import at_time as at_time
from fedbilevel.algorithms.parts import averaged as averaged
from fedbilevel.algorithms.parts import evaluate as evaluate
from fedbilevel.algorithms.parts import local_steps as local_steps
from fedbilevel.algorithms.parts import momentum_weight as momentum_weight
from fedbilevel.algorithms.parts import move as move
from fedbilevel.algorithms.parts import no_memory as no_memory
from fedbilevel.algorithms.parts import only as only
from fedbilevel.algorithms.parts import previous_point as previous_point
from fedbilevel.algorithms.preset import Preset as Preset
from fedbilevel.algorithms.wrappers import LocalOptimizer as LocalOptimizer
from fedbilevel.algorithms.wrappers import QuantileClip as QuantileClip
from fedbilevel.algorithms.wrappers import ServerOptimizer as ServerOptimizer
from fedbilevel.algorithms.wrappers import SteadySteps as SteadySteps
from fedbilevel.algorithms.wrappers import options_for
from fedbilevel.algorithms.wrappers import quantile_clipped as quantile_clipped
from fedbilevel.algorithms.wrappers import read_wrapper as read_wrapper
from fedbilevel.algorithms.wrappers import steadied as steadied
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import AbstractHypergradient


class Entry(NamedTuple):
    """An algorithm by its name: a class, or a preset of one.

    `make(**parameters)` builds it; `parameters` are its fields, and the options of
    wrappers, by the names of its paper. With `pools` it runs on the rows of all
    clients, as those of one machine. `rule` builds its hypergradient estimator from Q
    and theta. `family` is the folder of its method, `about` its equations.
    """

    name: str
    make: Any
    kind: type[AbstractAlgorithm]
    summary: str
    answers: str
    reference: str
    provenance: str
    parameters: dict[str, Field]
    pools: bool
    rule: type[AbstractHypergradient]
    family: str
    about: str


names, installed = ALGORITHMS.names, ALGORITHMS.installed


def as_name(given: Any) -> str:
    """Return the name of an algorithm that is given by its name or as a class."""
    if isinstance(given, Preset):
        return given.name
    return ALGORITHMS.name_of(given)


def find(name: str) -> Entry:
    """Return an algorithm by its name, or by `path/to/file.py:Name`."""
    found = ALGORITHMS.entry(name)
    if isinstance(found, ModuleType):
        (public,) = found.__all__
        return entry_of(name, getattr(found, public))
    is_method = isinstance(found, type) and issubclass(found, AbstractAlgorithm)
    if not (is_method or isinstance(found, Preset)):
        raise InvalidInputError(
            f"algorithm '{label(name)}' is neither a subclass of "
            "`fedbilevel.algorithms.AbstractAlgorithm` nor a `Preset` of one."
        )
    return entry_of(_registry.short(name), found)


def entry_of(name: str, found: Any) -> Entry:
    """Return the entry of a class, or of a preset."""
    if isinstance(found, Preset):
        kind, about, summary = found.kind, found.about, found.summary
        own = found.parameters
    else:
        kind, about = found, sys.modules[found.__module__].__doc__ or ""
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        own = declared(kind) | options_for(kind)
    family = kind.__module__.removeprefix(f"{__name__}.").partition(".")[0]
    stated = (summary, found.answers, found.reference, found.provenance)
    return Entry(
        name, found, kind, *stated, own, found.pools, found.rule, family, about
    )


@cache
def _places() -> dict[str, str]:
    """Return the module of every method, by the name of its class or preset."""
    folder, found = Path(__file__).parent, {}
    for path in _registry.method_files(folder):
        inside = path.relative_to(folder).with_suffix("")
        module = ".".join((__name__, *inside.parts))
        for line in ast.parse(path.read_text(encoding="utf-8")).body:
            match line:
                case ast.Assign([ast.Name("__all__")], value):
                    found |= dict.fromkeys(ast.literal_eval(value), module)
                case ast.Assign([ast.Name(preset)], ast.Call()):
                    found[preset] = module
    return found


# Former names that user methods may import, replaced by wrappers.
_REPLACED = {
    **dict.fromkeys(
        ("DRIFT", "Correction", "corrected_rounds", "first_control", "own_control"),
        "derive the method from `OneLoop`, and correct it by `wrappers.controls` or "
        "`wrappers.anchor`",
    ),
    "in_ball": "derive the method from `OneLoop`, and bound z by `wrappers.ball`",
    **dict.fromkeys(
        ("check_counts", "check_words"),
        "declare numbers and words by `schedules.count` and `schedules.word`, which "
        "check them",
    ),
    "first_batch": "derive the method from `OneLoop`, and use `wrappers.first_batch`",
}


def __getattr__(name: str) -> Any:
    if name in _REPLACED:
        raise AttributeError(f"`{name}` is gone from '{__name__}': {_REPLACED[name]}.")
    if name.startswith("_") or name not in _places():
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_places()[name]), name)
