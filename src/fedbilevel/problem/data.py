"""The samples of all clients, stacked so that one program serves every client."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr
from jaxtyping import Array, Float, Int, PyTree

from fedbilevel import _tree
from fedbilevel._types import Key, Rows
from fedbilevel.errors import InvalidInputError

Client: TypeAlias = Int[Array, ""] | int
Places: TypeAlias = tuple[Array | int, Array]  # whose row, and which of them


class ClientData(eqx.Module):
    """Upper and lower samples per client, of unequal sizes, with client weights.

    Leaves of `upper` and `lower` are `(clients, rows, ...)`. Rows past a client's size,
    in `upper_sizes` and `lower_sizes`, are padding: they keep the stack rectangular,
    and of few shapes (`padded_count`), and are never read. `weights` are what clients
    count in means. Usually made by `ClientData.from_clients`.
    """

    travels: ClassVar[bool] = True

    upper: Rows
    lower: Rows
    upper_sizes: Int[Array, " clients"]
    lower_sizes: Int[Array, " clients"]
    weights: Float[Array, " clients"]

    def __repr__(self) -> str:
        """Count clients and rows, where they are known; else show shapes."""
        held = (self.upper_sizes, self.lower_sizes, self.weights)
        if not all(_is_known(one) for one in held):
            return super().__repr__()
        levels = (("upper", self.upper, held[0]), ("lower", self.lower, held[1]))
        about = "".join(f"\n  {name}: {_rows(*two)}" for name, *two in levels)
        count = f"{self.clients} client{'s' * (self.clients > 1)}"
        return f"ClientData of {count}, {_weights(held[2])}:{about}"

    @property
    def clients(self) -> int:
        """The number of clients, K."""
        return self.weights.shape[0]

    def drawn(self, sizes: Array, client: Client, key: Key, count: int) -> Places:
        """Draw rows of a client, uniformly and independently."""
        return client, _uniform(sizes[client], key, count)

    def owners(self, sizes: Array, client: Client) -> tuple[Client, Array]:
        """Return whose rows are divided, and their share of the weight."""
        return client, jnp.ones((), self.weights.dtype)

    def pooled(self) -> "PooledData":
        """Return the same rows, as if they could be moved to one machine."""
        return PooledData(self)

    @staticmethod
    def from_clients(
        upper: Sequence[PyTree],
        lower: Sequence[PyTree],
        weights: Sequence[float] | None = None,
    ) -> "ClientData":
        """Stack one pytree of arrays per client and level; rows are the first axis.

        Without `weights` every client counts the same, as in 1/K sum_k. Floating
        arrays take the default type: float32, or float64 where it is enabled.
        """
        if not upper or len(upper) != len(lower):
            raise InvalidInputError(
                f"`upper` has {len(upper)} clients and `lower` has {len(lower)}: give "
                "both levels for the same clients, at least one."
            )
        upper_rows, upper_sizes = _stack(upper, "upper")
        lower_rows, lower_sizes = _stack(lower, "lower")
        held = as_weights(weights, len(upper))
        return ClientData(upper_rows, lower_rows, upper_sizes, lower_sizes, held)

    def weighing(self, weights: Sequence[float]) -> "ClientData":
        """Return the same rows, of clients that count by other weights."""
        return replace(self, weights=as_weights(weights, self.clients))


class PooledData(eqx.Module):
    """The rows of all clients, `parts`, as those of one: the ceiling of comparisons.

    A drawn row is one of client k with the chance w_k / sum w, then uniform over that
    client's rows, so that the problem is the federated one exactly, whatever the sizes.
    Nothing travels: all rows are in one place.
    """

    travels: ClassVar[bool] = False

    parts: ClientData

    clients: ClassVar[int] = 1

    def __repr__(self) -> str:
        """Describe the rows by the clients that they came from."""
        return f"PooledData, as on one machine, of {self.parts!r}"

    # The rows, and how many are real, are still by the client that they came from.
    upper = property(attrgetter("parts.upper"))
    lower = property(attrgetter("parts.lower"))
    upper_sizes = property(attrgetter("parts.upper_sizes"))
    lower_sizes = property(attrgetter("parts.lower_sizes"))

    @property
    def weights(self) -> Float[Array, "1"]:
        """The weight of the one machine."""
        return jnp.ones(1, self.parts.weights.dtype)

    def drawn(self, sizes: Array, client: Client, key: Key, count: int) -> Places:
        """Draw a client for every row, then the row."""
        del client
        choose, among = jr.split(key)
        share = self.parts.weights / jnp.sum(self.parts.weights)
        whose = jr.choice(among, sizes.size, (count,), p=share)
        return whose, _uniform(sizes[whose], choose, count)

    def owners(self, sizes: Array, client: Client) -> tuple[Array, Array]:
        """Return all clients, whose rows are divided alike, and their shares."""
        whose = jnp.arange(sizes.size, dtype=jnp.int32)[:, None]
        return whose, (self.parts.weights / jnp.sum(self.parts.weights))[:, None]


Data: TypeAlias = ClientData | PooledData


def part_places(
    data: Data, sizes: Array, client: Client, width: int, part: Client, most: int
) -> tuple[Places, Array]:
    """Return one part of a client's rows, and their weights.

    There are `most` parts, or as many as rows if those are fewer. Padding weighs
    nothing. Weights are those among all rows times the number of parts, so that the
    mean over the parts is that over the rows, whatever their sizes.
    """
    whose, share = data.owners(sizes, client)
    size = sizes[whose]
    count = jnp.minimum(jnp.max(size), most).astype(sizes.dtype)
    # Every so many rows one of them, so that parts differ in size by at most one.
    first = jnp.asarray(part, sizes.dtype)
    position = first + count * jnp.arange(-(-width // most), dtype=sizes.dtype)
    # Padding is not read: past the end the last real row stands in, and weighs 0.
    index = jnp.minimum(position, size - 1)
    each = count.astype(share.dtype) * share / size.astype(share.dtype)
    return (whose, index), jnp.where(position < size, each, 0)


def _is_known(array: Any) -> bool:
    """Say whether numbers are here: not traced, and not of another process."""
    here = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return here and array.is_fully_addressable and array.ndim == 1


def _rows(rows: Rows, sizes: Array) -> str:
    """Say how many rows there are, and what each holds."""
    counts = np.asarray(sizes)
    few, most, total = int(counts.min()), int(counts.max()), int(counts.sum())
    text = f"{total:,} row{'s' * (total != 1)}"
    if len(counts) > 1:
        text += f", {few:,} to {most:,} a client" if few < most else f", {few:,} each"
    leaves = jax.tree.leaves_with_path(rows, is_leaf=lambda one: hasattr(one, "dtype"))
    held = [
        f"{keystr(path, simple=True, separator='.')} {one.dtype}"
        f"{list(one.shape[2:]) or ''}".strip()
        for path, one in leaves
    ]
    more = f" and {len(held) - 4} more" if len(held) > 5 else ""
    return f"{text}; each has {', '.join(held[: 4 if more else 5])}{more}"


def _weights(weights: Array) -> str:
    """Say what clients count."""
    texts = [f"{one:.4g}" for one in np.asarray(weights)]
    if len(texts) <= 8:
        return f"weight{'s' * (len(texts) > 1)} {', '.join(texts)}"
    low, high = f"{weights.min():.4g}", f"{weights.max():.4g}"
    return f"all of weight {low}" if low == high else f"weights {low} to {high}"


def _uniform(size: Array, key: Key, count: int) -> Array:
    # The remainder of 32 random bits is off uniform by at most size / 2^32, and costs a
    # third of `jr.randint`, which matters where the batch is small.
    return jr.bits(key, (count,), jnp.uint32) % size.astype(jnp.uint32)


def padded_count(rows: int) -> int:
    """Return how many rows are held where so many are to be: one of few numbers.

    A program is compiled for the shapes of its data. There are eight numbers from one
    power of two to the next, so that one program serves data that grow or shrink a
    little, and at most an eighth of what is held is padding. Below 16 all are exact.
    """
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def padded(array: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return an array with zeros after its rows, as many as `padded_count` says."""
    rows = array.shape[axis]
    after = [(0, 0)] * array.ndim
    after[axis] = (0, padded_count(rows) - rows)
    return np.pad(array, after)


def as_weights(weights: Sequence[float] | None, clients: int) -> Array:
    """Return the weights of clients, all 1 if none are given."""
    given = np.ones(clients) if weights is None else np.asarray(weights, float)
    kind = jax.dtypes.canonicalize_dtype(float)
    with np.errstate(over="ignore"):
        values = given.astype(kind)  # where a number may be too large or too small
        total = np.sum(values)
    if given.shape != (clients,) or not ((values > 0).all() and np.isfinite(total)):
        raise InvalidInputError(
            f"`weights` must be {clients} positive numbers, one per client, with a sum "
            f"that {kind.name} can hold, got {weights}."
        )
    return jax.device_put(values)


def _stack(trees: Sequence[PyTree], level: str) -> tuple[Rows, Array]:
    leaves, structures = zip(*(jax.tree.flatten(tree) for tree in trees), strict=True)
    arrays = [[np.asarray(leaf) for leaf in own] for own in leaves]
    sizes = [_rows_of(own, level, k) for k, own in enumerate(arrays)]
    wanted = [leaf.shape[1:] for leaf in arrays[0]]
    for k, own in enumerate(arrays):
        alike = structures[k] == structures[0]
        if not alike or [leaf.shape[1:] for leaf in own] != wanted:
            raise _unlike(trees[k], trees[0], level, k)
    names, held = _tree.leaf_names(trees[0]), padded_count(max(sizes))
    stacks = [_filled(column, held) for column in zip(*arrays, strict=True)]
    for name, stack in zip(names, stacks, strict=True):
        _check_finite(stack, name, level)
    rows = jax.tree.unflatten(structures[0], [_on_device(stack) for stack in stacks])
    return rows, jax.device_put(np.asarray(sizes, np.int32))


def _rows_of(leaves: Sequence[np.ndarray], level: str, client: int) -> int:
    shapes = [leaf.shape for leaf in leaves]
    if not shapes or any(shape[:1] in ((), (0,)) for shape in shapes):
        raise InvalidInputError(
            f"client {client} has no {level} samples. Leave the client out, or give it "
            "data. Every array needs one row per sample."
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise InvalidInputError(
            f"client {client}: the {level} arrays have different numbers of rows, "
            f"{shapes}. The first axis counts samples and must agree."
        )
    return shapes[0][0]


def _unlike(tree: PyTree, first: PyTree, level: str, client: int) -> InvalidInputError:
    def shapes_of(one: PyTree) -> dict[str, tuple]:
        shapes = [np.shape(leaf)[1:] for leaf in jax.tree.leaves(one)]
        return dict(zip(_tree.leaf_names(one), shapes, strict=True))

    return InvalidInputError(
        f"client {client}: one {level} sample has shape {shapes_of(tree)}, but on "
        f"client 0 it has {shapes_of(first)}. All clients must agree."
    )


def _filled(leaves: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """Return the arrays of all clients in one, with zeros after the last row of each.

    Not by JAX, which would compile a program for every shape.
    """
    kind = np.result_type(*{leaf.dtype for leaf in leaves})
    stack = np.zeros((len(leaves), rows, *leaves[0].shape[1:]), kind)
    for k, leaf in enumerate(leaves):
        stack[k, : leaf.shape[0]] = leaf
    return stack


def _check_finite(stack: np.ndarray, name: str, level: str) -> None:
    # A sum shows it at once, without an array of flags as long as the data.
    with np.errstate(all="ignore"):
        floating = np.issubdtype(stack.dtype, np.floating)
        if not floating or np.isfinite(np.sum(stack, dtype=float)):
            return
    for client, rows in enumerate(stack):
        # Of numbers that are too large together none need be wrong.
        if not np.isfinite(rows).all():
            row = int(np.argwhere(~np.isfinite(rows))[0][0])
            raise InvalidInputError(
                f"client {client}: {level} array '{name or 'data'}' holds NaN or "
                f"infinity, first in row {row}. Clean or drop such rows."
            )


def _on_device(stack: np.ndarray) -> Array:
    floating = np.issubdtype(stack.dtype, np.floating)
    kind = jax.dtypes.canonicalize_dtype(float if floating else stack.dtype)
    return jax.device_put(stack.astype(kind, copy=False))
