"""How a job's programs are best written, from its matrix products and its devices."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import Array, PyTree

from fedbilevel._evaluation import (
    ACCELERATOR,
    PROCESSOR,
    THIN_PRODUCTS,
    WIDE_PRODUCTS,
    Evaluation,
)
from fedbilevel.runtime.job import Job
from fedbilevel.runtime.layout import devices_for
from fedbilevel.runtime.traced_calls import bodies
from fedbilevel.startup import stored_traces
from fedbilevel.startup.stored_traces import name_of

_LARGE_BATCH = 32  # rows from which on it pays to read them once for two points
_THIN = 40  # columns of the weights of two points, side by side
_MANY = 10**6  # numbers of y from which on two points were seen to gain by themselves
# Numbers of x and y from which a CPU, too, takes points by two calls: a loop stacks
# them and what it returns, 8 to 10 % of an exchange of FedNest's network (159,010).
_WIDE = 10**5
_FEW = 10**6  # numbers that all clients multiply in a pass, in kernels that are small


def evaluation(job: Job) -> Evaluation:
    """Return how programs are best written for a job and the devices there are."""
    if jax.default_backend() != "cpu":
        numbers = sum(leaf.size for leaf in jax.tree.leaves(job.y))
        return WIDE_PRODUCTS if numbers >= _MANY else ACCELERATOR
    large = rows_of_sample(job) >= _LARGE_BATCH
    way = THIN_PRODUCTS if large and _is_known_thin(job) else PROCESSOR
    return replace(
        way,
        writes_out_points=not way.stacks_points and _parameters(job) >= _WIDE,
        small_kernels=numbers_of_pass(job) <= _FEW,
        splits_kernels=not _keeps_all_busy(job),
    )


def numbers_of_pass(job: Job) -> int:
    """Return how many numbers a pass of all clients over a batch multiplies."""
    return job.clients * rows_of_sample(job) * _parameters(job)


def _parameters(job: Job) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves((job.x, job.y)))


def rows_of_sample(job: Job) -> int:
    """Return the rows of a lower sample."""
    return job.lower_batch or jax.tree.leaves(job.data.lower)[0].shape[1]


def _keeps_all_busy(job: Job) -> bool:
    """Say whether there are several devices, and all of them work on the clients."""
    shared = job.problem.model_devices
    return shared * devices_for(job.participants, shared) == jax.device_count() > 1


def _is_known_thin(job: Job) -> bool:
    """Say what `_is_thin` says, from disk if an equal job has been looked at."""
    name = name_of(_is_thin, job)
    kept = stored_traces.kept(name, lambda: b"thin" if _is_thin(job) else b"wide")
    return kept == b"thin"


def _is_thin(job: Job) -> bool:
    """Say whether slopes at two points are thin weights times rows that both share."""

    def slopes(*points: PyTree) -> PyTree:
        oracle = job.oracle(0)
        zeta = oracle.draw_lower(job.key)
        return jax.vmap(lambda x, y: oracle.lower_gradient(x, y, zeta))(*points)

    def twice(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype)

    traced = jax.make_jaxpr(slopes)(*jax.tree.map(twice, (job.x, job.y)))
    products = list(_products(traced.jaxpr))
    thin = sum(work for work, is_thin in products if is_thin)
    return 2 * thin > sum(work for work, _ in products)


def _products(jaxpr: Any) -> Iterator[tuple[int, bool]]:
    """Return the multiplications of every product, and whether it is a thin one.

    A product without an axis of its own for the points has rows that they share.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), (batched, _) = equation.params["dimension_numbers"]
            sizes = [value.aval.size for value in equation.invars]
            shape = equation.invars[0].aval.shape
            length = math.prod(shape[axis] for axis in contracted)
            narrow = min(size // max(length, 1) for size in sizes) <= _THIN
            yield equation.outvars[0].aval.size * length, narrow and not batched
        for body in bodies(equation.params):
            yield from _products(body)
