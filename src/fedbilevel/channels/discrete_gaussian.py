"""Discrete Gaussian noise, drawn exactly from unpredictable bits.

Whole numbers k with probability proportional to exp(-k^2 / (2 s^2)), by Algorithms 1 to
3 of Canonne, Kamath and Steinke (2020, arXiv 2004.00010) for a whole s: integers alone
are computed with, so that no rounding of a floating-point number can reveal anything of
what the noise is added to. Whole vectors are drawn at once.
"""

import os
from collections.abc import Callable

import numpy as np

from fedbilevel.errors import InvalidInputError

# 2 s^2 times the few tens of turns of a loop below must stay within 64 bits.
LARGEST_DEVIATION = 2**24
Bits = Callable[[int], bytes]  # so many random bytes
Whole = np.ndarray


def discrete_gaussian(deviation: int, size: int, bits: Bits = os.urandom) -> Whole:
    """Return so many independent draws as 64-bit integers.

    `bits(n)` returns n random bytes; those of the operating system are made for
    secrets.
    """
    if not 1 <= deviation <= LARGEST_DEVIATION:
        raise InvalidInputError(
            f"deviation={deviation}: discrete Gaussian numbers are drawn for whole "
            f"deviations from 1 to {LARGEST_DEVIATION}."
        )
    drawn, missing = [np.zeros(0, np.int64)], size
    while missing > 0:
        # About three of four candidates are taken.
        candidates = _discrete_laplace(deviation, missing + missing // 2 + 8, bits)
        apart = np.square(np.abs(candidates) - deviation)
        taken = candidates[_with_chance_exp(apart, 2 * deviation**2, bits)]
        drawn.append(taken[:missing])
        missing -= len(drawn[-1])
    return np.concatenate(drawn)


def _discrete_laplace(scale: int, size: int, bits: Bits) -> Whole:
    """Return draws with probability proportional to exp(-|k| / scale)."""
    drawn, missing = [], size
    while missing > 0:
        count = 2 * missing + 8
        rest = _below(np.full(count, scale, np.int64), bits)
        rest = rest[_with_chance_exp(rest, scale, bits)]
        length = rest + scale * _geometric(len(rest), bits)
        negative = _below(np.full_like(rest, 2), bits) == 1
        once = ~(negative & (length == 0))  # zero has two signs, of which one counts
        drawn.append(np.where(negative, -length, length)[once][:missing])
        missing -= len(drawn[-1])
    return np.concatenate(drawn)


def _geometric(size: int, bits: Bits) -> Whole:
    """Return how often in a row something of chance exp(-1) happened."""
    counts, going = np.zeros(size, np.int64), np.arange(size)
    while len(going):
        going = going[_with_chance_exp(np.ones(len(going), np.int64), 1, bits)]
        counts[going] += 1
    return counts


def _with_chance_exp(above: Whole, below: int, bits: Bits) -> np.ndarray:
    """Return for each number a whether something of chance exp(-a / below) happened."""
    happened = np.ones(len(above), bool)
    whole, rest = np.divmod(above, below)
    going = np.flatnonzero(whole)
    while len(going):  # exp(-whole) is a product
        lucky = _with_small_chance(np.ones(len(going), np.int64), 1, bits)
        happened[going[~lucky]] = False
        going = going[lucky]
        whole[going] -= 1
        going = going[whole[going] > 0]
    left = np.flatnonzero(happened)
    happened[left] = _with_small_chance(rest[left], below, bits)
    return happened


def _with_small_chance(above: Whole, below: int, bits: Bits) -> np.ndarray:
    """Do the same for a <= below: the first failure is in an odd turn or not."""
    odd, going, turn = np.zeros(len(above), bool), np.arange(len(above)), 1
    while len(going):
        succeeded = _below(np.full_like(going, below * turn), bits) < above[going]
        odd[going[~succeeded]] = turn % 2 == 1
        going, turn = going[succeeded], turn + 1
    return odd


def _below(limits: Whole, bits: Bits) -> Whole:
    """Return uniform whole numbers from 0 on, each below its limit."""
    most = limits.astype(np.uint64)
    # The largest multiple of a limit: what is drawn beyond it would not be uniform.
    fair = np.uint64(2**64 - 1) // most * most
    drawn = _words(len(limits), bits)
    again = np.flatnonzero(drawn >= fair)
    while len(again):
        drawn[again] = _words(len(again), bits)
        again = again[drawn[again] >= fair[again]]
    return (drawn % most).astype(np.int64)


def _words(count: int, bits: Bits) -> np.ndarray:
    return np.frombuffer(bits(8 * count), np.uint64).copy()
