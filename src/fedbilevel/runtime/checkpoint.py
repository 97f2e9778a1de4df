"""Checkpoints: one file, written atomically, without pickle, bit for bit.

A checkpoint holds the states of server and clients, the measured columns, the round,
and the fingerprint of the job, so that it is never continued under another one.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from fedbilevel import _tree
from fedbilevel._files import DAMAGED, read_arrays, write_arrays
from fedbilevel._folders import CHECKPOINT
from fedbilevel.errors import CheckpointError
from fedbilevel.problem.stored_rows import sources
from fedbilevel.runtime.job import Job
from fedbilevel.startup.identity import description

_FORMAT = 6
_ROOM = 2**28  # bytes of all but the state: a million rounds of thirty columns


class Snapshot(eqx.Module):
    """A run after `round` rounds."""

    state: PyTree
    columns: dict[str, np.ndarray]
    round: int
    seconds: dict[str, float]


def fingerprint(job: Job, every: int, more: PyTree = None) -> str:
    """Return a digest of all that decides a trajectory, the data included.

    `more` are arrays that do, too: what differs between the runs of a sweep.
    """
    digest = hashlib.sha256()
    arrays, static = eqx.partition((job, more), eqx.is_array)
    names = _tree.leaf_names(arrays)
    for name, leaf in zip(names, jax.tree.leaves(arrays), strict=True):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        value = np.asarray(jr.key_data(leaf) if is_key else leaf)
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        # As bytes: bfloat16 has no buffer of its own.
        digest.update(value.tobytes())
    rest = (
        job.algorithm.title,
        job.algorithm.parameters(),
        description(jax.tree.leaves(static)),
        description(job.problem.functions()),
        description(job.channel),
        (job.clients, job.participants, job.upper_batch, job.lower_batch, every),
        jax.tree.leaves(job.private),
        sources((job.data.upper, job.data.lower)),
    )
    digest.update(json.dumps(rest, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def save(folder: Path, snapshot: Snapshot, fingerprint: str) -> Path:
    """Replace the checkpoint in `folder` by this one."""
    names, leaves = _tree.leaf_names(snapshot.state), jax.tree.leaves(snapshot.state)
    named = zip(names, leaves, strict=True)
    arrays = {f"state/{name}": np.asarray(leaf) for name, leaf in named}
    arrays |= {f"column/{name}": value for name, value in snapshot.columns.items()}
    about = {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "round": snapshot.round,
        "seconds": snapshot.seconds,
    }
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    write_arrays(folder / CHECKPOINT, arrays)
    return folder / CHECKPOINT


def load(folder: Path, like: PyTree, fingerprint: str) -> Snapshot | None:
    """Return the checkpoint in `folder`, its state like `like`, or None."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    with _reading(path):
        arrays = read_arrays(path, _most(jax.tree.leaves(like)))
        about = dict(json.loads(arrays.pop("about").tobytes()))
    if about.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {about.get('format')}, this version reads {_FORMAT}. "
            "Finish the run with the version of fedbilevel that began it, or start it "
            "again in a new folder."
        )
    if about.get("fingerprint") != fingerprint:
        raise CheckpointError(
            f"{path} belongs to another configuration (algorithm, parameters, data, "
            "start, batch, cohort, channel or random seed differ). Continue it with "
            "the settings it was made with, or choose a new folder."
        )
    with _reading(path):
        return _snapshot(arrays, about, like)


def _most(leaves: list[Any]) -> int | None:
    """Return the most bytes of a checkpoint; records that grow have no such number."""
    if not all(leaf.size for leaf in leaves):
        return None
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + _ROOM


def _snapshot(
    arrays: dict[str, np.ndarray], about: dict[str, Any], like: PyTree
) -> Snapshot:
    leaves = []
    named = zip(_tree.leaf_names(like), jax.tree.leaves(like), strict=True)
    for name, leaf in named:
        held = arrays[f"state/{name}"]
        # A record that is empty at the start grows along its first axis.
        grows = leaf.ndim > 0 and leaf.shape[0] == 0
        if held.shape[grows:] != leaf.shape[grows:] or held.ndim != leaf.ndim:
            raise ValueError(f"{name} has the shape {held.shape}, not {leaf.shape}")
        if held.dtype.kind not in (np.dtype(leaf.dtype).kind, "V"):  # V: bfloat16
            raise ValueError(f"{name} holds {held.dtype}, not {leaf.dtype}")
        leaves.append(held.astype(leaf.dtype, copy=False))
    columns = {
        name.removeprefix("column/"): value
        for name, value in arrays.items()
        if name.startswith("column/")
    }
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    seconds = {str(name): float(value) for name, value in about["seconds"].items()}
    return Snapshot(state, columns, int(about["round"]), seconds)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in whatever damaged content makes libraries raise."""
    try:
        yield
    except DAMAGED as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({error}). It is damaged or not "
            "one of ours."
        ) from error
