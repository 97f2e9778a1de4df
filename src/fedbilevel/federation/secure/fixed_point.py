"""Numbers as integers modulo 2^64, whose sums are exact, and back to a mean."""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.errors import InvalidInputError, UnmaskingError

FRACTION_BITS = 40
EXTRA_WORDS = 2  # whether numbers were cut, and a check


def block_scales(about: Sequence[Any]) -> list[int]:
    """Return an exponent s per block of a reply; the scale of the block is 2^s.

    `about` has a block of like magnitude for each, which server and sites both know:
    what the server sent, or the last mean. 2^s is the smallest power of two, from 1 on,
    that no number in it exceeds. Below 1 a smaller scale would gain nothing that is
    needed, 2^-40 being 1e-6 of a number of size 1e-6, but would cost range.
    """
    scales = []
    for number, block in enumerate(about):
        largest = float(np.max(np.abs(np.asarray(block, np.float64)), initial=1.0))
        if not math.isfinite(largest):
            raise InvalidInputError(
                f"block {number} holds NaN or infinity, so replies have no scale. "
                "Take the scales from a message or a mean that is finite."
            )
        fraction, exponent = math.frexp(largest)
        scales.append(exponent - (fraction == 0.5))
    return scales


def encode(
    blocks: Sequence[Any], weight: float, scales: Sequence[int], participants: int
) -> np.ndarray:
    """Return weighted blocks in fixed point, one after the other, and two words.

    A number beyond the range is cut to it, and one that is none is 0. The first word is
    1 if there was such a number, else 0: only its sum over all sites is ever seen. A
    site that refused instead would say something of its rows in the clear. The second
    word is a check.
    """
    if not 0 < weight <= 1:
        raise InvalidInputError(
            f"weight={weight}: divide weights by the largest of all clients, so that "
            "they are above 0 and at most 1."
        )
    arrays = [np.asarray(block, np.float64).ravel() for block in blocks]
    _check_lengths(len(scales), len(arrays))
    # A double below it: 2^63 / n itself would wrap in a sum of n.
    limit = np.nextafter(2.0**63 / participants, 0)
    pieces, cut = [], False
    for array, scale in zip(arrays, scales, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            whole = np.rint(np.ldexp(weight * array, FRACTION_BITS - scale))
        within = np.clip(np.nan_to_num(whole, nan=0.0), -limit, limit)
        cut |= not np.array_equal(within, whole)
        pieces.append(within.astype(np.int64).view(np.uint64))
    word = _check_word([array.size for array in arrays], scales, weight)
    return np.concatenate([*pieces, np.asarray([int(cut), word], np.uint64)])


def decode_mean(
    total: np.ndarray,
    weights: Mapping[int, float],
    scales: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
) -> tuple[list[np.ndarray], int]:
    """Return the weighted mean of each block, as float64, from the sum of replies.

    Also return how many of the replies held numbers that were cut.

    `weights` are those of the clients in the sum, by number, as the sites used them.
    Raise `UnmaskingError` if the sum cannot be that of these clients.
    """
    _check_lengths(len(scales), len(shapes))
    sizes = [math.prod(shape) for shape in shapes]
    if total.shape != (sum(sizes) + EXTRA_WORDS,):
        raise UnmaskingError(
            f"the sum of shape {total.shape} does not hold blocks of shapes {shapes} "
            "and two words. Give the shapes of the blocks that the sites masked."
        )
    words = (_check_word(sizes, scales, weight) for weight in weights.values())
    if int(total[-1]) != sum(words) % 2**64:
        raise UnmaskingError(
            f"the sum over clients {sorted(weights)} is not one of replies with these "
            "weights, scales and shapes, or not all masks are out of it. Compare them, "
            "the roster, the federation and the exchange between server and sites."
        )
    parts = np.split(total[:-EXTRA_WORDS].view(np.int64), np.cumsum(sizes)[:-1])
    divisor = math.fsum(weights.values())
    means = [
        np.ldexp(part.astype(np.float64), scale - FRACTION_BITS).reshape(shape)
        / divisor
        for part, scale, shape in zip(parts, scales, shapes, strict=True)
    ]
    return means, int(total[-EXTRA_WORDS])


def _check_lengths(scales: int, blocks: int) -> None:
    if scales != blocks or not blocks:
        raise InvalidInputError(
            f"{scales} scales for {blocks} blocks: give one for each, and a block or "
            "more."
        )


def _check_word(sizes: Sequence[int], scales: Sequence[int], weight: float) -> int:
    """Digest what server and site must agree on, the weight to float32's precision."""
    layout = struct.pack(f"<{2 * len(sizes)}q", *sizes, *scales)
    digest = hashlib.sha256(struct.pack("<f", weight) + layout).digest()
    return int.from_bytes(digest[:8], "little")
