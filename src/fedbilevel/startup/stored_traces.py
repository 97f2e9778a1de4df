"""Traced programs on disk: a command that ran before need not trace again.

JAX keeps compiled programs, but finds them by the traced one, and to trace takes as
long as all else of a short command. So what JAX exports of a program is kept under a
name, which is a digest of all that decides it: the source of this package, versions,
settings and devices, everything in the job that is no array, and the shapes of those
that are. A job with any part of another kind, such as a loss that a user wrote, has no
name and is traced as ever. So is everything outside of our own commands, on GPUs, and
in several processes.

It gains 30 % of a start with compiled programs: one round of `regularization` takes 4.3
processor seconds, and 6.2 without. To count exchanges again (`runtime.counts`) is 0.4.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.export
import numpy as np
from jax.export import Exported
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel._files import write_atomically
from fedbilevel.startup import own_process
from fedbilevel.startup.identity import UnnamedError, exact_description
from fedbilevel.startup.own_cache import cache_folder

_KIND = "traced"
_MOST = 512  # files, of some 100 KB each; those of older sources are never read again


def name_of(*parts: PyTree) -> str | None:
    """Return the name of what is made of these parts and of the shapes of their arrays.

    There is none if they do not decide it for certain.
    """
    began = own_process.began
    if began is None or not _is_settled(began):
        return None
    arrays, static = eqx.partition(parts, eqx.is_array)
    try:
        rest = exact_description(static)
    except UnnamedError:
        return None
    shapes = [repr(jax.typeof(leaf)) for leaf in jax.tree.leaves(arrays)]
    text = json.dumps([rest, _tree.leaf_names(arrays), shapes, _surroundings()])
    return hashlib.sha256(text.encode()).hexdigest()


def read(name: str) -> bytes | None:
    """Return what is kept under a name, if it is whole and this user's."""
    folder = cache_folder(_KIND)
    if folder is None:
        return None
    try:
        with (folder / name).open("rb") as file:
            head, content = file.readline(), file.read()
    except OSError:
        return None
    return content if head == _head(content) else None


def write(name: str, content: bytes) -> None:
    """Keep bytes under a name, if disk space allows."""
    folder = cache_folder(_KIND)
    if folder is None:
        return
    # A folder that cannot be written costs time, not a run.
    with contextlib.suppress(OSError):
        whole = _head(content) + content
        write_atomically(folder / name, lambda file: file.write(whole))
        kept = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for old in kept[:-_MOST]:
            old.unlink(missing_ok=True)


def kept(name: str | None, make: Callable[[], bytes]) -> bytes:
    """Return what is kept under a name, or make and keep it; without one, make it."""
    found = None if name is None else read(name)
    if found is None:
        found = make()
        if name is not None:
            write(name, found)
    return found


def exported(function: Callable, name: str, arrays: tuple) -> Exported:
    """Return a traced program of lists, from disk if it is there."""
    stored = read(name)
    if stored is not None:
        return jax.export.deserialize(bytearray(stored))

    def on_lists(*inputs: Any) -> Any:
        return as_lists(function(*from_lists(inputs, arrays)))

    made = jax.export.export(jax.jit(on_lists))(*as_lists(arrays))
    write(name, bytes(made.serialize()))
    return made


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


def _head(content: bytes) -> bytes:
    return f"traced {hashlib.sha256(content).hexdigest()}\n".encode()


@functools.cache
def _is_settled(began: float) -> bool:
    """Say whether the files are what a process runs that began then.

    Source that has changed since may have been read before or after.
    """
    return (
        jax.default_backend() == "cpu"  # what JAX cannot export is on GPUs
        and jax.process_count() == 1
        and importlib.util.find_spec("flatbuffers") is not None  # which JAX exports by
        and all(file.stat().st_mtime < began for file in _source())
    )


def _source() -> list[Path]:
    return sorted(Path(__file__).parents[1].rglob("*.py"))


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
