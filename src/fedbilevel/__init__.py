"""Federated bilevel optimization on JAX.

min_x  1/K sum_k f_k(x, y*(x))     with   y*(x) = argmin_y 1/K sum_k g_k(x, y)

All public names are listed in `__init__.pyi`, with their modules. They are loaded on
first use: importing JAX takes seconds, and `--help` does not need it.
"""

import ast as _ast
import functools as _functools
import importlib as _importlib
import pkgutil as _pkgutil
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.2.0"


@_functools.cache
def _places() -> dict[str, str]:
    """Return the module of every public name."""
    listed = _ast.parse(_Path(__file__).with_suffix(".pyi").read_text())
    return {
        name.name: str(line.module)
        for line in listed.body
        if isinstance(line, _ast.ImportFrom) and line.module != __name__
        for name in line.names
    }


def __getattr__(name: str) -> _Any:
    # A package that is a public name, too, is itself: `hypergradient` can be called.
    if any(module.name == name for module in _pkgutil.iter_modules(__path__)):
        return _importlib.import_module(f"{__name__}.{name}")
    if name not in _places():
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    found = getattr(_importlib.import_module(_places()[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({"__version__", "algorithms", *_places()})
