"""Keys of sites and of two of them, the masks made of them, and shares of a secret."""

import functools
import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.secure.layout import KEY_BYTES, SHARE_BYTES, TAG_BYTES

_PRIME = 2**127 - 1
_DRAWN_BYTES = 32  # for a coefficient: twice the prime's, so that none is preferred
_WORDS_AT_ONCE = 2**17
_ZEROS = memoryview(bytes(8 * _WORDS_AT_ONCE))


class SiteKeys:
    """A site's key pair for one run; keep `private_bytes` where only the site reads."""

    def __init__(self, private: x25519.X25519PrivateKey) -> None:
        self._private = private

    @staticmethod
    def generate() -> "SiteKeys":
        """Draw a new pair."""
        return SiteKeys(x25519.X25519PrivateKey.generate())

    @staticmethod
    def from_bytes(private: bytes) -> "SiteKeys":
        """Restore a pair from its `private_bytes`."""
        check_key(private, "the private key of this site")
        return SiteKeys(x25519.X25519PrivateKey.from_private_bytes(private))

    @property
    def private_bytes(self) -> bytes:
        """The private key: 32 bytes that restore the pair."""
        return self._private.private_bytes_raw()

    @property
    def public_bytes(self) -> bytes:
        """The public key: 32 bytes for the roster."""
        return self._private.public_key().public_bytes_raw()

    def shared_secret(self, public: bytes) -> bytes:
        """Return what this site and the owner of a public key alone can compute."""
        return self._private.exchange(x25519.X25519PublicKey.from_public_bytes(public))

    def own_secret(self, purpose: bytes, size: int) -> bytes:
        """Return bytes that this site alone can compute, the same ones every time."""
        return _derive(self.private_bytes, b"own " + purpose, size)


def check_key(key: bytes, whose: str) -> None:
    """Raise unless a key or a seed has the length of one."""
    if len(key) != KEY_BYTES:
        raise InvalidInputError(
            f"{whose} has {len(key)} bytes. Give the {KEY_BYTES} raw bytes that were "
            "made for it."
        )


def pair_secret(
    keys: SiteKeys, federation: str, roster: Mapping[int, bytes], pair: tuple[int, int]
) -> bytes:
    """Return the secret of two clients, the first of which owns the keys.

    It is bound to the federation and to both numbers and public keys.
    """
    parts = [hashlib.sha256(federation.encode()).digest()]
    for client in sorted(pair):
        parts += [struct.pack("<Q", client), roster[client]]
    try:
        shared = keys.shared_secret(roster[pair[1]])
    except ValueError as error:
        raise InvalidInputError(
            f"client {pair[1]}: no secret can be shared with the public key that the "
            "roster holds for it. Have this client generate new keys."
        ) from error
    return _derive(shared, b"pair " + b"".join(parts))


@dataclass(frozen=True)
class PairKeys:
    """Keys of two clients for one exchange; none of them reveals the others.

    `seed` makes their mask. Of two keys the first is for what the client of the lower
    number sends: `boxes` encrypt what passes through the server, `tags` authenticate
    the sender. `draw` is a number below 2^64 that no third party can foresee.
    """

    seed: bytes
    boxes: tuple[bytes, bytes]
    tags: tuple[bytes, bytes]
    draw: int

    def close(self, lower: bool, number: int, content: bytes) -> bytes:
        """Encrypt what one of the two sends; a number is for one content alone."""
        cipher = ChaCha20Poly1305(self.boxes[not lower])
        return cipher.encrypt(struct.pack("<Q4x", number), content, None)

    def open(self, lower: bool, number: int, closed: bytes) -> bytes:
        """Decrypt what one of the two sent under a number, or raise `InvalidTag`."""
        cipher = ChaCha20Poly1305(self.boxes[not lower])
        return cipher.decrypt(struct.pack("<Q4x", number), closed, None)

    def tag(self, lower: bool, statement: bytes) -> bytes:
        """Return the proof that one of the two says something, for the other."""
        return hmac.digest(self.tags[not lower], statement, "sha256")[:TAG_BYTES]


def pair_keys(secret: bytes, digest: bytes) -> PairKeys:
    """Return what two clients have for one exchange, given by its digest."""
    made = _derive(secret, b"exchange " + digest, 5 * KEY_BYTES + 8)
    keys = [made[at : at + KEY_BYTES] for at in range(0, 5 * KEY_BYTES, KEY_BYTES)]
    draw = int.from_bytes(made[5 * KEY_BYTES :], "little")
    return PairKeys(keys[0], (keys[1], keys[2]), (keys[3], keys[4]), draw)


def self_seed(secret: bytes, digest: bytes) -> bytes:
    """Return the seed of a client's own mask in one exchange, from its secret."""
    return _derive(secret, b"self " + digest)


def sign(client: int, other: int) -> int:
    """Return the sign that `client` gives to the mask it shares with `other`."""
    return 1 if other > client else -1


def add_mask(words: np.ndarray, seed: bytes, factor: int) -> None:
    """Add the mask of a seed, times 1 or -1, in place."""
    # A seed makes one mask, so that the nonce may be the same for all.
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    for start in range(0, words.size, _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        mask = np.frombuffer(stream.update(_ZEROS[: part.nbytes]), "<u8")
        if factor > 0:
            part += mask
        else:
            part -= mask


def _derive(secret: bytes, purpose: bytes, size: int = KEY_BYTES) -> bytes:
    info = b"fedbilevel secure mean 2 " + purpose
    return HKDF(hashes.SHA256(), size, salt=None, info=info).derive(secret)


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
    """Return Shamir's share for each point, any `needed` of which give the secret.

    Fewer reveal nothing. The field is that of the integers modulo the prime 2^127 - 1,
    so that a share has 16 bytes. Python's integers multiply in it fifty times as fast
    as `Crypto.Protocol.SecretSharing` does in its field of 2^128 elements, where 64
    sites would wait seconds.

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
