"""Federated bilevel algorithms, one module each. The folder is the registry.

Whoever writes one finds here what it is made of: the contract, and the parts that
methods of one loop share.
"""

import sys
from dataclasses import fields
from types import ModuleType
from typing import Any, NamedTuple

from fedbilevel import _registry
from fedbilevel._registry import identity as identity
from fedbilevel._registry import is_file as is_file
from fedbilevel._registry import label as label
from fedbilevel._types import Key as Key
from fedbilevel._types import Lower as Lower
from fedbilevel._types import Number as Number
from fedbilevel._types import Pair as Pair
from fedbilevel._types import Triple as Triple
from fedbilevel._types import Upper as Upper
from fedbilevel.algorithms._auxiliary import in_ball as in_ball
from fedbilevel.algorithms._auxiliary import three_directions as three_directions
from fedbilevel.algorithms._base import AbstractAlgorithm as AbstractAlgorithm
from fedbilevel.algorithms._base import Each as Each
from fedbilevel.algorithms._base import Gathered as Gathered
from fedbilevel.algorithms._base import Phase as Phase
from fedbilevel.algorithms._base import Phases as Phases
from fedbilevel.algorithms._base import Repeat as Repeat
from fedbilevel.algorithms._base import SeesTurn as SeesTurn
from fedbilevel.algorithms._base import ServerTurn as ServerTurn
from fedbilevel.algorithms._base import Turn as Turn
from fedbilevel.algorithms._base import every_phase as every_phase
from fedbilevel.algorithms._base import with_turn as with_turn
from fedbilevel.algorithms._clipping import QuantileClip as QuantileClip
from fedbilevel.algorithms._clipping import quantile_clipped as quantile_clipped
from fedbilevel.algorithms._drift import DRIFT as DRIFT
from fedbilevel.algorithms._drift import Correction as Correction
from fedbilevel.algorithms._drift import corrected_rounds as corrected_rounds
from fedbilevel.algorithms._drift import first_control as first_control
from fedbilevel.algorithms._drift import own_control as own_control
from fedbilevel.algorithms._local import Iterate as Iterate
from fedbilevel.algorithms._local import Memory as Memory
from fedbilevel.algorithms._local import at_time as at_time
from fedbilevel.algorithms._local import averaged as averaged
from fedbilevel.algorithms._local import check_counts as check_counts
from fedbilevel.algorithms._local import check_words as check_words
from fedbilevel.algorithms._local import evaluate as evaluate
from fedbilevel.algorithms._local import first_batch as first_batch
from fedbilevel.algorithms._local import (
    hypergradient_and_slope as hypergradient_and_slope,
)
from fedbilevel.algorithms._local import local_steps as local_steps
from fedbilevel.algorithms._local import momentum_weight as momentum_weight
from fedbilevel.algorithms._local import move as move
from fedbilevel.algorithms._local import no_memory as no_memory
from fedbilevel.algorithms._local import previous_point as previous_point
from fedbilevel.algorithms._preset import Preset as Preset
from fedbilevel.algorithms._steady import SteadySteps as SteadySteps
from fedbilevel.algorithms._steady import steadied as steadied
from fedbilevel.errors import InvalidInputError
from fedbilevel.hypergradient import AbstractHypergradient


class Entry(NamedTuple):
    """An algorithm by its name: a class, or a preset of one.

    `make(**fields)` builds it; `letters` are its parameters by the names of its paper,
    with the field of `kind` that each one sets. With `pools` it runs on the rows of all
    clients, as those of one machine. `rule` is its hypergradient made of Q and theta.
    """

    name: str
    make: Any
    kind: type[AbstractAlgorithm]
    summary: str
    answers: str
    reference: str
    provenance: str
    letters: dict[str, str]
    pools: bool = False
    rule: type[AbstractHypergradient] = AbstractAlgorithm.rule


def names() -> list[str]:
    """List the algorithms, as the command line spells them."""
    return _registry.names(sys.modules[__name__])


def installed() -> list[str]:
    """List the algorithms that other installed packages add."""
    return _registry.installed(sys.modules[__name__])


def as_name(given: Any) -> str:
    """Return the name of an algorithm that is given by its name or as a class."""
    return _registry.resolved(sys.modules[__name__], given, "algorithm")


def find(name: str) -> Entry:
    """Return an algorithm by its name; `path/to/file.py:Name` is one of a file."""
    found = _registry.entry(sys.modules[__name__], name, "algorithm")
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
    kind = found.kind if isinstance(found, Preset) else found
    letters = {field.name: field.name for field in fields(kind)}
    told = (found.answers, found.reference, found.provenance)
    if not isinstance(found, Preset):
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        return Entry(name, kind, kind, summary, *told, letters, kind.pools, kind.rule)
    own = {n: f for n, f in letters.items() if f not in found.parts}
    if found.letters:
        renamed = set(found.letters.values())
        own = {**found.letters, **{n: f for n, f in own.items() if f not in renamed}}
    return Entry(name, found, kind, found.summary, *told, own, found.pools, found.rule)
