"""Traced programs on disk: a command that ran before need not trace again.

JAX keeps compiled programs, but finds them by the traced one, and to trace takes as
long as all else of a short command. So what JAX exports of a program is kept under a
name, which is a digest of all that decides it: the source of this package, versions,
settings and devices, everything in the job that is no array, and the shapes of those
that are. A job with any part of another kind, such as a loss that a user wrote, has no
name and is traced as ever. So is everything outside of our own commands, on GPUs, and
in several processes.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _own_process, _tree
from fedbilevel._files import write_atomically
from fedbilevel.runtime.configuration import cache_folder
from fedbilevel.runtime.identity import UnnamedError, told_exactly

__all__ = ["Stored", "as_lists", "from_lists", "name_of", "read", "write"]

_FORMAT = 1
_MOST = 512  # files, of some 100 KB each; those of older sources are never read again


@dataclass(frozen=True)
class Stored:
    """What is kept under a name: bytes, and some numbers about them."""

    content: bytes
    about: dict[str, Any]


def name_of(*parts: PyTree) -> str | None:
    """Return the name of what is made of these parts and of the shapes of their arrays.

    There is none if they do not decide it for certain.
    """
    began = _own_process.began
    if began is None or not _is_settled(began):
        return None
    arrays, static = eqx.partition(parts, eqx.is_array)
    try:
        rest = told_exactly(static)
    except UnnamedError:
        return None
    shapes = [repr(jax.typeof(leaf)) for leaf in jax.tree.leaves(arrays)]
    text = json.dumps([rest, _tree.leaf_names(arrays), shapes, _surroundings()])
    return hashlib.sha256(text.encode()).hexdigest()


def read(name: str) -> Stored | None:
    """Return what is kept under a name, if it is whole."""
    try:
        with (_folder() / name).open("rb") as file:
            head, content = json.loads(file.readline()), file.read()
        kept = Stored(content, head["about"])
        sound = head["format"] == _FORMAT and head["digest"] == _digest(kept)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if sound else None


def write(name: str, content: bytes, **about: Any) -> None:
    """Keep something under a name, where there is room."""
    digest = _digest(Stored(content, about))
    head = {"format": _FORMAT, "digest": digest, "about": about}
    line = json.dumps(head).encode() + b"\n"
    # A folder that cannot be written costs time, not a run.
    with contextlib.suppress(OSError):
        write_atomically(_folder() / name, lambda file: file.write(line + content))
        kept = sorted(_folder().iterdir(), key=lambda file: file.stat().st_mtime)
        for old in kept[:-_MOST]:
            old.unlink(missing_ok=True)


def as_lists(tree: PyTree) -> PyTree:
    """Replace every module by the list of its leaves: JAX can store those."""

    def flat(part: Any) -> Any:
        return jax.tree.leaves(part) if _is_module(part) else part

    return jax.tree.map(flat, tree, is_leaf=_is_module)


def from_lists(tree: PyTree, like: PyTree) -> PyTree:
    """Put modules in the places that they have in `like`, with the leaves of `tree`."""

    def whole(kind: Any, part: Any) -> Any:
        if not _is_module(kind):
            return part
        return jax.tree.unflatten(jax.tree.structure(kind), part)

    return jax.tree.map(whole, like, tree, is_leaf=_is_module)


def _is_module(part: Any) -> bool:
    return isinstance(part, eqx.Module)


def _folder() -> Path:
    return cache_folder().parent / "traced"


def _digest(kept: Stored) -> str:
    about = json.dumps(kept.about, sort_keys=True).encode()
    return hashlib.sha256(about + kept.content).hexdigest()


@functools.cache
def _is_settled(began: float) -> bool:
    """Say whether the files tell what a process runs that began then.

    Source that has changed since may have been read before or after.
    """
    return (
        jax.default_backend() == "cpu"  # what JAX cannot export is on GPUs
        and jax.process_count() == 1
        and importlib.util.find_spec("flatbuffers") is not None  # which JAX exports by
        and all(file.stat().st_mtime < began for file in _source())
    )


def _source() -> list[Path]:
    return sorted(Path(_own_process.__file__).parent.rglob("*.py"))


@functools.cache
def _surroundings() -> list[Any]:
    """Return what else decides a program, by its text."""
    source = hashlib.sha256()
    for file in _source():
        source.update(file.read_bytes())
    optax = sys.modules.get("optax")
    libraries = [jax, jax.lib, eqx, np, *([] if optax is None else [optax])]
    versions = [one.__version__ for one in libraries]
    devices = [f"{one.platform} {one.device_kind}" for one in jax.devices()]
    settings = sorted(jax.config.values.items())
    return [source.hexdigest(), sys.version, versions, devices, repr(settings)]
