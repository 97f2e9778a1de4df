"""A channel: how messages are coded, and how replies become one."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
from jaxtyping import Array, PyTree

from fedbilevel._types import Key
from fedbilevel.channels import _vectors
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

        return _vectors.change_numbers(message, rounded)

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
        single = _vectors.are_single_numbers(like)
        coders = [some if alone else self.coders for alone in single]
        return list(zip(_vectors.vector_shapes(like), coders, strict=True))

    def encode(self, change: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        """Return exactly what travels, and what the client remembers then."""
        if not self.coders:
            return change, memory
        coded, held = [], []
        vectors = _vectors.to_vectors(change)
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
        return _vectors.from_vectors(vectors, like)

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
