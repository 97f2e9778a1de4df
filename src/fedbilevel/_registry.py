"""A folder is a registry: every public module of a package is one entry."""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from fedbilevel.errors import unknown_name


def names(package: ModuleType) -> list[str]:
    """List the entries of a package, as the command line spells them."""
    return _listed(list(package.__path__))


def names_of(package: str) -> list[str]:
    """List the entries of one of our packages by its name, without importing it."""
    return _listed([str(Path(__file__).parent / package)])


def _listed(folders: list[str]) -> list[str]:
    modules = pkgutil.iter_modules(folders)
    return sorted(
        module.name.replace("_", "-")
        for module in modules
        if not module.name.startswith("_")
    )


def entry(package: ModuleType, name: str, kind: str) -> ModuleType:
    """Import the module of an entry, or raise with the nearest name."""
    if name not in names(package):
        raise unknown_name(kind, name, names(package))
    return importlib.import_module(f"{package.__name__}.{name.replace('-', '_')}")
