"""A channel: how messages are coded, and how replies become one.

Blocks of a reply are clipped, thinned out or scaled as one vector each. A block is one
field of a `Pair` or a `Triple`: x, y or z of a point, or of a direction, with all its
leaves. Arrays that a reply holds outside of them are one block together: phases that
send a single x or y send it bare. Single numbers beside them are another.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PyTree

from fedbilevel._blocks import leaf_numbers
from fedbilevel._types import Key
from fedbilevel.channels.coders import AbstractCoder, BFloat16, Privacy, Protected
from fedbilevel.channels.reductions import AbstractReduction, Mean
from fedbilevel.errors import InvalidInputError
from fedbilevel.schedules import describe


class Channel(eqx.Module):
    """Coders that a client's change goes through in turn, and one reduction of all.

    `coders` are applied in their order, `reduction` makes one of all replies.
    A change is a reply less what both sides know of it beforehand. Without coders it
    travels as it is. `Privacy` comes first: what follows only sees its output. Only the
    last coder may compress, and it does not touch single numbers: to thin out or round
    the curvature that a client sends beside its direction saves nothing.

    `down` rounds what the server sends, but for single numbers. Clients then work at
    the rounded point, while the server keeps its own, to which it adds their changes:
    else what is less than half a step of the rounding would be lost in every round.
    """

    coders: tuple[AbstractCoder, ...] = eqx.field(converter=tuple, default=())
    reduction: AbstractReduction = eqx.field(default_factory=Mean)
    down: BFloat16 | None = None

    def __check_init__(self) -> None:
        if any(isinstance(coder, Privacy) for coder in self.coders[1:]):
            raise InvalidInputError(
                "`Channel(coders=...)`: Privacy must come first, and once: what a "
                "coder before it reveals would not be protected."
            )
        if any(coder.compresses for coder in self.coders[:-1]):
            raise InvalidInputError(
                "`Channel(coders=...)`: only the last coder may compress. Leave out "
                "the others."
            )
        compresses = any(coder.compresses for coder in self.coders)
        if compresses and self.reduction.bytes_per_number is not None:
            raise InvalidInputError(
                f"`{type(self.reduction).__name__}` adds up masked numbers of a fixed "
                "width and place, so replies cannot be compressed. Leave out the "
                "compression, or use another reduction."
            )

    @property
    def is_plain(self) -> bool:
        """Say whether all travels as it is, and replies are averaged as usual."""
        return not self.sends_changes and self.plain_mean

    @property
    def sends_changes(self) -> bool:
        """Say whether replies travel as changes of what both sides know of them."""
        return bool(self.coders) or self.down is not None

    @property
    def plain_mean(self) -> bool:
        """Say whether the replies that arrive are averaged as usual."""
        return type(self.reduction) is Mean

    @property
    def privacy(self) -> Privacy | None:
        """The coder that protects clients, if there is one."""
        first = self.coders[0] if self.coders else None
        return first if isinstance(first, Privacy) else None

    def joined(self, own: "Channel", title: str) -> "Channel":
        """Return the channel with what the method of that title does itself after it.

        Of either kind of part there is one, the method's or that of the run.
        """
        if own.is_plain:
            return self
        for part, of_both in (
            ("compression", [any(c.compresses for c in w.coders) for w in (self, own)]),
            ("reduction", [not one.plain_mean for one in (self, own)]),
        ):
            if all(of_both):
                raise InvalidInputError(
                    f"`{title}` has a {part} of its own, which its options change. "
                    "Leave out the other one."
                )
        reduction = self.reduction if own.plain_mean else own.reduction
        return Channel((*self.coders, *own.coders), reduction, self.down)

    def shared_by(self, participants: int) -> "Channel":
        """Return the channel for so many participants in an exchange."""
        if self.privacy is None:
            return self
        first = replace(self.privacy, participants=participants)
        return replace(self, coders=(first, *self.coders[1:]))

    def protected(self) -> "Channel":
        """Return the channel for changes that went through its `Privacy` before."""
        return replace(self, coders=(Protected(), *self.coders[1:]))

    def sent(self, message: PyTree) -> PyTree:
        """Return what the server sends one client, as it travels."""
        rounding = self.down
        if rounding is None:
            return message

        def rounded(leaf: Array) -> Array:
            return rounding.rounded(leaf) if leaf.dtype.itemsize > 2 else leaf

        return change_numbers(message, rounded)

    def received(self, coded: PyTree, like: PyTree) -> PyTree:
        """Return the message that arrives; `like` has its types."""
        if self.down is None:
            return coded
        return jax.tree.map(lambda leaf, one: leaf.astype(one.dtype), coded, like)

    def start(self, change_like: PyTree) -> PyTree:
        """Return what a client remembers before its first change of these shapes."""
        if not self.coders:
            return ()
        return tuple(
            tuple(coder.start(shape) for coder in coders)
            for shape, coders in self._blocks(change_like)
        )

    def _blocks(self, like: PyTree) -> list[tuple[Any, tuple[AbstractCoder, ...]]]:
        """Return each block's shape and coders: single numbers are not compressed."""
        some = tuple(coder for coder in self.coders if not coder.compresses)
        single = are_single_numbers(like)
        coders = [some if alone else self.coders for alone in single]
        return list(zip(vector_shapes(like), coders, strict=True))

    def encode(self, change: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        """Return exactly what travels, and what the client remembers then."""
        if not self.coders:
            return change, memory
        coded, held = [], []
        vectors = to_vectors(change)
        blocks = zip(vectors, self._blocks(change), memory, strict=True)
        for number, (vector, (_, coders), kept) in enumerate(blocks):
            mine, after = jr.fold_in(key, number), []
            for place, (coder, before) in enumerate(zip(coders, kept, strict=True)):
                vector, own = coder.encode(vector, before, jr.fold_in(mine, place))
                after.append(own)
            coded.append(vector)
            held.append(tuple(after))
        return tuple(coded), tuple(held)

    def decode(self, coded: PyTree, like: PyTree) -> PyTree:
        """Return the change that arrives; `like` has its shapes."""
        if not self.coders:
            return coded
        vectors = []
        for vector, (shape, coders) in zip(coded, self._blocks(like), strict=True):
            for coder in reversed(coders):
                vector = coder.decode(vector, shape)
            vectors.append(vector)
        return from_vectors(vectors, like)

    def why_impossible(self, coded: PyTree, like: PyTree) -> str:
        """Return what no client could have coded, or nothing; `like` as in `decode`."""
        if not self.coders:
            return ""
        # Only the last coder returns anything but a vector.
        problems = (
            coders[-1].why_impossible(vector, shape)
            for vector, (shape, coders) in zip(coded, self._blocks(like), strict=True)
            if coders
        )
        return next(filter(None, problems), "")

    def coded_shape(self, like: PyTree) -> PyTree:
        """Return the shapes of what travels for a change of these shapes."""

        def coded(change: PyTree) -> PyTree:
            return self.encode(change, self.start(change), jr.key(0))[0]

        return jax.eval_shape(coded, like)

    def describe(self) -> dict[str, Any]:
        """Return every part as plain numbers and text."""
        coders = [describe(coder) for coder in self.coders]
        parts = {"coders": coders, "reduction": describe(self.reduction)}
        return parts if self.down is None else {**parts, "down": describe(self.down)}


PLAIN = Channel()


def count_blocks(tree: PyTree) -> int:
    """Return the number of blocks."""
    return len(leaf_numbers(tree))


def to_vectors(tree: PyTree) -> list[Array]:
    """Return each block as one vector, of the widest type among its leaves."""
    leaves = jax.tree.leaves(tree)
    vectors = []
    for numbers in leaf_numbers(tree):
        block = [leaves[number] for number in numbers]
        kind = max((leaf.dtype for leaf in block), key=lambda one: one.itemsize)
        vectors.append(jnp.concatenate([leaf.ravel().astype(kind) for leaf in block]))
    return vectors


def vector_shapes(tree: PyTree) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of these vectors, from arrays or from their shapes."""
    return jax.eval_shape(to_vectors, tree)


def are_single_numbers(tree: PyTree) -> list[bool]:
    """Say of each block whether it has no array: a scalar x, or a curvature."""
    leaves = jax.tree.leaves(tree)
    return [
        all(np.ndim(leaves[number]) == 0 for number in numbers)
        for numbers in leaf_numbers(tree)
    ]


def change_numbers(tree: PyTree, change: Callable[[Array], Array]) -> PyTree:
    """Return a tree in which leaves of real numbers are replaced, but single numbers.

    Whole numbers, and blocks that have no array, stay as they are.
    """
    leaves, structure = jax.tree.flatten(tree)
    blocks = zip(leaf_numbers(tree), are_single_numbers(tree), strict=True)
    for number in [n for numbers, alone in blocks if not alone for n in numbers]:
        if jnp.issubdtype(leaves[number].dtype, jnp.floating):
            leaves[number] = change(leaves[number])
    return jax.tree.unflatten(structure, leaves)


def from_vectors(vectors: list[Array], like: PyTree) -> PyTree:
    """Put the vectors of all blocks back into a tree of these shapes."""
    shapes, structure = jax.tree.flatten(like)
    leaves: list[Any] = [None] * len(shapes)
    for vector, numbers in zip(vectors, leaf_numbers(like), strict=True):
        first = 0
        for number in numbers:
            shape, last = shapes[number], first + shapes[number].size
            part = vector[first:last].reshape(shape.shape)
            leaves[number], first = part.astype(shape.dtype), last
    return jax.tree.unflatten(structure, leaves)


def change_blocks(tree: PyTree, change: Callable[[Array], Any]) -> PyTree:
    """Return a tree in which every block, as one vector, is replaced by another."""
    return from_vectors([change(vector) for vector in to_vectors(tree)], tree)
