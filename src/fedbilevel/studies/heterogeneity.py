"""Warns where clients differ too much for what an algorithm does."""

import warnings
from collections.abc import Sequence

import jax
import numpy as np

from fedbilevel import algorithms
from fedbilevel._blocks import is_any
from fedbilevel.algorithms import AbstractAlgorithm
from fedbilevel.channels import GeometricMedian, Mean
from fedbilevel.errors import HeterogeneityWarning
from fedbilevel.hypergradient import local_inverse_bias
from fedbilevel.problem import PooledData
from fedbilevel.problem.stored_rows import sources
from fedbilevel.runtime import Job

_TOLERATED_BIAS = 0.1  # of the hypergradient; noise of a sample is mostly larger
_TOLERATED_WEIGHT = 1.1  # of the largest in the smallest
_SHOWN = 8  # names of clients in a sentence
_SOON = 10**8  # rows times parameters: some two hundred passes take seconds


def warn_where_clients_differ(job: Job, name: str, clients: Sequence[str] = ()) -> None:
    """Warn where averaging the clients' own inverse Hessians leads elsewhere.

    `name` is what the algorithm is called where the warning is read, `clients` what the
    clients are. A lower level that curves downwards near the start has no inverse to
    compare, and no warning.
    """
    data = job.data
    # Every row is read many times: too slow where rows are left in a file.
    unseen = is_any(job.private) or sources((data.upper, data.lower))
    if not job.algorithm.inverts_locally or unseen or data.clients == 1:
        return
    if isinstance(data, PooledData):
        return
    bias = float(local_inverse_bias(job.problem, data, job.x, job.y))
    if not bias > _TOLERATED_BIAS:  # NaN, from a lower level without an inverse, is not
        return
    shared = AbstractAlgorithm.answers
    unbiased = [
        entry.name
        for entry in map(algorithms.find, algorithms.names())
        if entry.answers == shared and not entry.kind.inverts_locally
    ]
    warnings.warn(
        f"{name} inverts each client's own Hessian, but the data of "
        f"{_listed(clients)} differ: near the start the averaged hypergradient is "
        f"{bias:.0%} off the true one, so the limit will be off, too. Compare with one "
        f"that has no such bias: {', '.join(unbiased)}.",
        HeterogeneityWarning,
        stacklevel=3,
    )


def warn_where_weights_are_lost(job: Job, name: str) -> None:
    """Warn where clients are given unlike weights, and a run does not keep to them."""
    chances = np.ones(1) if job.chances is None else np.asarray(job.chances)
    if chances.min() < chances.max():
        warnings.warn(
            f"clients reply with chances of {chances.min():g} to {chances.max():g}: "
            "those that reply seldom count less, and the limit will be off.",
            HeterogeneityWarning,
            stacklevel=3,
        )
    weights = np.asarray(job.data.weights)
    if weights.max() <= _TOLERATED_WEIGHT * weights.min():
        return
    reduction = job.channel.reduction
    if not isinstance(reduction, Mean | GeometricMedian):
        why = f"`{type(reduction).__name__}` takes each for one"
    elif job.algorithm.counts_clients:
        why = f"{name} takes every client in turn, whatever it counts"
    elif job.participants < job.clients:
        why = (
            f"{job.participants} of {job.clients} clients are drawn with equal chances "
            "and count by weight among themselves only"
        )
    else:
        return
    warnings.warn(
        f"clients count {weights.min():g} to {weights.max():g}, but {why}: the limit "
        "will be off. Choose an algorithm or participants without that, or --weights "
        "equal.",
        HeterogeneityWarning,
        stacklevel=3,
    )


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many there are beyond."""
    if not names:
        return "these clients"
    shown, more = names[:_SHOWN], len(names) - _SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def is_soon_measured(job: Job) -> bool:
    """Say whether the problem is small enough for a quick measurement."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves((job.x, job.y)))
    rows = int(job.data.upper_sizes.sum()) + int(job.data.lower_sizes.sum())
    return rows * parameters <= _SOON
