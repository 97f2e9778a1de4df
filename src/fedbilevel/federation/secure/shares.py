"""Shamir's shares of a secret: so many of them give it, any fewer reveal nothing.

The field is that of the integers modulo the prime 2^127 - 1, so that a share has 16
bytes. Python's integers multiply in it fifty times as fast as `Crypto.Protocol.
SecretSharing` does in its field of 2^128 elements, where 64 sites would wait seconds.
"""

import functools
from collections.abc import Mapping, Sequence

SHARE_BYTES = 16
_PRIME = 2**127 - 1
_DRAWN_BYTES = 32  # for a coefficient: twice the prime's, so that none is preferred


def threshold(holders: int) -> int:
    """Return how many of the holders must give their shares: two thirds, rounded up.

    Two such groups have a third of the holders in common, so that no one can find one
    group for each of two statements unless a third of the holders supports both.
    """
    return -(-2 * holders // 3)


def to_element(drawn: bytes) -> int:
    """Return the element of the field that 32 random bytes stand for."""
    return int.from_bytes(drawn, "little") % _PRIME


def split(
    secret: int, needed: int, points: Sequence[int], drawn: bytes
) -> dict[int, bytes]:
    """Return a share for each point, any `needed` of which give the secret.

    `drawn` are 32 random bytes for each of `needed` - 1 coefficients; points are
    different numbers from 1 on.
    """
    coefficients = [
        to_element(drawn[at : at + _DRAWN_BYTES])
        for at in range(0, (needed - 1) * _DRAWN_BYTES, _DRAWN_BYTES)
    ]
    shares = {}
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value + coefficient) * point % _PRIME
        shares[point] = ((value + secret) % _PRIME).to_bytes(SHARE_BYTES, "little")
    return shares


def combine(shares: Mapping[int, bytes]) -> int:
    """Return the secret that the shares at these points give."""
    factors = _factors(tuple(sorted(shares)))
    values = (int.from_bytes(shares[point], "little") for point in sorted(shares))
    return sum(f * v for f, v in zip(factors, values, strict=True)) % _PRIME


@functools.lru_cache(maxsize=4)
def _factors(points: tuple[int, ...]) -> list[int]:
    """Return what each share counts for in the polynomial's value at 0."""
    factors = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above = above * other % _PRIME
                below = below * (other - point) % _PRIME
        factors.append(above * pow(below, -1, _PRIME) % _PRIME)
    return factors
