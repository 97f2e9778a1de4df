"""Federated bilevel algorithms, one module each. The folder is the registry."""

import sys

from fedbilevel import _registry
from fedbilevel.algorithms._base import AbstractAlgorithm as AbstractAlgorithm
from fedbilevel.algorithms._base import Phase as Phase
from fedbilevel.algorithms._base import Phases as Phases
from fedbilevel.algorithms._base import Repeat as Repeat
from fedbilevel.algorithms._base import Turn as Turn
from fedbilevel.algorithms._base import every_phase as every_phase


def names() -> list[str]:
    """List the algorithms, as the command line spells them."""
    return _registry.names(sys.modules[__name__])


def find(name: str) -> type[AbstractAlgorithm]:
    """Return the class of an algorithm by its name."""
    module = _registry.entry(sys.modules[__name__], name, "algorithm")
    (public,) = module.__all__
    return getattr(module, public)
