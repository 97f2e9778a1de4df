"""Rows that stay in a file: what travels is their number, until they are drawn.

A leaf of a client's data may be `StoredRows`: a memory-mapped array, shared by all
clients, and the numbers of the rows that are the client's own. Everything before a draw
sees integers; a draw reads the rows it needs, and no others, from the file.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeGuard

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Int, PyTree


class Source:
    """An array in a file; equal to itself alone, so that programs can hold on to it.

    Anything with a shape and a type whose rows are read by their numbers will do.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        # What JAX makes of the type: float32 unless float64 is enabled.
        self.dtype = jax.dtypes.canonicalize_dtype(array.dtype)

    def __repr__(self) -> str:
        array = self.array
        file = getattr(array, "filename", None)
        changed = None if file is None else os.stat(file).st_mtime_ns
        return f"Source({file}, {changed}, {array.dtype}, {array.shape})"

    def read(self, numbers: Any) -> np.ndarray:
        """Return rows by their numbers, of any shape."""
        return self.array[np.asarray(numbers)].astype(self.dtype, copy=False)


class StoredRows(eqx.Module):
    """Rows of a source by their numbers; the first axes are those of `numbers`."""

    numbers: Int[Array, "..."] | np.ndarray
    source: Source = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows when read."""
        return (*self.numbers.shape, *self.source.array.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes of the rows when read."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The type of the rows when read."""
        return self.source.dtype

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, chosen: Any) -> "StoredRows":
        return StoredRows(self.numbers[chosen], self.source)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the rows."""
        del copy  # what is read is new
        return self.source.read(self.numbers).astype(dtype or self.dtype, copy=False)


def stored(array: np.ndarray, parts: Sequence[np.ndarray]) -> list[StoredRows]:
    """Return every client's rows of an array that stays where it is.

    `array` is memory-mapped, as `np.load(path, mmap_mode="r")` gives it; `parts` are
    the row numbers of each client.
    """
    rows = StoredRows(np.arange(len(array), dtype=np.int32), Source(array))
    return [rows[np.asarray(part)] for part in parts]


def is_stored(leaf: Any) -> TypeGuard[StoredRows]:
    """Say whether these are rows in a file."""
    return isinstance(leaf, StoredRows)


def sources(rows: PyTree) -> list[Source]:
    """Return the files that rows are read from."""
    leaves = jax.tree.leaves(rows, is_leaf=is_stored)
    return [leaf.source for leaf in leaves if is_stored(leaf)]


def fetched(rows: PyTree) -> PyTree:
    """Read what is stored; everything else stays as it is."""

    def read(leaf: Any) -> Any:
        if not is_stored(leaf):
            return leaf
        wanted = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        read_rows, numbers = leaf.source.read, leaf.numbers
        return jax.pure_callback(read_rows, wanted, numbers, vmap_method="expand_dims")

    return jax.tree.map(read, rows, is_leaf=is_stored)
