"""Which replies of an exchange are believed, and what no exchange may end with."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fedbilevel.errors import FedbilevelError
from fedbilevel.federation.refusals import RefusedError
from fedbilevel.federation.wire import Header

_SMALL = 1e-6  # moves shorter than this part of the point are harmless


def why_unusable(reply: PyTree) -> str:
    """Return what is wrong with the numbers of a decoded reply, or nothing.

    Finite numbers whose squares are infinite are no better than infinity.
    """
    for leaf in map(np.asarray, jax.tree.leaves(reply)):
        largest = float(np.max(np.abs(leaf), initial=0.0))
        if not np.isfinite(largest):
            return "holds NaN or infinity"
        real = leaf.dtype.itemsize >= 4 and np.issubdtype(leaf.dtype, np.floating)
        if real and not largest <= float(np.sqrt(np.finfo(leaf.dtype).max)):
            return f"holds {largest:.3g}, whose square is infinite"
    return ""


def implausible(
    replies: Mapping[int, PyTree],
    places: Mapping[int, int],
    known: Mapping[int, PyTree | None],
    tolerance: float,
) -> tuple[dict[int, str], str]:
    """Return the clients whose reply is far out of proportion, and how far.

    A reply's length is its distance from what both sides know of the replies of its
    place. It is compared with the median length. This shows which is wrong only if more
    than half of the replies are alike: of two that differ either may be the sound one.
    Then no client is named, and the second return value says what could not be decided.
    """
    if len(replies) < 2:
        return {}, ""
    lengths = {k: _length(one, known[places[k]]) for k, one in replies.items()}
    middle = float(np.sort(list(lengths.values()))[(len(lengths) - 1) // 2])
    size = max(0.0 if one is None else _length(one, None) for one in known.values())
    most = tolerance * max(middle, _SMALL * (1 + size))
    far = {
        client: f"moves {length:.3g}, the median is {middle:.3g}"
        for client, length in lengths.items()
        if not length <= most
    }
    if 2 * len(far) < len(lengths):
        return far, ""
    each = ", ".join(f"client {k} {length:.3g}" for k, length in lengths.items())
    return {}, f"one of {len(lengths)} replies is wrong, but not clear which: {each}"


def not_finite(measured: Mapping[int, PyTree]) -> dict[int, RefusedError]:
    """Return those whose measurements are not finite, if there are others.

    In a diverging run none is finite, and that shall be seen.
    """
    odd = {
        client: RefusedError("not-finite", "measured NaN or infinity, others did not")
        for client, tree in measured.items()
        if not _is_finite(tree)
    }
    return odd if len(odd) < len(measured) else {}


def require_finite(tree: Any, header: Header, what: str) -> None:
    """Raise if sound replies came together to something that is not."""
    if not _is_finite(tree):
        raise FedbilevelError(
            f"round {header.round}, exchange {header.exchange}, phase '{header.name}': "
            f"{what} holds NaN or infinity, though no single reply does. Nothing of "
            "this exchange was taken in. Look at weights and replies for numbers that "
            "are too large, and serve again: the run continues after its last whole "
            "round."
        )


def require_weight(weights: Any, header: Header) -> None:
    """Raise if shares of these weights mean nothing: a mean by them would be zero."""
    total = float(np.sum(np.asarray(weights, np.float64)))
    require_finite(total if total > 0 else np.nan, header, "the sum of the weights")


def _is_finite(tree: PyTree) -> bool:
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


def _length(tree: PyTree, origin: PyTree | None) -> float:
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    if origin is not None:
        others = jax.tree.leaves(origin)
        leaves = [a - np.asarray(b) for a, b in zip(leaves, others, strict=True)]
    # Scaled before squaring: a length may overflow where its entries do not.
    largest = max((np.abs(leaf).max(initial=0.0) for leaf in leaves), default=0.0)
    if largest == 0:
        return 0.0
    return float(
        largest * np.sqrt(sum(np.sum((leaf / largest) ** 2) for leaf in leaves))
    )
