"""The server's job: the algorithm and the start, with stand-ins for what sites hold.

Shapes of replies and what a run costs follow from x, y and the algorithm alone. So the
server traces them with a problem of its own, and needs no row of anybody.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from fedbilevel import _tree
from fedbilevel._blocks import NOTHING
from fedbilevel._types import Key, Lower, Pair, Rows, Upper
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.channels import PLAIN, Channel
from fedbilevel.federation.wire import spec_of
from fedbilevel.problem import ClientData, Problem
from fedbilevel.runtime import Job, Sampling


def _stand_in(x: Upper, y: Lower, row: Rows) -> Array:
    # Curves hardly, so that no check of step sizes is about it; couples x and y, so
    # that all derivatives are there.
    square = _tree.dot(y, y)
    coupling = sum(jnp.sum(leaf).astype(square.dtype) for leaf in jax.tree.leaves(x))
    return 1e-6 * jnp.mean(row).astype(square.dtype) * (1 + coupling) * square


def blind_job(
    algorithm: AbstractAlgorithm,
    start: tuple[Upper, Lower],
    clients: int,
    key: Key,
    *,
    sampling: Sampling,
    private: Pair = NOTHING,
    separate: bool = False,
    channel: Channel = PLAIN,
    weights: Sequence[float] | None = None,
) -> Job:
    """Return a job that knows shapes, keys and costs, but no client's rows."""
    row = [np.ones((1, 1), np.float32)] * clients
    job = Job.of(
        algorithm,
        Problem(_stand_in, _stand_in, private=private, separate=separate),
        ClientData.from_clients(row, row, weights),
        *start,
        sampling=sampling,
        channel=channel,
    )
    return replace(job, key=key)


def settings_fingerprint(settings: Mapping[str, Any]) -> str:
    """Return a digest of the settings that both sides were started with."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def algorithm_fingerprint(job: Job) -> str:
    """Return a digest of what decides a trajectory, except for rows and losses."""
    parts = (
        job.algorithm.title,
        job.algorithm.parameters(),
        np.asarray(jr.key_data(job.key)).tolist(),
        spec_of((job.x, job.y)),
        [bool(flag) for flag in jax.tree.leaves(job.private)],
        (job.clients, job.upper_batch, job.lower_batch, job.participants),
        job.channel.describe(),
    )
    return settings_fingerprint({"parts": parts})
