"""Which replies of an exchange are believed."""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import PyTree

__all__ = ["implausible"]

_SMALL = 1e-6  # moves of a length below this part of the point harm nobody


def implausible(
    replies: Mapping[int, PyTree],
    places: Mapping[int, int],
    known: Mapping[int, PyTree | None],
    tolerance: float,
) -> dict[int, str]:
    """Return the clients whose reply is far out of proportion, and how far.

    A reply's length is its distance from what both sides know of the replies of its
    place. It is compared with the median length: half of the replies must be sound.
    """
    if len(replies) < 2:
        return {}
    lengths = {
        client: _length(reply, known[places[client]])
        for client, reply in replies.items()
    }
    middle = float(np.sort(list(lengths.values()))[(len(lengths) - 1) // 2])
    size = max(0.0 if one is None else _length(one, None) for one in known.values())
    most = tolerance * max(middle, _SMALL * (1 + size))
    return {
        client: f"moves {length:.3g}, the median is {middle:.3g}"
        for client, length in lengths.items()
        if length > most
    }


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
