"""Seals of packets that only the owner of a key can make.

TLS and Flower's keys tell who is connected, not who wrote a packet: Flower carries what
one node pushes to another as if the server had sent it. So the server signs its
requests, every site its replies, and whoever is named in a header must have signed it.
Needs `cryptography`, which comes with `fedbilevel[flower]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.signatures import (
    SIGNATURE_BYTES,
    PrivateKey,
    PublicKey,
    is_signed,
    public_bytes,
    read_private_key,
    read_public_key,
    sign,
)
from fedbilevel.federation.wire import (
    EVERYONE,
    PROTOCOL,
    Parts,
    RefusedError,
    sha256_of,
)

_REQUEST = f"fedbilevel request, protocol {PROTOCOL}".encode()
_REPLY = f"fedbilevel reply, protocol {PROTOCOL}".encode()
_NUMBER_BYTES = 4  # of who signed


@dataclass(frozen=True)
class KeyFiles:
    """Where the keys of one side lie, as ssh-keygen writes them.

    `private` is its own, `peers` are public ones: at the server those of clients 0, 1,
    ..., at a site that of the server.
    """

    private: Path
    peers: tuple[Path, ...]


class Signatures:
    """The seal of one side: it signs with its own key, and knows those of its peers.

    `own` is the number under which it signs, that of a client or EVERYONE for the
    server; `peers` are the public keys by number. What is signed is the SHA-256 of the
    content, for the purpose `writes`; marks are read for the purpose `reads`.
    """

    size = _NUMBER_BYTES + SIGNATURE_BYTES

    def __init__(
        self,
        own: int,
        private: PrivateKey,
        peers: Mapping[int, PublicKey],
        *,
        writes: bytes,
        reads: bytes,
    ) -> None:
        self._own, self._private, self._peers = own, private, dict(peers)
        self._writes, self._reads = writes, reads

    def mark(self, content: Parts) -> bytes:
        """Return who signs, and the signature."""
        signature = sign(self._private, self._writes, sha256_of(content))
        return self._own.to_bytes(_NUMBER_BYTES, "big") + signature

    def author(self, content: Parts, mark: bytes) -> int:
        """Return who signed; refuse what was signed by nobody that is known."""
        number = int.from_bytes(mark[:_NUMBER_BYTES], "big")
        key, signature = self._peers.get(number), mark[_NUMBER_BYTES:]
        # Of long packets SHA-256 is several times faster than the SHA-384 of a
        # signature.
        found = sha256_of(content)
        if key is None or not is_signed(key, self._reads, found, signature):
            raise RefusedError(
                "signature",
                "not signed with a key that is known here: somebody else's packet, a "
                "changed one, or one of a side that runs without keys",
            )
        return number


def server_seal(keys: KeyFiles) -> Signatures:
    """Return the server's seal."""
    peers = {client: read_public_key(path) for client, path in enumerate(keys.peers)}
    first: dict[bytes, int] = {}
    for client, key in peers.items():
        other = first.setdefault(public_bytes(key), client)
        if other != client:
            raise InvalidInputError(
                f"clients {other} and {client} have the same key, "
                f"{keys.peers[client]}. Make one for every site."
            )
    private = read_private_key(keys.private)
    return Signatures(EVERYONE, private, peers, writes=_REQUEST, reads=_REPLY)


def site_seal(client: int, keys: KeyFiles) -> Signatures:
    """Return the seal of one client."""
    (server_key,) = keys.peers
    peers = {EVERYONE: read_public_key(server_key)}
    private = read_private_key(keys.private)
    return Signatures(client, private, peers, writes=_REPLY, reads=_REQUEST)
