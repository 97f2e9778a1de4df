"""Who a site is, and whom it knows: keys that outlive a federation sign masking keys.

A masking key is made for one federation and sent through the server, which could send
another one. So a site signs it with the key of its node, and takes those of others only
if they are signed by the keys on its own list, which it got outside of the federation.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbilevel.errors import InvalidInputError
from fedbilevel.federation.signatures import (
    PrivateKey,
    PublicKey,
    is_signed,
    read_private_key,
    read_public_key,
    sign,
)
from fedbilevel.federation.wire import RefusedError

_PURPOSE = b"fedbilevel masking key"


class SiteIdentity:
    """The private key of client number `client`, and the public keys of all clients."""

    def __init__(
        self, client: int, private: PrivateKey, public: Sequence[PublicKey]
    ) -> None:
        self._private, self._public = private, tuple(public)
        numbers = [key.public_numbers() for key in self._public]
        twice = [k for k, one in enumerate(numbers) if numbers.index(one) != k]
        if twice:
            raise InvalidInputError(
                f"client {twice[0]} has the public key of client "
                f"{numbers.index(numbers[twice[0]])}. Give each site's own key, in the "
                "order of clients."
            )
        if numbers[client : client + 1] != [private.public_key().public_numbers()]:
            raise InvalidInputError(
                f"the public key listed for client {client} is not that of this site's "
                "private key. Give the keys of all clients, from client 0 on."
            )
        self._known: dict[int, tuple[str, bytes]] = {}  # what was checked last

    @staticmethod
    def read(client: int, private: Path, public: Sequence[Path]) -> "SiteIdentity":
        """Return the identity whose keys lie in files of ssh-keygen."""
        known = [read_public_key(path) for path in public]
        return SiteIdentity(client, read_private_key(private), known)

    def sign(self, federation: str, client: int, key: bytes) -> bytes:
        """Return the signature that goes with this site's masking key."""
        return sign(self._private, _PURPOSE, _statement(federation, client, key))

    def check(
        self,
        federation: str,
        keys: Mapping[int, bytes],
        signatures: Mapping[int, bytes],
    ) -> None:
        """Refuse masking keys, by client, that the clients did not sign themselves."""
        for client, key in sorted(keys.items()):
            if self._known.get(client) == (federation, key):
                continue
            if not 0 <= client < len(self._public):
                raise RefusedError("key", f"client {client} is not on this site's list")
            statement = _statement(federation, client, key)
            signature = signatures.get(client, b"")
            if not is_signed(self._public[client], _PURPOSE, statement, signature):
                raise RefusedError(
                    "key",
                    f"the masking key of client {client} is not signed by the key that "
                    "this site's list has for it",
                )
            self._known[client] = (federation, key)


def _statement(federation: str, client: int, key: bytes) -> bytes:
    name = federation.encode()
    return struct.pack("<QQ", len(name), client) + name + key
