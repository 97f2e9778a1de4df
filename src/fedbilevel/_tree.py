"""Arithmetic on pytrees. Scalars take the type of the leaf they meet."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, PyTree

from fedbilevel._types import Key, Scalar

_SMALL = 4096  # numbers that are copied sooner than a kernel of their own is compiled


def filled(shape: int | tuple[int, ...], value: float = 0.0) -> Array:
    """Return floating-point numbers that are all alike, a start for instance.

    JAX would compile a program for them, for every shape another one.
    """
    kind = jax.dtypes.canonicalize_dtype(float)
    return jax.device_put(np.full(shape, value, kind))


def add(a: PyTree, b: PyTree) -> PyTree:
    """Return a + b."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """Return a - b."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(factor: Any, a: PyTree) -> PyTree:
    """Return factor * a."""
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, a)


def add_scaled(a: PyTree, factor: Any, b: PyTree) -> PyTree:
    """Return a + factor * b."""
    return jax.tree.map(lambda u, w: u + jnp.asarray(factor, u.dtype) * w, a, b)


def zeros_like(a: PyTree) -> PyTree:
    """Return zeros shaped like a."""
    return jax.tree.map(jnp.zeros_like, a)


def normal_like(key: Key, a: PyTree) -> PyTree:
    """Return independent standard normal numbers, shaped like a."""
    leaves, structure = jax.tree.flatten(a)
    keys = jr.split(key, len(leaves))
    drawn = [jr.normal(k, u.shape, u.dtype) for k, u in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def dot(a: PyTree, b: PyTree) -> Scalar:
    """Return the inner product of a and b."""
    products = jax.tree.leaves(jax.tree.map(jnp.vdot, a, b))
    # Where all blocks are private a server holds none: their product is zero.
    return reduce(jnp.add, products) if products else jnp.zeros(())


def norm(a: PyTree) -> Scalar:
    """Return the Euclidean norm of a."""
    return jnp.sqrt(dot(a, a))


def cosine(a: PyTree, b: PyTree) -> Scalar:
    """Return the cosine between a and b, 0 where one of them is 0."""
    both = norm(a) * norm(b)
    return dot(a, b) / jnp.where(both > 0, both, 1)


def select(choose: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    """Return a where `choose` holds, else b."""
    return jax.tree.map(lambda u, w: jnp.where(choose, u, w), a, b)


def all_finite(a: PyTree) -> Bool[Array, ""]:
    """Say whether no leaf of a holds NaN or infinity."""
    # Zero times anything else is NaN, which a sum cannot lose, while the `max` of more
    # than some thousand numbers does on a CPU. A flag for each number takes four times
    # as long there.
    flags = [jnp.sum(part * 0) == 0 for part in _joined(a)]
    return reduce(jnp.logical_and, flags, jnp.asarray(True))


def _joined(a: PyTree) -> list[Array]:
    """Return the leaves of inexact numbers, small ones of a type as one vector.

    To reduce one takes three kernels on a CPU, each of which must be compiled.
    """
    parts, small = [], {}
    for leaf in jax.tree.leaves(a):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        if leaf.size > _SMALL:
            parts.append(leaf)
        else:
            small.setdefault(leaf.dtype, []).append(jnp.ravel(leaf))
    return [*parts, *(jnp.concatenate(leaves) for leaves in small.values())]


def leaf_names(a: PyTree) -> list[str]:
    """Name every leaf by its path, the same on every machine."""
    paths = jax.tree_util.tree_flatten_with_path(a)[0]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
