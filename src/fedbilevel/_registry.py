"""Finds tasks and algorithms by name: ours, those of installed packages, own files.

A folder is a registry: every public module of a package, or of a folder inside of it,
is one entry, and so is every preset of its `presets.py`. An installed package adds
entries by an entry point (`fedbilevel.tasks`, `fedbilevel.algorithms`). A file of one's
own is named by its path: `path/to/file.py:name`. The file runs only if the user typed
its path: `is_file` lets others refuse one that comes from elsewhere, and `asking` has
somebody asked before any of them runs.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedbilevel.errors import FedbilevelError, InvalidInputError, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")
_PRESETS, _WRAPPERS = "presets.py", "wrappers"
_LARGEST = 2**24  # bytes of a source file
_loaded: dict[tuple[str, str], ModuleType] = {}
_given: dict[str, Any] = {}  # objects of this process, by the name they were given
Agrees = Callable[[str, str], None]  # raises unless what is so named may run; its kind
_agrees: Agrees | None = None  # a Python program names its files itself


@dataclass(frozen=True)
class Registry:
    """The entries of one of our `packages`, each of a `kind`; none is imported here."""

    package: str
    kind: str

    @property
    def _ours(self) -> dict[str, str]:
        return _listed(Path(__file__).parent / self.package.rpartition(".")[2])

    def names(self) -> list[str]:
        """List our own entries, as the command line spells them."""
        return sorted(self._ours)

    def installed(self) -> list[str]:
        """List what other installed packages add, but for names that are ours."""
        return sorted(_points(self.package).keys() - self._ours.keys())

    def known(self) -> list[str]:
        """List all that is found by its name."""
        return sorted([*self.names(), *self.installed()])

    def require_agreement(self, name: str) -> None:
        """Raise unless code that a folder names may run; ours may, no other unasked."""
        if _agrees is not None and name not in self._ours:
            _agrees(whole(name), self.kind)

    def entry(self, name: str) -> Any:
        """Return a module of ours, or what a package or a file holds under a name."""
        if name in _given:
            return _given[name]
        if is_file(name):
            path, attribute = _parts(name, self.kind)
            self.require_agreement(name)
            module = _module_at(path, self.kind)
            if not hasattr(module, attribute):
                known = [one for one in vars(module) if not one.startswith("_")]
                raise unknown_name(f"{self.kind} of {path}", attribute, known)
            return getattr(module, attribute)
        if name in self._ours:
            module, _, variable = self._ours[name].partition(":")
            found = importlib.import_module(f"{self.package}.{module}")
            return getattr(found, variable) if variable else found
        if name in self.installed():
            return _from_package(_points(self.package)[name], self.kind)
        raise unknown_name(self.kind, name, self.known())

    def name_of(self, given: Any) -> str:
        """Return the name of an object, or a name as it holds in any folder."""
        if isinstance(given, str):
            return whole(given)
        name = getattr(given, "__name__", "")
        module = sys.modules.get(getattr(given, "__module__", ""))
        if module is None or getattr(module, name, None) is not given:
            raise InvalidInputError(
                f"{self.kind} {given!r:.80}: give a name, or a function or class at "
                "the top level of a file, so that a run can be continued. For objects "
                "of any kind there are `fedbilevel.run`, `compare` and `tune`."
            )
        inside = module.__name__.removeprefix(f"{self.package}.")
        ours = {place: one for one, place in self._ours.items()}
        if inside in ours:
            return ours[inside]
        source = inspect.getsourcefile(given) if callable(given) else None
        if source is None or not Path(source).is_file():
            raise InvalidInputError(
                f"{self.kind} '{name}' is in no file, so that a run could not be "
                "continued. Put it into one."
            )
        text = f"{Path(source).resolve()}:{name}"
        _given[text] = given
        return text


TASKS = Registry("fedbilevel.tasks", "task")
ALGORITHMS = Registry("fedbilevel.algorithms", "algorithm")


def method_files(folder: Path) -> list[Path]:
    """Return the files of a package that hold entries: those of families, if any."""
    inside = sorted(folder.glob("[a-z]*/[a-z]*.py"))
    public = [one for one in inside if one.parent.name != _WRAPPERS]
    presets = folder / _PRESETS
    return [*public, presets] if presets.is_file() else sorted(folder.glob("[a-z]*.py"))


@cache
def _listed(folder: Path) -> dict[str, str]:
    """Return the module of every entry, or the variable of a preset after a colon."""
    found = {}
    for path in method_files(folder):
        if path.name != _PRESETS:
            inside = path.relative_to(folder).with_suffix("")
            found[path.stem.replace("_", "-")] = ".".join(inside.parts)
            continue
        for line in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call):
                target: Any = line.targets[0]
                name = ast.literal_eval(line.value.args[0])
                found[name] = f"{path.stem}:{target.id}"
    return found


@cache
def _points(group: str) -> dict[str, "EntryPoint"]:
    from importlib import metadata  # slow, and no help needs it

    return {point.name: point for point in metadata.entry_points(group=group)}


def is_file(name: str) -> bool:
    """Say whether a name stands for a file, which is run when it is found."""
    return ".py" in name


@contextmanager
def asking(agrees: Agrees) -> Iterator[None]:
    """Have somebody asked before a file of code is run, meanwhile."""
    global _agrees
    before, _agrees = _agrees, agrees
    try:
        yield
    finally:
        _agrees = before


def _parts(name: str, kind: str) -> tuple[Path, str]:
    match = _FILE.fullmatch(name)
    if match is None:
        raise InvalidInputError(
            f"{kind} '{name}': name a file of your own as path/to/file.py:name, with "
            "the function or class that it holds."
        )
    return Path(match["path"]), match["name"]


def _module_at(path: Path, kind: str) -> ModuleType:
    """Run a source file once, as a module."""
    if not path.is_file():
        raise InvalidInputError(f"{kind}: there is no file {path}.")
    place = path.resolve()
    key = (str(place), _digest(place))
    if key in _loaded:
        return _loaded[key]
    called = f"fedbilevel_own_{place.stem}_{key[1][:8]}"
    spec = importlib.util.spec_from_file_location(called, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))  # so that it finds the files beside it
    sys.modules[called] = module
    try:
        spec.loader.exec_module(module)
    except FedbilevelError:
        sys.modules.pop(called)
        raise
    except (Exception, SystemExit) as error:
        sys.modules.pop(called)
        raise InvalidInputError(
            f"{kind}: {path} cannot be run: {error_text(error, place)}."
        ) from error
    _loaded[key] = module
    return module


def error_text(error: BaseException, place: Path) -> str:
    """Say what was raised, and in which line of a file."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(place):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        lines.append(error.lineno)
    where = f" in line {lines[-1]}" if lines else ""
    text = " ".join(str(getattr(error, "msg", error)).split())
    return f"{type(error).__name__}{where}: {text:.300}".rstrip(". ")


def _digest(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        raise InvalidInputError(f"{path} is too large to be a source file.")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _from_package(point: "EntryPoint", kind: str) -> Any:
    try:
        return point.load()
    except FedbilevelError:
        raise
    except Exception as error:
        home = point.dist.name if point.dist else "an installed package"
        raise InvalidInputError(
            f"{kind} '{point.name}' of {home} cannot be loaded: "
            f"{error_text(error, Path())}. Mend or remove that package."
        ) from error


def whole(name: str) -> str:
    """Return a name as it holds in any folder."""
    match = _FILE.fullmatch(name)
    if match is None:
        return name
    return f"{Path(match['path']).expanduser().resolve()}:{match['name']}"


def short(name: str) -> str:
    """Return what a function or class of a file is called, or the name itself."""
    match = _FILE.fullmatch(name)
    return match["name"] if match else name


def label(name: str) -> str:
    """Return a name for people, without the folders of a file."""
    match = _FILE.fullmatch(name)
    return f"{Path(match['path']).name}:{match['name']}" if match else name


def identity(name: str) -> str:
    """Return what is the same on two machines that have the same code.

    Of a file it depends on its content, not on its place.
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return name
    return f"own:{match['name']}:{_digest(_parts(name, 'file')[0])[:32]}"
